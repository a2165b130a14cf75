"""Muon's part of a step: matrices distributed over ranks in rounds, all other parameters updated by AdamW."""

from typing import NamedTuple

from fsdptoys.optim import MuonConfig
from fsdptoys.optim.newton_schulz import orthogonalize_flops
from fsdptoys.parallel.fsdp2 import placement

from .memory_ledger import Ledger
from .optimizer_step import Update
from .units import StepSetup

MOMENTUM_BYTES = 12 + 12  # Bytes moved by momentum and Nesterov's step for each element on a rank
APPLY_BYTES = 8 + 8  # Bytes moved by weight decay and the float32 update, besides the update's own


class Matrix(NamedTuple):
    """A matrix that this rank orthogonalizes or holds a shard of."""

    rows: int
    columns: int
    local: int  # Elements on this rank

    @property
    def elements(self) -> int:
        """Elements of the full matrix."""
        return self.rows * self.columns


class MuonUpdate(Update):
    """Muon on the device, as on the first rank, which owns the largest matrix of each round."""

    def __init__(self, setup: StepSetup, ledger: Ledger) -> None:
        super().__init__(setup, ledger)
        assert isinstance(self.optim, MuonConfig)
        self.steps, self.dtype = self.optim.ns_steps, self.optim.ns_dtype.torch
        self.replicated = not setup.config.parallel.shards_parameters
        self.ranks = setup.world_size if self.replicated else setup.shard_ranks
        self.matrix_elements = 0
        self.adamw_sizes: list[int] = []
        self.own: list[Matrix] = []  # Matrices that this rank orthogonalizes without an exchange
        self.exchanged: list[Matrix] = []
        in_blocks = self.units.in_blocks
        for unit, param, local in self.units.shards():
            if unit not in in_blocks or param.ndim < 2:
                self.adamw_sizes.append(local)
                continue
            self.matrix_elements += local
            rows, columns = param.shape[-2:]
            count = param.numel() // (rows * columns)
            chosen = placement(param, setup.shard_ranks)
            in_full = param.ndim == 3 and not self.replicated and (chosen is None or chosen.dim == 0)
            if in_full or self.ranks == 1:
                self.own += [Matrix(rows, columns, rows * columns)] * (local // (rows * columns))
            else:
                self.exchanged += [Matrix(rows, columns, local // count)] * count
        self.exchanged.sort(key=lambda matrix: -matrix.elements)

    def step(self) -> None:
        """Orthogonalize own matrices, then a round for every group of ``ranks`` others; update the rest by AdamW."""
        ledger, width = self.ledger, self.dtype.itemsize
        for matrix in self.own:
            self._orthogonalize(matrix, held_bytes=0)
        for start in range(0, len(self.exchanged), self.ranks):
            matrices = self.exchanged[start : start + self.ranks]
            local_bytes = width * sum(matrix.local for matrix in matrices)
            if self.replicated:
                self._orthogonalize(matrices[0], held_bytes=0)
                for matrix in matrices:
                    self._exchange("broadcast", width * matrix.elements)
                continue
            size = max(local_bytes, width * matrices[0].elements)
            self._exchange("all_to_all", size)
            self._orthogonalize(matrices[0], held_bytes=local_bytes)
            self._exchange("all_to_all", size)
            ledger.move(3 * 2 * local_bytes, 6)
        count = len(self.own) + len(self.exchanged)
        ledger.move((MOMENTUM_BYTES + APPLY_BYTES + 3 * width) * self.matrix_elements, 5 * max(1, count))
        if self.adamw_sizes:
            self.spend(self.cost(self.adamw_sizes))

    def _exchange(self, name: str, bytes: int) -> None:
        axis = "world" if self.replicated or self.setup.replicas == 1 else "shard"
        ends = self.ledger.communicate(name, bytes, self.ranks, 1, axis, self.ledger.compute)
        self.ledger.wait(ends, "communication")

    def _orthogonalize(self, matrix: Matrix, held_bytes: int) -> None:
        """Run Newton-Schulz on a matrix, with three copies of it and two small squares in memory."""
        size = self.dtype.itemsize * matrix.elements
        square = self.dtype.itemsize * min(matrix.rows, matrix.columns) ** 2
        self.ledger.spike_pieces([*([held_bytes] if held_bytes else []), *[size] * 3, square, square])
        flops = orthogonalize_flops(matrix.rows, matrix.columns, self.steps)
        bytes = self.steps * (6 * size + 4 * square)
        self.ledger.multiply(flops, bytes, str(self.dtype).removeprefix("torch."), 3 * self.steps)
        self.ledger.move(7 * size, 4)
