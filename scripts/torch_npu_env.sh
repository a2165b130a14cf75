#!/usr/bin/env bash
# Makes the environment of `pytest -m torch_npu`, or leaves it as it is: `bash scripts/torch_npu_env.sh [folder]`.
#
# It holds torch_npu's wheels, which pip downloads once (70 MB), over a stub of CANN that g++ compiles; everything else is
# that of PYTHON (or the active virtual environment's, or PATH's python3), whose torch must be the wheel's. No NPU, no CANN.
# With another folder than .venv-torch-npu, tell the tests: TORCH_NPU_ENV=folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-}
if [[ -z $python ]]; then
  python=python3
  [[ ! -x ${VIRTUAL_ENV:-}/bin/python ]] || python=$VIRTUAL_ENV/bin/python
fi
for tool in g++ nm; do
  command -v "$tool" >/dev/null || { echo "torch_npu_env.sh: $tool is missing (Debian, Ubuntu: apt install g++ binutils)" && exit 1; }
done
PYTHONPATH=$PWD TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$python" -m tests.torch_npu.environment "${1:-.venv-torch-npu}"
