"""Muon: matrices of the blocks move by their orthogonalized momentum, all other parameters by AdamW, in one optimizer.

Matrices are dealt out to ranks, the largest first: in a round each rank owns one. If they are sharded (DTensors), an
all-to-all brings the shards to their owners in the dtype of the matmuls, the owners orthogonalize (``newton_schulz``),
and a second all-to-all returns the shards: a rank holds about four full matrices at a time, and sends as many bytes as
an all-gather and a reduce-scatter. If every rank has them in full (DDP), owners broadcast the result, so replicas
cannot drift apart. The owner sees the same matrix as one process would: bits do not depend on the layout.

Stacks are updated matrix by matrix; stacks sharded between matrices need no exchange. Under HSDP each replica repeats
the work.

Not covered: parameters not sharded along a dim (FSDP1, the toys' ZeRO), matrices that only some ranks have gradients
for, overlap of exchange and matmuls, batched matmuls for matrices of one shape.
Sources: https://kellerjordan.github.io/posts/muon/; Moonlight (arXiv:2502.16982) for decay and scale.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.utils.bounds import at_least, between
from fsdptoys.utils.dtensor import is_dtensor, local_tensor

from .adamw import AdamWSettings
from .config import check_nesterov
from .matrix_optimizer import MATRICES, Groups, MatrixOptimizer
from .newton_schulz import orthogonalize

MOST_NS_STEPS = 99
"""The limit of ``torch.optim.Muon``."""


class MatmulDType(Enum):
    """dtype of Newton-Schulz's matmuls, and of the exchanged shards."""

    auto = "auto"
    """bfloat16; float32 with ``train.deterministic=true``."""
    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype; ``auto`` must be resolved."""
        assert self is not MatmulDType.auto
        return torch.float32 if self is MatmulDType.float32 else torch.bfloat16


class UpdateScale(Enum):
    """Length of an orthogonalized update."""

    match_adamw = "match_adamw"
    """``0.2 * sqrt(max(rows, columns))``: AdamW's usual root mean square, for AdamW's learning rates."""
    original = "original"
    """``sqrt(max(1, rows / columns))``, for learning rates of about 0.02."""


@dataclass
class MuonConfig(AdamWSettings):
    """Muon for the blocks' matrices, AdamW for everything else (https://kellerjordan.github.io/posts/muon/)."""

    name: ClassVar[str] = "muon"
    exchanges_matrices: ClassVar[bool] = True

    momentum: float = field(default=0.95, metadata=between(0, 1, below=True))
    """Decay of the mean of the matrices' gradients."""
    nesterov: bool = True
    """Look ahead by one momentum step."""
    ns_steps: int = field(default=5, metadata=between(1, MOST_NS_STEPS))
    """Rounds of Newton-Schulz."""
    ns_dtype: MatmulDType = MatmulDType.auto
    """dtype of its matmuls."""
    update_scale: UpdateScale = UpdateScale.match_adamw
    """Length of an orthogonalized update."""
    adamw_lr: float | None = field(default=None, metadata=at_least(0, 1e6))
    """Highest learning rate of AdamW's part; null for ``lr``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nesterov(self.momentum, self.nesterov, fix=0.95)

    def is_matrix(self, shape: Sequence[int], in_block: bool) -> bool:
        """Whether a parameter is orthogonalized."""
        return in_block and len(shape) >= 2

    def state_bytes(self, shape: Sequence[int], elements: int, in_block: bool) -> tuple[int, ...]:
        """Bytes of the momentum in float32 for matrices, of AdamW's moments for the rest."""
        return (4 * elements,) if self.is_matrix(shape, in_block) else super().state_bytes(shape, elements, in_block)

    def resolve(self, deterministic: bool) -> None:
        """Choose the dtype of the matmuls."""
        if self.ns_dtype is MatmulDType.auto:
            self.ns_dtype = MatmulDType.float32 if deterministic else MatmulDType.bfloat16

    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct Muon with its AdamW."""
        for group in params:
            of_adamw = self.lr if self.adamw_lr is None else self.adamw_lr
            group["lr"] = self.lr if group[MATRICES] else of_adamw
        return Muon(
            params,
            momentum=self.momentum,
            nesterov=self.nesterov,
            steps=self.ns_steps,
            dtype=self.ns_dtype.torch,
            scale=adamw_scale if self.update_scale is UpdateScale.match_adamw else original_scale,
            build_adamw=self.build_adamw,
        )


def adamw_scale(rows: int, columns: int) -> float:
    """Factor that gives an update AdamW's usual root mean square, 0.2, for any shape (arXiv:2502.16982)."""
    return 0.2 * math.sqrt(max(rows, columns))


def original_scale(rows: int, columns: int) -> float:
    """Keller Jordan's factor: one spectral norm for all but tall matrices."""
    return math.sqrt(max(1.0, rows / columns))


