"""Muon: the hidden matrices move by their orthogonalised momentum, all other parameters by AdamW, in one optimizer.

The momentum of a matrix is mostly a few directions that all its rows share. Muon makes all directions equally long
(``newton_schulz``), for which it needs the matrix in full, and one state instead of AdamW's two.

So the matrices are dealt out, the largest first: in a round each rank is the owner of one. Where they are sharded
(DTensors), an all-to-all brings the shards to their owners in the number format of the products, the owners
orthogonalise, and a second one takes the shards back: a rank holds about four whole matrices at a time, sends as many
bytes as an all-gather and a reduce-scatter, and each matrix is orthogonalised once. Where every rank has them (DDP),
their owners broadcast what they made: the work is shared all the same, and copies of the model cannot drift apart. The
owner sees the very matrix that one process would see, so that its bits do not depend on the layout.

Stacks are taken matrix by matrix; those that are cut between matrices need no exchange. Under HSDP each replica does
the work of the others again.

Not covered: parameters that are cut elsewhere than along a dim (FSDP1, the toys' ZeRO), matrices that only some ranks
have gradients for, the next round's exchange during this one's products, one product for matrices of one shape.
Sources: https://kellerjordan.github.io/posts/muon/; Moonlight (arXiv:2502.16982) for decay and scale.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.utils.dtensor import (
    is_dtensor,
    local_tensor,
)

from .matrix_optimizer import BesideAdamW, Groups
from .newton_schulz import orthogonalise


def scale_to_adamw(rows: int, columns: int) -> float:
    """Factor that gives an update the usual root mean square of AdamW's, 0.2, whatever the shape (arXiv:2502.16982)."""
    return 0.2 * math.sqrt(max(rows, columns))


def scale_of_original(rows: int, columns: int) -> float:
    """Keller Jordan's factor: one spectral norm for all matrices but tall ones."""
    return math.sqrt(max(1.0, rows / columns))


