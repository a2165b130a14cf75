"""Low-precision copies of FSDP2's offloaded parameters, which halve the bytes uploaded to the
device.

Under CPU offload FSDP2 uploads float32 shards and casts them on the device, in the forward and
again in the backward. Here it uploads a copy in the dtype of the forward instead, which lives with
the float32 master in pinned memory. Casts round the same way on both sides, so no bit changes. The
optimizer, checkpoints and ``full_parameters`` use the master; the optimizer calls ``refresh`` after
an update, and a master that was written in place otherwise (detected by version counters) is copied
again before the next forward.

PyTorch has no public way to do this. It was tried with torch 2.7.1 and 2.13; where FSDP2's
internals look different, a warning says so and float32 is uploaded.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdptoys.device import in_host_place


class _Entry:
    """One parameter: FSDP2's record of it, its master, and the uploaded copy."""

    def __init__(self, fsdp_param: Any, dtype: torch.dtype, pin_memory: bool) -> None:
        self.fsdp_param = fsdp_param
        self.master: Tensor = fsdp_param._sharded_param_data
        self.mirror = in_host_place(
            torch.empty(self.master.shape, dtype=dtype, pin_memory=pin_memory)
        )
        self.versions: tuple[int, int] | None = None

    def install(self) -> None:
        """Install the mirror if it is not in place, refresh it if it is stale."""
        uploaded = self.fsdp_param._sharded_param_data
        if uploaded is not self.mirror:
            # The first forward, or loading weights, made FSDP2 look up its memory again.
            self.master = uploaded
            self.fsdp_param._sharded_param_data = self.mirror
        elif self._master_versions() == self.versions:
            return
        self.refresh()

    def refresh(self) -> None:
        self.versions = self._master_versions()
        self.mirror.copy_(self.master)

    def _master_versions(self) -> tuple[int, int]:
        # Writing to a DTensor does not count as writing to its local tensor.
        param = self.fsdp_param.sharded_param
        return param._version, param.to_local()._version


class Mirror:
    """Low-precision copies of the parameters of all units of a model, in the order of the
    forward."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        units_ahead: int,
        dtype: torch.dtype,
        pin_memory: bool,
    ) -> None:
        self._groups = [_param_groups(module) for module in modules]
        self._entries = [
            [
                _Entry(fsdp_param, dtype, pin_memory)
                for group in groups
                for fsdp_param in group.fsdp_params
            ]
            for groups in self._groups
        ]
        self._by_param = {
            entry.fsdp_param.sharded_param: entry
            for entries in self._entries
            for entry in entries
        }
        for unit, module in enumerate(modules):
            window = slice(unit, unit + 1 + units_ahead)

            @torch.compiler.disable
            def hook(*_: Any, window: slice = window) -> None:
                self._install(window)

            module.register_forward_pre_hook(hook, prepend=True)

    @torch.no_grad()
    def refresh(self, params: Sequence[nn.Parameter]) -> None:
        """Copy updated parameters; any thread may call it while no forward or backward needs
        them."""
        for param in params:
            entry = self._by_param[param]
            # The first forward installs and fills the mirror.
            if entry.versions is not None:
                entry.refresh()

    @torch.no_grad()
    def _install(self, window: slice) -> None:
        for groups, entries in zip(
            self._groups[window], self._entries[window], strict=True
        ):
            # FSDP2 looks up its memory once more in the root's first forward.
            if all(group._reset_sharded_params for group in groups):
                for entry in entries:
                    entry.install()


def mirror_parameters(
    modules: Sequence[nn.Module], units_ahead: int, dtype: torch.dtype, pin_memory: bool
) -> Mirror | None:
    """Make the mirror. Warn and return None if this torch's FSDP2 does not support it."""
    try:
        for module in modules:
            for group in _param_groups(module):
                _ = (
                    group._reset_sharded_params,
                    [param._sharded_param_data for param in group.fsdp_params],
                )
    except AttributeError as error:
        warnings.warn(
            (
                f"torch {torch.__version__} keeps offloaded shards in a way unknown to fsdptoys "
                f"({error}), so parameters travel in float32"
            ),
            stacklevel=2,
        )
        return None
    return Mirror(modules, units_ahead, dtype, pin_memory)


def _param_groups(module: nn.Module) -> list[Any]:
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.7 has at most one
    return (
        list(groups)
        if groups is not None
        else [group for group in [state._fsdp_param_group] if group is not None]
    )
