"""Interface between the trainer and an optimizer's steps: taken after the backward, bucket by
bucket, or within it.

``OptimizerStepper`` is the plain form, with ``BucketedStepper`` and ``OptimizerInBackward`` as
subclasses. The trainer calls ``clip`` and ``step`` once a step, and ``finish`` before anything but
a forward reads parameters.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

MapParts = Callable[[Callable[[Tensor], Tensor], list[Tensor]], Iterable[Tensor]]
"""Like the builtin ``map``, over parts of gradients."""

BeforeUpdate = Callable[[nn.Parameter, Tensor], None]
"""Receives a parameter that is about to be updated, and its gradient, which it may change."""


class GradientNorms(Protocol):
    """The methods of a strategy that clip gradients."""

    def clip_grad_norm(
        self,
        max_norm: float,
        scale_by: Callable[[Tensor], None] | None = None,
        map_parts: MapParts = map,
        unscale: float = 1.0,
    ) -> Tensor:
        """Multiply gradients by ``unscale`` and clip them to ``max_norm``; return their norm in
        between."""

    def total_norm(self, norms: list[Tensor]) -> Tensor:
        """Norm over all ranks, from norms of this rank's parts."""


class OptimizerStepper:
    """Takes each step of an optimizer at once, after the backward; ``threads`` serve parameters in
    host memory."""

    unit_by_unit: ClassVar[bool] = False
    """Whether units may be updated one by one, so that all-gathers cannot share a preparation after
    ``step``."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, threads: int | None = None
    ) -> None:
        self.optimizer = optimizer
        self.after_update: Callable[[], None] = lambda: None
        """Called after each ``step`` that may have changed parameters."""
        self._with_threads = (
            nullcontext if threads is None else functools.partial(cpu_threads, threads)
        )

    @property
    def skips_on_device(self) -> bool:
        """Whether ``step`` reads no flag on the host: the optimizer's kernels decide on the device.

        They also clip, so that ``clip`` need not pass over the gradients.
        """
        return getattr(self.optimizer, "skips_on_device", False)

    @property
    def steps_taken(self) -> int | None:
        """Steps so far, if updates depend on the count."""
        return None

    @property
    def held_gradients(self) -> Sequence[Tensor]:
        """Gradients of pending updates, which ``param.grad`` does not hold any more."""
        return ()

    def restore(self, steps_taken: int | None) -> None:
        """Continue counting from a checkpoint's ``steps_taken``; None from runs that did not
        count."""

    def before_update(self, hook: BeforeUpdate) -> None:
        """Call ``hook`` right before each update of a parameter that has a gradient.

        The gradient is scaled and clipped, unless the optimizer's kernel does it
        (``skips_on_device``). A deferred update calls the hook later, on the thread that updates.
        """

        @torch.no_grad()
        def call(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        hook(param, param.grad)

        self.optimizer.register_step_pre_hook(call)

    def clip(
        self, norms: GradientNorms, max_norm: float, unscale: float = 1.0
    ) -> Tensor:
        """Multiply the gradients of the next step by ``unscale``, and scale them down to
        ``max_norm``.

        Returns their norm in between. A collective.
        """
        with self._with_threads():
            scale_by = self._scale_in_step if self.skips_on_device else None
            return norms.clip_grad_norm(max_norm, scale_by, unscale=unscale)

    def _scale_in_step(self, factor: Tensor) -> None:
        self.optimizer.grad_scale = factor.reciprocal()  # type: ignore[attr-defined]

    def step(self, skip: Tensor | bool = False) -> None:
        """Take the optimizer's step, or begin it.

        Args:
            skip: whether to leave parameters and states unchanged. A float32 scalar on the device,
                1 or 0, is read there by optimizers that can; for others it costs one device sync.
        """
        if not isinstance(skip, Tensor) or not self.skips_on_device:
            if skip:
                return
            skip = False
        self._step(skip if isinstance(skip, Tensor) else None)
        self.after_update()

    def _step(self, skip: Tensor | None) -> None:
        """Take or begin the step; ``skip`` is for optimizers that skip on the device."""
        optimizer: Any = self.optimizer
        if self.skips_on_device:
            optimizer.found_inf = skip
        with self._with_threads():
            optimizer.step()
        if self.skips_on_device:
            optimizer.found_inf = optimizer.grad_scale = None

    def finish(self) -> None:
        """Finish pending updates: parameters are then as after the last step."""


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let PyTorch use ``count`` threads on the CPU within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
