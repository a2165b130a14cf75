"""``fsdptoys train`` as one rank of torchrun's, with torch_npu's fused operators computed by plain
matmuls.

Their schemas, and the autograd that calls their backwards, are torch_npu's own. The last line
counts the calls.
"""

import json
import sys

from fsdptoys.cli.main import main
from tests.harness.npu_stand_ins import CALLS, npu_operators

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    with npu_operators():
        status = main()
    print(json.dumps({"calls": CALLS}))
    sys.exit(status)
