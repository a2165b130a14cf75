"""dtypes of a run, and FSDP's mixed precision for models without FSDP."""

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor, nn


class DType(Enum):
    """dtypes of parameters in compute, and of buffers."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    """More significant bits than bfloat16, in a smaller range: gradients need a loss scale
    (``loss_scale.*``)."""

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype."""
        return getattr(torch, self.value)

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients underflow in this dtype unless the loss is scaled."""
        return self is DType.float16


class ReduceDType(Enum):
    """dtypes in which gradients are summed over ranks."""

    auto = "auto"
    """float64 under ``train.deterministic``, else float32, in which scaled float16 gradients cannot
    overflow."""
    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype; ``auto`` must be resolved."""
        assert self is not ReduceDType.auto
        return getattr(torch, self.value)


class SumDType(Enum):
    """dtype of sums over ranks, except those of gradients: gradient norms, losses, expert
    statistics."""

    auto = "auto"
    """float64 if the device's collectives support it (HCCL's do not), else float32."""
    float32 = "float32"
    float64 = "float64"

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype."""
        return getattr(torch, self.value)


class CastParameters(nn.Module):
    """Runs a model on low-precision copies of its float32 parameters, as FSDP's ``param_dtype``
    does.

    Gradients flow back through the cast and accumulate in float32. A parameter is cast before the
    first module of a forward that owns it, so that its gradient is final as soon as the backward
    has left this module: DDP reduces it, and ``memory.optimizer_in_backward`` uses it up, during
    the rest of the backward. The copy replaces the parameter while a module that owns it runs,
    including the recomputation of gradient checkpointing, and is freed as soon as the gradient is
    final. A compiled block's parameters are swapped around the compiled call: inside, each block
    would trigger a recompilation.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, float32_modules: Sequence[str] = ()
    ) -> None:
        """Wrap a model.

        Args:
            module: the model.
            dtype: of the copies.
            float32_modules: names of modules that keep their own parameters.
        """
        super().__init__()
        self.module = module
        self.dtype = dtype
        float32_owners = {module.get_submodule(name) for name in float32_modules}
        self._copies: dict[Tensor, Tensor] = {}
        for param in module.parameters():
            if not param.requires_grad:
                continue  # kept in this dtype, so that the cast copies nothing (``mixed_dtypes``)
            # Through a weak reference: the garbage collector does not see a cycle through a hook of
            # autograd.
            param.register_post_accumulate_grad_hook(
                functools.partial(_free, weakref.ref(self))
            )
        compiled: set[nn.Module] = set()
        for block in module.modules():
            contexts = getattr(getattr(block, "execute", None), "contexts", None)
            if contexts is not None:
                owners = [
                    owner for owner in block.modules() if owner not in float32_owners
                ]
                contexts.append(functools.partial(self._swapped, owners))
                compiled.update(owners)
        for owner in module.modules():
            own = dict(owner.named_parameters(recurse=False))
            if own and owner not in compiled and owner not in float32_owners:
                owner.register_forward_pre_hook(functools.partial(self._swap_in, own))
                owner.register_forward_hook(
                    functools.partial(self._swap_out, own), always_call=True
                )

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Call the model with cast parameters."""
        self._copies.clear()
        output: Tensor = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._copies.clear()
        return output

    @contextmanager
    def _swapped(self, owners: Sequence[nn.Module]) -> Iterator[None]:
        parameters = [
            (dict(owner.named_parameters(recurse=False)), owner) for owner in owners
        ]
        for own, owner in parameters:
            self._swap_in(own, owner)
        try:
            yield
        finally:
            for own, owner in parameters:
                self._swap_out(own, owner)

    def _swap_in(
        self, own: dict[str, nn.Parameter], owner: nn.Module, *_: object
    ) -> None:
        for name, param in own.items():
            if param not in self._copies:
                self._copies[param] = param.to(self.dtype)
            owner._parameters[name] = self._copies[param]  # type: ignore[assignment]

    def _swap_out(
        self, own: dict[str, nn.Parameter], owner: nn.Module, *_: object
    ) -> None:
        owner._parameters.update(own)


def _free(cast: "weakref.ref[CastParameters]", param: Tensor) -> None:
    """Drop the copy of a parameter once its gradient is final."""
    alive = cast()
    if alive is not None:
        alive._copies.pop(param, None)
