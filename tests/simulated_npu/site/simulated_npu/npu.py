"""``torch.npu``: torch_npu's functions of that name that this project and PyTorch use."""

import types
from typing import Any

import torch


def build_module(extension: Any) -> types.ModuleType:
    """Build the module for ``torch.npu``."""
    accelerator = torch.accelerator
    module = types.ModuleType("torch.npu")

    def index(device: Any = None) -> int:
        if device is None:
            return int(extension.current_device())
        if isinstance(device, int):
            return device
        number = torch.device(device).index
        return int(extension.current_device()) if number is None else number

    class Current(accelerator.device_index):
        """Make a device the current one in a ``with``."""

        def __init__(self, where: Any) -> None:
            super().__init__(index(where))

    def get_device_properties(where: Any = None) -> Any:
        total = accelerator.get_memory_info(index(where))[1]
        return types.SimpleNamespace(name="Simulated NPU", total_memory=total)

    def manual_seed_all(seed: int) -> None:
        for generator in module.default_generators:
            generator.manual_seed(seed)

    def set_per_process_memory_fraction(fraction: float, where: Any = None) -> None:
        extension.set_fraction(fraction, index(where))

    module.__dict__.update(
        is_available=lambda: extension.device_count() > 0,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        device_count=extension.device_count,
        current_device=extension.current_device,
        set_device=lambda where: extension.set_device(index(where)),
        device=Current,
        get_device_name=lambda where=None: "Simulated NPU",
        get_device_properties=get_device_properties,
        is_bf16_supported=lambda: True,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        synchronize=lambda where=None: accelerator.synchronize(index(where)),
        Stream=torch.Stream,
        Event=torch.Event,
        current_stream=lambda where=None: accelerator.current_stream(index(where)),
        default_stream=lambda where=None: torch.Stream(
            stream_id=0, device_index=index(where), device_type=20
        ),
        set_stream=accelerator.set_stream,
        stream=lambda stream: stream,  # a context of itself
        empty_cache=accelerator.empty_cache,
        mem_get_info=lambda where=None: accelerator.get_memory_info(index(where)),
        set_per_process_memory_fraction=set_per_process_memory_fraction,
        default_generators=tuple(
            extension.default_generator(i) for i in range(extension.device_count())
        ),
        manual_seed=lambda seed: extension.default_generator(-1).manual_seed(seed),
        manual_seed_all=manual_seed_all,
        initial_seed=lambda: extension.default_generator(-1).initial_seed(),
        get_rng_state=lambda where=None: extension.default_generator(
            index(where)
        ).get_state(),
        set_rng_state=lambda state, where=None: extension.default_generator(
            index(where)
        ).set_state(state),
        memory=_build_memory_module(extension),
    )
    for name in (
        "memory_stats",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
    ):
        statistic = getattr(accelerator, name)
        setattr(
            module,
            name,
            lambda where=None, statistic=statistic: statistic(index(where)),
        )
    return module


def _build_memory_module(extension: Any) -> types.ModuleType:
    memory = types.ModuleType("torch.npu.memory")

    def record_memory_history(
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = 2**31 - 1,
    ) -> None:
        extension.record_history(enabled is not None, min(max_entries, 2**31 - 1))

    def snapshot(device: Any = None) -> dict[str, Any]:
        segments = [
            _segment(block, i)
            for i in range(extension.device_count())
            for block in extension.blocks(i)
        ]
        return {
            "segments": segments,
            "device_traces": [
                extension.history(i) for i in range(extension.device_count())
            ],
        }

    memory.__dict__.update(
        _record_memory_history=record_memory_history, _snapshot=snapshot
    )
    return memory


def _segment(block: dict[str, Any], device: int) -> dict[str, Any]:
    """A block, which has a segment to itself, in the form of PyTorch's snapshots."""
    used = block["requested"] > 0
    state = "active_allocated" if used else "inactive"
    own = {
        "address": block["address"],
        "size": block["bytes"],
        "requested_size": block["requested"],
        "state": state,
    }
    return {
        "device": device,
        "address": block["address"],
        "total_size": block["bytes"],
        "allocated_size": block["bytes"] * used,
        "active_size": block["bytes"] * used,
        "requested_size": block["requested"],
        "stream": block["stream"],
        "segment_type": "large",
        "is_expandable": False,
        "blocks": [own | {"frames": block["frames"]}],
        "frames": [],
    }