class Muon(MatrixOptimizer):
    """Muon over groups with ``MATRICES``, AdamW over the others. A step is a collective.

    Args:
        groups, build_adamw: as for ``MatrixOptimizer``.
        momentum: decay of the mean of the gradients.
        nesterov: look ahead by one momentum step.
        steps: rounds of Newton-Schulz.
        dtype: dtype of its matmuls.
        scale: ``scale(rows, columns)`` is the factor of an update.
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
        """A momentum of zeros."""
        return {"momentum_buffer": torch.zeros_like(param)}

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group that have a gradient. A collective."""
        matrices: list[Matrix] = []
        for param in group["params"]:
            if param.grad is not None:
                buffer = local_tensor(self.state[param]["momentum_buffer"])
                buffer.lerp_(local_tensor(param.grad), 1 - self.momentum)
                matrices += split_matrices(param, buffer)
        whole = [matrix for matrix in matrices if matrix.ranks == 1]
        dealt = sorted((matrix for matrix in matrices if matrix.ranks > 1), key=lambda matrix: -matrix.elements)
        for matrix in whole:
            self._apply(matrix, self._orthogonalize(self._momentum_step(matrix)), group)
        while dealt:
            ranks = dealt[0].ranks
            this_round, dealt = dealt[:ranks], dealt[ranks:]
            exchange = _broadcast if dealt_whole(this_round) else _exchange
            for matrix, update in exchange(this_round, self._momentum_step, self._orthogonalize, self.dtype):
                self._apply(matrix, update, group)

    def _orthogonalize(self, update: Tensor) -> Tensor:
        return orthogonalize(update, self.steps)

    def _momentum_step(self, matrix: "Matrix") -> Tensor:
        """This rank's part of the matrix to orthogonalize."""
        update = matrix.grad.lerp(matrix.buffer, self.momentum) if self.nesterov else matrix.buffer
        return update.to(self.dtype)

    def _apply(self, matrix: "Matrix", update: Tensor, group: dict[str, Any]) -> None:
        matrix.param.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.param.add_(update.to(matrix.param.dtype), alpha=-group["lr"] * self.scale(*matrix.shape))


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix, as views of this rank's part of parameter, gradient and momentum."""

    shape: tuple[int, int]
    param: Tensor
    grad: Tensor
    buffer: Tensor
    dim: int | None
    """Sharded dim; None where each rank of the group has the matrix in full."""
    group: dist.ProcessGroup | None
    """The ranks that share the work; None where this rank works alone."""

    @property
    def elements(self) -> int:
        """Elements of the full matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def ranks(self) -> int:
        """Number of ranks that share the work."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def lengths(self) -> list[int]:
        """Rows or columns of each rank, as ``torch.chunk`` splits them."""
        assert self.dim is not None
        size = self.shape[self.dim]
        chunk = -(-size // self.ranks)
        return [min(chunk, max(0, size - rank * chunk)) for rank in range(self.ranks)]

    def sizes(self) -> list[int]:
        """Elements of each rank."""
        assert self.dim is not None
        return [length * self.shape[1 - self.dim] for length in self.lengths()]


LocalPart = Callable[[Matrix], Tensor]
"""Returns this rank's part of the matrix to orthogonalize."""
Work = Callable[[Tensor], Tensor]
"""An owner's work on the full matrix."""


def dealt_whole(matrices: Sequence[Matrix]) -> bool:
    """Whether every rank has the matrices of a round in full."""
    kinds = {matrix.dim is None for matrix in matrices}
    assert len(kinds) == 1, "a strategy shards all matrices or none"
    return kinds.pop()


def split_matrices(param: nn.Parameter, buffer: Tensor) -> list[Matrix]:
    """This rank's part of a parameter's matrices; a stack has several.

    Args:
        param: with a gradient; of two or three dims, plain or a DTensor sharded along one of them.
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
    """Sharded dim of a parameter, and the ranks that share it or replicate it, if several."""
    if not is_dtensor(param):
        shared = dist.is_initialized() and dist.get_world_size() > 1
        return None, dist.group.WORLD if shared else None
    from torch.distributed.tensor import Shard

    for axis, placement in enumerate(param.placements):
        if isinstance(placement, Shard) and param.device_mesh.size(axis) > 1:
            return placement.dim, param.device_mesh.get_group(axis)
    return None, None


def _exchange(
    matrices: list[Matrix], local_part: LocalPart, work: Work, dtype: torch.dtype
) -> Iterator[tuple[Matrix, Tensor]]:
    """Each rank works on one matrix of a round, sharded over all; yields this rank's part of the results."""
    group, rank = matrices[0].group, dist.get_rank(matrices[0].group)
    parts = [local_part(matrix) for matrix in matrices]
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


def _broadcast(
    matrices: list[Matrix], local_part: LocalPart, work: Work, dtype: torch.dtype
) -> Iterator[tuple[Matrix, Tensor]]:
    """Each rank works on one matrix of a round, replicated on all; yields the results."""
    group, rank = matrices[0].group, dist.get_rank(matrices[0].group)
    mine = work(local_part(matrices[rank])) if rank < len(matrices) else None
    for owner, matrix in enumerate(matrices):
        if owner == rank:
            assert mine is not None
            update = mine
        else:
            update = torch.empty(matrix.shape, dtype=dtype, device=matrix.param.device)
        dist.broadcast(update, owner, group=group)
        yield matrix, update
