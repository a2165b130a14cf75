"""Differences of tensors of a run over ranks from those of a reference.

Each rank compares the elements that it has with its shard of the reference, so that nothing is
gathered and replicas are compared too; one all-reduce of a few sums a run follows.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from fsdptoys.utils.dtensor import is_dtensor

Array = npt.NDArray[np.float32]
"""Values of a tensor; not a tensor, whose memory would end with the rank that sends it."""
Arrays = dict[str, Array]
"""Name of a tensor → values."""
NamedTensors = Iterable[tuple[str, Tensor]]
"""Names of parameters, with full tensors or DTensors."""
Key = tuple[int, str]
"""A step, and the name of a tensor."""


def arrays(tensors: NamedTensors) -> Arrays:
    """Copies of full tensors in host memory."""
    return {
        name: tensor.detach().to("cpu", torch.float32, copy=True).numpy()
        for name, tensor in tensors
    }


class Sums(NamedTuple):
    """A tensor against the reference: sums over all elements that the ranks have, copies
    included."""

    elements: float
    unequal: float
    """Ranks on which some element differs."""
    differences: float
    """Squares of differences."""
    squares: float


class Measure:
    """Compares tensors with a reference as a run passes them on.

    Args:
        reference: values of every tensor.
        device: of the collective that adds up the sums.
    """

    def __init__(
        self, reference: Mapping[Key, Array], device: torch.device | None = None
    ) -> None:
        self._expected = {
            key: torch.from_numpy(values) for key, values in reference.items()
        }
        self._rows = {key: row for row, key in enumerate(self._expected)}
        self._sums = torch.zeros(
            len(self._expected), len(Sums._fields), dtype=torch.float64
        )
        self._device = device

    @torch.no_grad()
    def add(self, step: int, tensors: NamedTensors) -> None:
        """Compare the tensors of a step."""
        for name, tensor in tensors:
            expected = self._expected[step, name]
            if is_dtensor(tensor):
                mesh = tensor.device_mesh
                placements = tensor.placements
                expected = distribute_tensor(
                    expected, mesh, placements, src_data_rank=None
                ).to_local()
                expected = expected.to("cpu")
                tensor = tensor.to_local()
            actual = tensor.detach().to("cpu", torch.float32)
            sums = self._sums[self._rows[step, name]]
            sums[0] += actual.numel()
            if not torch.equal(actual, expected):
                of_both = [
                    (actual - expected).double().square().sum(),
                    actual.double().square().sum(),
                ]
                sums[1:] += torch.stack([torch.ones((), dtype=torch.float64), *of_both])
            else:
                sums[3] += actual.double().square().sum()

    def total(self) -> dict[Key, Sums]:
        """Add up the sums over ranks. A collective if there are several."""
        sums = self._sums
        if dist.is_initialized():
            sums = sums.to(self._device)
            dist.all_reduce(sums)
        return {
            key: Sums(*row)
            for key, row in zip(self._expected, sums.tolist(), strict=True)
        }
