"""DDP's checks of modules, devices and graphs; the messages begin as PyTorch's."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def check_devices(
    params: list[nn.Parameter], device_ids: Any, output_device: Any
) -> tuple[list[int] | None, torch.device | None]:
    """Check the device of a module's parameters; return the checked ``device_ids`` and ``output_device``."""
    if not any(param.requires_grad for param in params):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    if any(isinstance(param, nn.parameter.UninitializedParameter) for param in params):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy forward "
            "pass to correctly initialize the modules"
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {param.device for param in params}
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {types}."
        )
    if not device_ids or types == {"cpu"} or len(devices) > 1:
        if device_ids or output_device:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU "
                f"modules, but got device_ids {device_ids}, output_device {output_device}, and module parameters "
                f"{devices}."
            )
        return None, None
    (device,) = devices
    return [device.index], torch.device(output_device) if output_device is not None else device


def check_same_model(params: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Compare number and shapes of parameters over ranks. A collective."""
    own = torch.tensor([number for param in params for number in (param.ndim, *param.shape)], device=params[0].device)
    counts = _gather(torch.tensor([len(params), own.numel()], device=own.device), group)
    longest = max(int(length) for _, length in counts)
    for rank, numbers in enumerate(_gather(nn.functional.pad(own, (0, longest - own.numel())), group)):
        others = _shapes(numbers.tolist(), int(counts[rank][0]))
        if len(others) != len(params):
            raise RuntimeError(
                f"DDP expects same model across all ranks, but Rank {group.rank()} has {len(params)} params, "
                f"while rank {rank} has inconsistent {len(others)} params."
            )
        for index, (shape, param) in enumerate(zip(others, params, strict=True)):
            if shape != tuple(param.shape):
                raise RuntimeError(
                    f"params[{index}] in this process with sizes {list(param.shape)} appears not to match sizes "
                    f"{list(shape)} of the same param in process {rank}."
                )


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(tensors, tensor, group=group)
    return tensors


def _shapes(numbers: list[int], count: int) -> list[tuple[int, ...]]:
    """Decode the shapes of ``count`` parameters, each written as its number of dims and the dims."""
    following = iter(numbers)
    return [tuple(itertools.islice(following, next(following))) for _ in range(count)]


def unfinished_reduction(missing: dict[int, str], rank: int, static_graph: bool) -> str:
    """Explain that ``missing`` parameters, name by index, got no gradient in the backward before this forward."""
    indices = " ".join(map(str, missing))
    begin = "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates"
    if static_graph:
        return (
            f"{begin} that your training graph has changed in this iteration, e.g., one parameter is used in first "
            "iteration, but then got unused in the second iteration. this is not compatible with static_graph set to "
            f"True.\nParameter indices which did not receive grad for rank {rank}: {indices}"
        )
    return (
        f"{begin} that your module has parameters that were not used in producing loss. You can enable unused "
        "parameter detection by passing the keyword argument `find_unused_parameters=True` to "
        "`DistributedDataParallel`, and by making sure all `forward` function outputs participate in calculating "
        "loss. Parameters which did not receive "
        f"grad for rank {rank}: {', '.join(missing.values())}. Parameter indices which did not receive grad: {indices}"
    )


def ready_twice(number: int, name: str, static_graph: bool) -> str:
    """Explain that a parameter got two gradients in one backward."""
    why = (
        "Expected to mark a variable ready only once. Either a parameter is used outside of the `forward` of the "
        "wrapped module, or in several reentrant backward passes, as of checkpoints that share it; where the graph "
        "does not change from step to step, `static_graph=True` can help."
    )
    if static_graph:
        why = "Your training graph has changed in this iteration, which static_graph=True does not allow."
    return f"{why} Parameter at index {number} with name {name} has been marked as ready twice."
