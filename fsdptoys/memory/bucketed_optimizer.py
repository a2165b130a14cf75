"""A ``torch.optim.Optimizer`` that updates its parameters bucket by bucket, now or as late as the
next forward.

It replaces a finished optimizer and shares its ``param_groups``, so schedules and checkpoints work
as usual: ``state[param]`` holds the step counter, and tensors with the parameter's layout that are
views of the buckets' slabs. An executor updates the buckets: streams (``state_streaming``) or host
threads (``cpu_offload``).

With an executor that defers, ``step`` only fixes hyperparameters, clip scale and gradients; hooks
before the forward of each unit finish the updates that the unit needs. The gradients then belong to
the optimizer: ``param.grad`` is None after ``step``. Any access to parameters other than by a
forward, ``state_dict`` or ``load_state_dict`` of the model must call ``finish_updates`` first.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdptoys.utils.dtensor import is_dtensor, local_tensor, sharded_like

from .optimizer_stepper import BeforeUpdate, GradientNorms, OptimizerStepper
from .state_buckets import Bucket, UnitParams

RUNS_CHOICE = {"params", "foreach", "fused", "capturable", "differentiable"}
"""Keys of a parameter group that loading keeps: implementation rather than hyperparameters."""


class Executor:
    """Updates buckets; an interface."""

    defers: bool
    """Whether updates may still run when ``step`` has returned."""
    lead: int
    """Units to update ahead of those that a forward gathers."""

    def start(self, buckets: Sequence[Bucket], step: int) -> None:
        """Begin the updates of a step, in this order."""

    def finish(self, last_unit: int | None) -> None:
        """Finish the updates of the units up to ``last_unit``, or of all."""

    def updated(self, last_unit: int) -> Any:
        """The device event that the gathering of the units up to ``last_unit`` must wait for, if
        any."""

    def settle(self) -> None:
        """Wait until the host may read all states."""

    def map(
        self, function: Callable[[Tensor], Tensor], parts: Iterable[Tensor]
    ) -> Iterable[Tensor]:
        """Like the builtin ``map``; may use threads."""
        return map(function, parts)


class BucketedOptimizer(torch.optim.Optimizer):
    """Updates buckets through an executor.

    Args:
        optimizer: an element-wise optimizer; both share its parameter groups.
        units: every parameter once, by the first module that needs it, in the order of the
            forward.
        buckets: of these units, in order, each with its ``slab``.
        units_ahead: units after its own that a unit's forward begins to gather.
        gather_after: makes the gathering for a module's forward wait for an event.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[UnitParams],
        buckets: Sequence[Bucket],
        executor: Executor,
        *,
        model: nn.Module,
        units_ahead: int = 0,
        gather_after: Callable[[nn.Module, Any], None] | None = None,
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.buckets = list(buckets)
        self.executor = executor
        self.steps_taken = 0
        """Seeds stochastic rounding; a loaded state dict sets it if the states count steps."""
        self._units_ahead = units_ahead
        self._gather_after = gather_after
        self._scale: Tensor | None = None
        self._may_be_pending = False
        self._failed = False
        self._expose_states()
        if executor.defers:
            self._hook(model, [module for module, _ in units])

    def scale_gradients(self, scale: Tensor) -> None:
        """Multiply the gradients by a factor within the next update instead of now."""
        device = local_tensor(self.buckets[0].params[0]).device
        self._scale = scale.to(device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update, or with an executor that defers, fix gradients and hyperparameters and begin."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finish_updates()
        scale, self._scale = self._scale, None
        defers = self.executor.defers
        buckets = [
            bucket
            for bucket in self.buckets
            if bucket.take(self.param_groups, scale, release=defers)
        ]
        self.steps_taken += 1
        self.executor.start(buckets, self.steps_taken)
        self._may_be_pending = defers
        if not defers:
            self._finish_units(None)
        return loss

    def finish_updates(self) -> None:
        """Finish pending updates: the parameters are then as after the last step.

        Raises:
            RuntimeError: if an update failed, now or before.
        """
        if self._may_be_pending or self._failed:
            self._finish_units(None)
            self._may_be_pending = False

    def flush(self) -> None:
        """Finish pending updates and the copies of states."""
        self.finish_updates()
        self.executor.settle()

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's, after all updates."""
        self.flush()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy states and hyperparameters into place, also from an optimizer without buckets;
        ``fused`` etc. stay.

        Raises:
            ValueError: if the parameter groups or the shapes do not fit.
        """
        self.flush()
        saved_groups = state_dict["param_groups"]
        if [len(group["params"]) for group in saved_groups] != [
            len(group["params"]) for group in self.param_groups
        ]:
            raise ValueError(
                "the loaded state dict has other parameter groups than the optimizer"
            )
        ids = chain.from_iterable(group["params"] for group in saved_groups)
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        saved = {
            param: state_dict["state"].get(key, {})
            for param, key in zip(params, ids, strict=True)
        }
        for bucket in self.buckets:
            for index, param in enumerate(bucket.params):
                bucket.load(index, saved[param])
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            for key in saved_group.keys() - RUNS_CHOICE:
                group[key] = saved_group[key]
        counted = [
            int(scalars["step"])
            for bucket in self.buckets
            for scalars in bucket.scalars
            if "step" in scalars
        ]
        self.steps_taken = max(counted, default=self.steps_taken)

    def _expose_states(self) -> None:
        for bucket in self.buckets:
            views = bucket.views(bucket.slab)
            for param, scalars, tensors in zip(
                bucket.params, bucket.scalars, views, strict=True
            ):
                state = dict(scalars)
                for name, view in tensors.items():
                    state[name] = sharded_like(param, view)
                # On ranks whose shard is empty, FSDP1 has no gradient and expects no state.
                if state and (param.numel() or is_dtensor(param)):
                    self.state[param] = state

    def _hook(self, model: nn.Module, modules: list[nn.Module]) -> None:
        for unit, module in enumerate(modules):
            # Before the hook in which FSDP2 gathers the unit.
            module.register_forward_pre_hook(self._before_forward(unit), prepend=True)
        for module in dict.fromkeys([model, *modules]):
            module.register_state_dict_pre_hook(lambda *_: self.finish_updates())
            module.register_load_state_dict_pre_hook(lambda *_: self.finish_updates())

    def _before_forward(self, unit: int) -> Callable[..., None]:
        @torch.compiler.disable
        def hook(module: nn.Module, *_: Any) -> None:
            gathered = unit + self._units_ahead
            if self._may_be_pending:
                self._finish_units(gathered + self.executor.lead)
            event = self.executor.updated(gathered)
            if event is not None and self._gather_after is not None:
                self._gather_after(module, event)

        return hook

    def _finish_units(self, last_unit: int | None) -> None:
        if self._failed:
            raise RuntimeError(
                "an update failed before, so that some parameters are old and some new"
            )
        try:
            self.executor.finish(last_unit)
        except BaseException:
            self._failed = True
            raise


class BucketedStepper(OptimizerStepper):
    """Takes the steps of a ``BucketedOptimizer``."""

    unit_by_unit: ClassVar[bool] = True
    optimizer: BucketedOptimizer

    @property
    def steps_taken(self) -> int:
        """Steps so far, of all attempts."""
        return self.optimizer.steps_taken

    @property
    def held_gradients(self) -> list[Tensor]:
        """Gradients of pending updates."""
        return [
            gradient
            for bucket in self.optimizer.buckets
            for gradient in bucket.gradients
            if gradient is not None
        ]

    def restore(self, steps_taken: int | None) -> None:
        """Continue counting; a run without buckets counted none, and rounded none
        stochastically."""
        self.optimizer.steps_taken = steps_taken or self.optimizer.steps_taken

    def before_update(self, hook: BeforeUpdate) -> None:
        """Call ``hook`` before each update within a bucket."""
        for bucket in self.optimizer.buckets:
            bucket.before_update.append(hook)

    def clip(
        self, norms: GradientNorms, max_norm: float, unscale: float = 1.0
    ) -> Tensor:
        """Scale the gradients within the next update; return their unscaled norm before. A
        collective."""
        return norms.clip_grad_norm(
            max_norm,
            self.optimizer.scale_gradients,
            self.optimizer.executor.map,
            unscale,
        )

    def finish(self) -> None:
        """Finish pending updates: parameters are then as after the last step."""
        self.optimizer.finish_updates()
