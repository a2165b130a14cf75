"""Muon's part of a step that is walked through: matrices dealt out in rounds, all other parameters by AdamW."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdptoys.optim.config import MuonConfig
from fsdptoys.optim.newton_schulz import orthogonalise_flops
from fsdptoys.parallel import DDPConfig, FSDP2Config
from fsdptoys.parallel.fsdp2 import placement

from .optimizer_step import Update

if TYPE_CHECKING:
    from .step_model import StepModel

MOMENTUM_BYTES = 12 + 12
"""Traffic of the momentum and the look ahead, for each element that a rank holds."""
APPLY_BYTES = 8 + 8
"""Traffic of decay and update in float32, besides the update itself."""


@dataclass(frozen=True)
class Dealt:
    """A matrix that a rank has to do with."""

    rows: int
    columns: int
    local: int
    """Elements that the rank holds of it."""

    @property
    def elements(self) -> int:
        """In full."""
        return self.rows * self.columns


class MuonUpdate(Update):
    """On the device; what the first rank does, which owns the largest matrix of each round."""

    def __init__(self, walk: "StepModel") -> None:
        super().__init__(walk)
        assert isinstance(walk.config.optim, MuonConfig)
        self.optim = walk.config.optim
        ranks = walk.setup.shard_ranks if isinstance(walk.config.parallel, FSDP2Config) else 1
        self.whole = isinstance(walk.config.parallel, DDPConfig)
        self.ranks = walk.setup.world_size if self.whole else ranks
        in_blocks = {unit for block in walk.units.blocks for unit in block.values()}
        self.of_matrices: list[int] = []
        self.of_others: list[int] = []
        self.own: list[Dealt] = []
        """That this rank orthogonalises without any exchange."""
        self.dealt: list[Dealt] = []
        for unit in walk.units.in_forward():
            for param, local in zip(unit.params, unit.local, strict=True):
                if unit not in in_blocks or param.ndim < 2:
                    self.of_others.append(local)
                    continue
                self.of_matrices.append(local)
                rows, columns = param.shape[-2:]
                count = param.numel() // (rows * columns)
                chosen = placement(param, ranks)
                apart = param.ndim == 3 and not self.whole and (chosen is None or chosen.dim == 0)
                if apart or self.ranks == 1:
                    held = local // (rows * columns)
                    self.own += [Dealt(rows, columns, rows * columns)] * held
                else:
                    self.dealt += [Dealt(rows, columns, local // count)] * count
        self.dealt.sort(key=lambda matrix: -matrix.elements)

    def step(self) -> None:
        """Update all."""
        ledger = self.walk.ledger
        width = self.optim.ns_dtype.torch.itemsize
        for matrix in self.own:
            self._orthogonalise(matrix, beside=0)
        axis = "world" if self.whole or self.walk.setup.replicas == 1 else "shard"
        for start in range(0, len(self.dealt), self.ranks):
            dealt = self.dealt[start : start + self.ranks]
            bytes = width * sum(matrix.local for matrix in dealt)
            if self.whole:
                self._orthogonalise(dealt[0], beside=0)
                for matrix in dealt:
                    size = width * matrix.elements
                    ends = ledger.communicate("broadcast", size, self.ranks, 1, axis, ledger.compute)
                    ledger.wait(ends, "communication")
                continue
            for exchange in range(2):
                size = max(bytes, width * dealt[0].elements)
                ends = ledger.communicate("all_to_all", size, self.ranks, 1, axis, ledger.compute)
                ledger.wait(ends, "communication")
                if exchange == 0:
                    self._orthogonalise(dealt[0], beside=bytes)
            ledger.move(3 * 2 * bytes, 6)
        held = sum(self.of_matrices)
        count = len(self.own) + len(self.dealt)
        ledger.move((MOMENTUM_BYTES + APPLY_BYTES + 3 * width) * held, 5 * max(1, count))
        if self.of_others:
            self.compute(self.of_others)

    def _orthogonalise(self, matrix: Dealt, beside: int) -> None:
        """Take the products of a matrix, with the matrix, two more like it and two small squares."""
        steps, dtype = self.optim.ns_steps, self.optim.ns_dtype.torch
        size, square = dtype.itemsize * matrix.elements, dtype.itemsize * min(matrix.rows, matrix.columns) ** 2
        pieces = [*([beside] if beside else []), *[size] * 3, square, square]
        self.walk.ledger.spike(sum(pieces), pieces=pieces)
        flops = orthogonalise_flops(matrix.rows, matrix.columns, steps)
        bytes = steps * (6 * size + 4 * square)
        self.walk.ledger.multiply(flops, bytes, str(dtype).removeprefix("torch."), 3 * steps)
        self.walk.ledger.move(7 * size, 4)
