"""Initial values of a run's parameters: from folders or from the seed, for plain, adapted and
quantized models."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from fsdptoys.checkpoint import open_init_from
from fsdptoys.config.rules.tune import open_adapter
from fsdptoys.config.schema import Config
from fsdptoys.models import DecoderModel, stored_buffers
from fsdptoys.models.lora import init_adapter_rows, is_adapter
from fsdptoys.models.nf4 import is_packed, pack, unpacked_columns, unquantized_name
from fsdptoys.parallel import seeded
from fsdptoys.utils.dtensor import local_bounds, local_tensor, sharded_rows


class InitialValues:
    """Fills parameters of ``model.init_from`` and ``tune.adapter``, or of the seed where these are
    null.

    Args:
        model: on the meta device, before it gets adapters.
        config: of the run.
        threads: draw values.

    Raises:
        ConfigError: if a folder does not fit.
    """

    def __init__(self, model: DecoderModel, config: Config, threads: int) -> None:
        seed = config.train.init_seed
        assert seed is not None
        self._init_from = open_init_from(model) if config.model.init_from else None
        self._adapter = open_adapter(config.tune, model)
        initial = None if self._init_from else model.initial_tensors(seed)
        self._drawn = (
            seeded(model.row_initializer(), seed, threads, model.zero_rows())
            if initial is None
            else partial(_copy_values, initial)
        )
        self._buffers = {buffer.name for buffer in stored_buffers(model)}
        self._drawn_adapter = seeded(init_adapter_rows, seed, threads)

    def fill(self, param: Tensor, name: str) -> None:
        """Fill a parameter, or this rank's shard of it, or a stored buffer in place.

        A quantized one is filled from the values of the plain one; only one plain parameter exists
        at a time.
        """
        if is_packed(name):
            packed = local_tensor(param)
            rows = torch.empty(
                *packed.shape[:-1], unpacked_columns(packed), device=packed.device
            )
            self.fill(sharded_rows(param, rows), unquantized_name(name))
            pack(rows, packed)
        elif is_adapter(name):
            (self._adapter.fill if self._adapter else self._drawn_adapter)(param, name)
        elif self._init_from is not None or name not in self._buffers:
            # a buffer without a folder keeps the value that the model computes
            (self._init_from.fill if self._init_from else self._drawn)(param, name)


@torch.no_grad()
def _copy_values(initial: Mapping[str, Tensor], param: Tensor, name: str) -> None:
    """Copy this rank's shard of a full tensor."""
    local = local_tensor(param)
    if local.numel():
        bounds = tuple(slice(start, stop) for start, stop in local_bounds(param))
        local.copy_(initial[name][bounds])