class Muon(BesideAdamW):
    """Muon over groups that say so, and AdamW over the others. A step is a collective over those who share matrices.

    Args:
        groups, build_adamw: as for ``BesideAdamW``.
        momentum: decay of the mean of the gradients.
        nesterov: look ahead by one momentum step.
        steps: rounds of Newton-Schulz.
        dtype: number format of its products.
        scale: factor of the update of a matrix with so many rows and columns.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        momentum: float,
        nesterov: bool,
        steps: int,
        dtype: torch.dtype,
        scale: Callable[[int, int], float],
        build_adamw: Callable[[Groups], torch.optim.Optimizer],
    ) -> None:
        super().__init__(groups, build_adamw)
        self.momentum, self.nesterov, self.steps, self.dtype, self.scale = momentum, nesterov, steps, dtype, scale

    def make_matrix_states(self, param: nn.Parameter) -> dict[str, Any]:
        """The momentum."""
        return {"momentum_buffer": torch.zeros_like(param)}

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group that have a gradient. A collective."""
        matrices: list[Matrix] = []
        for param in group["params"]:
            if param.grad is not None:
                buffer = local_tensor(self.state[param]["momentum_buffer"])
                buffer.lerp_(local_tensor(param.grad), 1 - self.momentum)
                matrices += cut_matrices(param, buffer)
        whole = [matrix for matrix in matrices if matrix.ranks == 1]
        dealt = sorted((matrix for matrix in matrices if matrix.ranks > 1), key=lambda matrix: -matrix.elements)
        for matrix in whole:
            self._apply(matrix, self._orthogonalise(self._ahead(matrix)), group)
        while dealt:
            ranks = dealt[0].ranks
            this_round, dealt = dealt[:ranks], dealt[ranks:]
            exchange = _broadcast if dealt_whole(this_round) else _exchange
            for matrix, update in exchange(this_round, self._ahead, self._orthogonalise, self.dtype):
                self._apply(matrix, update, group)

    def _orthogonalise(self, update: Tensor) -> Tensor:
        return orthogonalise(update, self.steps)

    def _ahead(self, matrix: "Matrix") -> Tensor:
        """What is orthogonalised, of what this rank holds."""
        update = matrix.grad.lerp(matrix.buffer, self.momentum) if self.nesterov else matrix.buffer
        return update.to(self.dtype)

    def _apply(self, matrix: "Matrix", update: Tensor, group: dict[str, Any]) -> None:
        matrix.param.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.param.add_(update.to(matrix.param.dtype), alpha=-group["lr"] * self.scale(*matrix.shape))


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix, and what this rank holds of it: views of parameter, gradient and momentum."""

    shape: tuple[int, int]
    param: Tensor
    grad: Tensor
    buffer: Tensor
    dim: int | None
    """Along which it is cut over the ranks of the group; None where each has it in full."""
    group: dist.ProcessGroup | None
    """The ranks that share the work; None where this one does its own."""

    @property
    def elements(self) -> int:
        """Of the matrix in full."""
        return self.shape[0] * self.shape[1]

    @property
    def ranks(self) -> int:
        """That share the work."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def lengths(self) -> list[int]:
        """Rows or columns that each rank holds: those of ``torch.chunk``."""
        assert self.dim is not None
        size = self.shape[self.dim]
        chunk = -(-size // self.ranks)
        return [min(chunk, max(0, size - rank * chunk)) for rank in range(self.ranks)]

    def sizes(self) -> list[int]:
        """Elements that each rank holds."""
        assert self.dim is not None
        return [length * self.shape[1 - self.dim] for length in self.lengths()]


Ahead = Callable[[Matrix], Tensor]
"""Gives what is orthogonalised, of what this rank holds of a matrix."""
Work = Callable[[Tensor], Tensor]
"""What an owner does with it in full."""


def dealt_whole(matrices: Sequence[Matrix]) -> bool:
    """Whether every rank has the matrices of a round in full."""
    kinds = {matrix.dim is None for matrix in matrices}
    assert len(kinds) == 1, "a strategy shards all matrices or none"
    return kinds.pop()


def cut_matrices(param: nn.Parameter, buffer: Tensor) -> list[Matrix]:
    """A parameter's matrices, of which a stack has several, as this rank holds them.

    Args:
        param: with a gradient; of two or three dims, plain or a DTensor that is sharded along one of them.
        buffer: this rank's momentum.
    """
    dim, group = _layout(param)
    local, grad = local_tensor(param.detach()), local_tensor(param.grad)  # type: ignore[arg-type]
    rows, columns = param.shape[-2:]
    if param.ndim == 2:
        return [Matrix((rows, columns), local, grad, buffer, dim, group)]
    if dim == 0:
        # Each rank has matrices of its own.
        dim, group = None, None
    inner = None if dim is None else dim - 1
    return [
        Matrix((rows, columns), *views, inner, group)
        for views in zip(local.unbind(), grad.unbind(), buffer.unbind(), strict=True)
    ]


def _layout(param: nn.Parameter) -> tuple[int | None, dist.ProcessGroup | None]:
    """Along which dim a parameter is cut, and the ranks that share it or have it too, where there are several."""
    if not is_dtensor(param):
        shared = dist.is_initialized() and dist.get_world_size() > 1
        return None, dist.group.WORLD if shared else None
    from torch.distributed.tensor import Shard

    for axis, placement in enumerate(param.placements):
        if isinstance(placement, Shard) and param.device_mesh.size(axis) > 1:
            return placement.dim, param.device_mesh.get_group(axis)
    return None, None


def _exchange(matrices: list[Matrix], ahead: Ahead, work: Work, dtype: torch.dtype) -> Iterator[tuple[Matrix, Tensor]]:
    """Have each rank do the work on one matrix of a round, of which all hold parts; gives this rank's parts."""
    group, rank = matrices[0].group, dist.get_rank(matrices[0].group)
    parts = [ahead(matrix) for matrix in matrices]
    given = [part.numel() for part in parts] + [0] * (matrices[0].ranks - len(matrices))
    mine = matrices[rank] if rank < len(matrices) else None
    taken = mine.sizes() if mine is not None else [0] * len(given)
    sent = torch.cat([part.reshape(-1) for part in parts])
    del parts
    received = torch.empty(sum(taken), dtype=dtype, device=sent.device)
    dist.all_to_all_single(received, sent, taken, given, group=group)
    if mine is not None:
        assert mine.dim is not None
        other = mine.shape[1 - mine.dim]
        shapes = [(length, other) if mine.dim == 0 else (other, length) for length in mine.lengths()]
        whole = torch.cat(
            [part.view(shape) for part, shape in zip(received.split(taken), shapes, strict=True)], dim=mine.dim
        )
        del received
        whole = work(whole)
        received = torch.cat([part.reshape(-1) for part in whole.split(mine.lengths(), dim=mine.dim)])
        del whole
    dist.all_to_all_single(sent, received, given, taken, group=group)
    for matrix, piece in zip(matrices, sent.split(given), strict=False):
        yield matrix, piece.view(matrix.param.shape)


def _broadcast(matrices: list[Matrix], ahead: Ahead, work: Work, dtype: torch.dtype) -> Iterator[tuple[Matrix, Tensor]]:
    """Have each rank do the work on one matrix of a round, all of which all have; gives what they made."""
    group, rank = matrices[0].group, dist.get_rank(matrices[0].group)
    mine = work(ahead(matrices[rank])) if rank < len(matrices) else None
    for owner, matrix in enumerate(matrices):
        if owner == rank:
            assert mine is not None
            update = mine
        else:
            update = torch.empty(matrix.shape, dtype=dtype, device=matrix.param.device)
        dist.broadcast(update, owner, group=group)
        yield matrix, update
