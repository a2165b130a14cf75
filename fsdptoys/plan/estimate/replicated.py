"""What DDP and one process do around a module's forward and backward, where every rank has everything.

After ``torch/nn/parallel/distributed.py`` and ``parallel/precision.py``. Not covered: DDP's first bucket, which is
smaller than the others.
"""

from fsdptoys.metrics.prediction import Category
from fsdptoys.parallel import DDPConfig

from .step_model import StepModel
from .units import UnitBytes


class ReplicatedStepModel(StepModel):
    """DDP and one process: every rank has everything."""

    def construct(self) -> None:
        """Hold the parameters, and DDP's buckets."""
        self.elements = self.local
        self.casts = self.setup.compute_bytes == 2
        self.ddp = isinstance(self.config.parallel, DDPConfig)
        self.gradient_bytes = 0
        self.copies = 0
        self.reduced = 0.0
        self.filled = 0
        """Elements in the bucket that is being filled."""
        sizes = [param.numel() for unit in self.units.in_forward() for param in unit.params]
        self.ledger.add(Category.parameters, 4 * self.elements, pieces=[4 * size for size in sizes])
        if self.ddp:
            self.ledger.add(Category.gradients, 4 * self.elements)
        self.copied = [2 * size for size in sizes]
        if self.casts:
            # Those that the last forward left.
            self.copies = 2 * self.elements
            self.ledger.add(Category.gathered_parameters, self.copies, pieces=self.copied)
        self.update.construct()

    def begin_forward(self) -> None:
        """Cast all parameters; the old copies go when the new ones are there."""
        if self.casts:
            if self.first:
                for unit in self.units.in_forward():
                    self.update.before_forward(unit)
            self.ledger.add(Category.gathered_parameters, self.copies, pieces=self.copied)
            self.ledger.move(6 * self.elements, sum(len(unit.params) for unit in self.units.in_forward()))
            self.ledger.add(Category.gathered_parameters, -self.copies, pieces=self.copied)

    def _enter(self, unit: UnitBytes) -> None:
        if not self.casts:
            super()._enter(unit)

    def enter(self, unit: UnitBytes) -> None:
        """Everything is there."""

    def leave(self, unit: UnitBytes) -> None:
        """Everything stays."""

    def before_backward(self, unit: UnitBytes) -> None:
        """Everything is there."""

    def after_backward(self, unit: UnitBytes) -> None:
        """Gradients add up; where the forward computed on copies, theirs stay until all are there."""
        if self.casts:
            return
        self._whole(unit)
        if self.ddp and self.last:
            self._fill_buckets(unit)

    def end_backward(self) -> None:
        """Copies' gradients become the parameters', and DDP reduces what is left."""
        ledger = self.ledger
        if self.casts:
            joins = self.ddp or self.gradient_bytes > 0
            for unit in self.units.in_forward():
                pieces = [4 * param.numel() for param in unit.params]
                # One parameter after the other.
                if joins or self.update.in_backward:
                    ledger.spike(max(pieces))
                else:
                    ledger.add(Category.gradients, sum(pieces), pieces=pieces)
                    self.gradient_bytes += sum(pieces)
                ledger.move((18 if joins else 6) * unit.elements, len(pieces))
                self.release_gradients(unit)
                if self.update.in_backward:
                    self.update.update_in_backward(unit)
            if self.ddp and self.last:
                for unit in reversed(self.units.in_forward()):
                    self._fill_buckets(unit)
        if self.filled:
            self._all_reduce()
        ledger.wait(self.reduced, "communication")

    def _whole(self, unit: UnitBytes) -> None:
        """A unit's gradients are there, in float32."""
        self.release_gradients(unit)
        pieces = [4 * param.numel() for param in unit.params]
        if self.update.in_backward:
            self.ledger.spike(sum(pieces), pieces=pieces)  # all of a unit's, where really they go one by one
            self.update.update_in_backward(unit)
        elif self.ddp or not self.first:
            self.ledger.move(3 * sum(pieces), max(1, len(pieces)))
        elif pieces:
            self.ledger.add(Category.gradients, sum(pieces), pieces=pieces)
            self.gradient_bytes += sum(pieces)

    def _fill_buckets(self, unit: UnitBytes) -> None:
        """Put a unit's gradients into buckets, whole, and reduce each as soon as it has its size or more."""
        assert isinstance(self.config.parallel, DDPConfig)
        for param in reversed(unit.params):
            self.filled += param.numel()
            if 4 * self.filled >= self.config.parallel.bucket_cap_mb * 2**20:
                self._all_reduce()

    def _all_reduce(self) -> None:
        ledger, width = self.ledger, self.setup.reduce_bytes
        bytes, self.filled = self.filled * width, 0
        if width != 4:
            ledger.spike(bytes)
        after = max(self.reduced, ledger.compute)
        self.reduced = ledger.communicate("all_reduce", bytes, self.setup.world_size, 1, "world", after)

    def free_gradients(self, elements: int | None = None) -> None:
        """Those that are not in DDP's buckets."""
        freed = self.gradient_bytes if elements is None else min(self.gradient_bytes, 4 * elements)
        self.ledger.add(Category.gradients, -freed)
        self.gradient_bytes -= freed
