"""Step model of DDP and of a single process, where every rank holds all parameters.

After ``torch/nn/parallel/distributed.py`` and ``parallel/precision.py``. Not covered: DDP's smaller first bucket.
"""

from fsdptoys.metrics.prediction import Category
from fsdptoys.parallel import DDPConfig

from .step_model import StepModel
from .units import UnitBytes


class ReplicatedStepModel(StepModel):
    """DDP and single process."""

    def construct(self) -> None:
        """Allocate the parameters, DDP's buckets, and the copies that the last forward cast."""
        self.elements = self.units.local_elements
        self.casts = self.setup.compute_bytes == 2
        self.ddp = not self.config.parallel.single_process
        self.gradient_bytes = 0
        self.reduced = 0.0  # End of the last reduction
        self.bucket_elements = 0  # Elements in the current bucket
        sizes = [param.numel() for unit in self.units.in_forward() for param in unit.params]
        self.copies = [2 * size for size in sizes] if self.casts else []
        self.ledger.add(Category.parameters, *(4 * size for size in sizes))
        if self.ddp:
            self.ledger.add(Category.gradients, 4 * self.elements)
        self.ledger.add(Category.gathered_parameters, *self.copies)
        self.update.construct()

    def begin_forward(self) -> None:
        """Cast all parameters, then free the old copies."""
        if self.casts:
            if self.first:
                for unit in self.units.in_forward():
                    self.update.before_forward(unit, self.free_gradients)
            self.ledger.add(Category.gathered_parameters, *self.copies)
            self.ledger.move(6 * self.elements, len(self.copies))
            self.ledger.add(Category.gathered_parameters, *(-size for size in self.copies))

    def _enter(self, unit: UnitBytes) -> None:
        if not self.casts:
            super()._enter(unit)

    def after_backward(self, unit: UnitBytes) -> None:
        """Accumulate gradients, unless they belong to cast copies, which keep them until the end of the backward."""
        if self.casts:
            return
        self._accumulate(unit)
        if self.ddp and self.last:
            self._fill_buckets(unit)

    def end_backward(self) -> None:
        """Move the copies' gradients to the parameters, and let DDP reduce the rest."""
        ledger = self.ledger
        if self.casts:
            joins = self.ddp or self.gradient_bytes > 0
            for unit in self.units.in_forward():
                pieces = [4 * param.numel() for param in unit.params]
                # One parameter after the other.
                if joins or self.update.in_backward:
                    ledger.spike(max(pieces))
                else:
                    ledger.add(Category.gradients, *pieces)
                    self.gradient_bytes += sum(pieces)
                ledger.move((18 if joins else 6) * unit.elements, len(pieces))
                self.release_gradients(unit)
                if self.update.in_backward:
                    self.update.update_in_backward(unit)
            if self.ddp and self.last:
                for unit in reversed(self.units.in_forward()):
                    self._fill_buckets(unit)
        if self.bucket_elements:
            self._all_reduce()
        ledger.wait(self.reduced, "communication")

    def _accumulate(self, unit: UnitBytes) -> None:
        """Add a unit's gradients in float32."""
        self.release_gradients(unit)
        pieces = [4 * param.numel() for param in unit.params]
        if self.update.in_backward:
            self.ledger.spike(*pieces)  # the real ones come one by one
            self.update.update_in_backward(unit)
        elif self.ddp or not self.first:
            self.ledger.move(3 * sum(pieces), max(1, len(pieces)))
        elif pieces:
            self.ledger.add(Category.gradients, *pieces)
            self.gradient_bytes += sum(pieces)

    def _fill_buckets(self, unit: UnitBytes) -> None:
        """Put a unit's gradients into buckets, and reduce each as soon as it has reached its size."""
        assert isinstance(self.config.parallel, DDPConfig)
        for param in reversed(unit.params):
            self.bucket_elements += param.numel()
            if 4 * self.bucket_elements >= self.config.parallel.bucket_cap_mb * 2**20:
                self._all_reduce()

    def _all_reduce(self) -> None:
        ledger, width = self.ledger, self.setup.reduce_bytes
        bytes, self.bucket_elements = self.bucket_elements * width, 0
        if width != 4:
            ledger.spike(bytes)
        after = max(self.reduced, ledger.compute)
        self.reduced = ledger.communicate("all_reduce", bytes, self.setup.world_size, 1, "world", after)

    def free_gradients(self, elements: int | None = None) -> None:
        """Free gradients outside DDP's buckets."""
        freed = self.gradient_bytes if elements is None else min(self.gradient_bytes, 4 * elements)
        self.ledger.add(Category.gradients, -freed)
        self.gradient_bytes -= freed
