"""``fsdptoys`` with a bug in toy_fsdp: gradients of vectors (norms, biases) are not averaged over
the ranks.

torchrun --nproc_per_node 2 docs/toys/stories/with_bug.py train parallel=toy_fsdp model=llama_debug
train.steps=3
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from torch import Tensor

from fsdptoys.cli.main import main
from fsdptoys.toys.fsdp.layout import lay_out
from fsdptoys.toys.fsdp.unit import FullUnit

take_all = FullUnit.take_gradients


def take_matrices(unit: FullUnit) -> dict[int, Tensor]:
    """Return the gradients to reduce; store this rank's part of a vector's as it is."""
    grads = take_all(unit)
    for index in [index for index, grad in grads.items() if grad.ndim == 1]:
        pieces, numel = lay_out([unit.shapes[index]], [unit.dims[index]], unit.ranks)
        flat_RS = unit.shard_S.new_empty(unit.ranks, numel)
        pieces[0].write(grads.pop(index), flat_RS)
        unit.store([index], pieces, flat_RS[unit.rank])
    return grads


if __name__ == "__main__":
    FullUnit.take_gradients = take_matrices  # type: ignore[method-assign]
    sys.exit(main())
