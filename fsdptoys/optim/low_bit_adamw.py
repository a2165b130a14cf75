"""AdamW with both moments in 8 or 4 bits and a scale for each block: torchao's states and update.

An update widens one parameter's moments to float32, updates with them, and quantizes them: to codes
of a table with finer steps near zero (int8, arXiv:2110.02861; int4, arXiv:2309.01507), or to
float8_e4m3fn. A block's largest number is its scale. The compiler fuses this into a few kernels;
``for_loop`` runs it operator by operator.

Blocks are parts of rows, so sharding between rows keeps them: codes and scales do not depend on the
layout, are sharded like their parameter, and go through checkpoints on any number of ranks.
torchao's own classes start blocks at the beginning of a rank's shard, and their checkpoints would
not fit another number of ranks. Vectors, small matrices and those whose rows have no such blocks
keep float32 moments, in PyTorch's AdamW.

Not covered: parameters sharded within rows, AMSGrad, stochastic rounding, torchao's states in host
memory.
Source: https://github.com/pytorch/ao/tree/main/torchao/optim
"""

import functools
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdptoys.utils.dtensor import is_dtensor, local_tensor

from .matrix_optimizer import MATRICES, Groups, MatrixOptimizer

# name of a state → whether it is signed
MOMENTS = {
    "exp_avg": True,
    "exp_avg_sq": False,
}
SMALLEST_ELEMENTS = 4096  # smaller parameters keep float32 states, as in torchao
# with smaller blocks, scales would take more than an eighth of the savings
SMALLEST_BLOCK = 32
# Of a parameter in one update: bounds its scratch and the sizes to compile for
ELEMENTS_AT_A_TIME = 2**23


class Format(NamedTuple):
    """Layout of quantized states."""

    codes_a_byte: int
    largest_block: int  # torchao's default


FORMATS = {"int8": Format(1, 256), "float8": Format(1, 256), "int4": Format(2, 128)}


def block_elements(format: str, shape: Sequence[int]) -> int | None:
    """Elements of a row that share a scale, by the full parameter's shape; None where states stay
    float32."""
    if len(shape) < 2 or math.prod(shape) < SMALLEST_ELEMENTS:
        return None
    block = math.gcd(shape[-1], FORMATS[format].largest_block)
    return block if block >= SMALLEST_BLOCK else None


def state_bytes(format: str, shape: Sequence[int], elements: int) -> tuple[int, ...]:
    """Bytes of codes and scales of both moments, for a number of elements of a parameter with
    blocks."""
    block = block_elements(format, shape)
    assert block is not None
    return (elements // FORMATS[format].codes_a_byte, 4 * (elements // block)) * len(
        MOMENTS
    )


class LowBitAdamW(MatrixOptimizer):
    """AdamW with states of one of ``FORMATS`` over groups with ``MATRICES``, PyTorch's over the
    others."""

    def __init__(
        self,
        groups: Groups,
        *,
        format: str,
        betas: tuple[float, float],
        eps: float,
        compiles: bool,
        build_adamw: Callable[[Groups], torch.optim.Optimizer],
    ) -> None:
        super().__init__(groups, build_adamw)
        self.format = format
        self.betas = betas
        self.eps = eps
        self.compiles = compiles
        self._tables: dict[tuple[torch.device, bool], Tensor] = {}

    def make_matrix_states(self, param: nn.Parameter) -> dict[str, Any]:
        """Codes and scales, sharded like their parameter."""
        block = block_elements(self.format, param.shape)
        columns = param.shape[-1]
        assert block is not None and local_tensor(param).shape[-1] % block == 0, (
            "a shard ends within a block"
        )
        state: dict[str, Any] = {"step": torch.zeros(())}
        for name in MOMENTS:
            state[f"{name}_codes"] = _zeros(
                param, columns // FORMATS[self.format].codes_a_byte, torch.uint8
            )
            state[f"{name}_scales"] = _zeros(param, columns // block, torch.float32)
        return state

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group that have a gradient, one after the other."""
        update = choose_update(self.compiles)
        rate = torch.tensor(group["lr"], dtype=torch.float32)
        with torchao_optim().many_sizes() if self.compiles else nullcontext():
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] += 1
                block = block_elements(self.format, param.shape)
                assert block is not None
                flat = local_tensor(param).view(-1)
                grad = local_tensor(param.grad).reshape(-1)
                states = {
                    key: local_tensor(value).view(-1)
                    for key, value in state.items()
                    if key != "step"
                }
                for start in range(0, flat.numel(), ELEMENTS_AT_A_TIME):
                    stop = min(start + ELEMENTS_AT_A_TIME, flat.numel())
                    moments = [
                        self._moment(states, name, start, stop, block)
                        for name in MOMENTS
                    ]
                    update(
                        flat[start:stop], grad[start:stop], state["step"], *moments, None,
                        rate, *self.betas, group["weight_decay"], self.eps, True, False,
                    )  # fmt: skip

    def _moment(
        self, states: dict[str, Tensor], name: str, start: int, stop: int, block: int
    ) -> Tensor:
        """A part of a moment, as torchao's tensor over the memory of its codes and scales."""
        per_byte = FORMATS[self.format].codes_a_byte
        signed = MOMENTS[name]
        codes = states[f"{name}_codes"][start // per_byte : stop // per_byte]
        scales = states[f"{name}_scales"][start // block : stop // block]
        kind = torchao_optim().states[self.format]
        if self.format == "float8":
            return kind(codes.view(torch.float8_e4m3fn), scales, dtype=torch.float32)
        if (key := (codes.device, signed)) not in self._tables:
            self._tables[key] = kind.zeros((block,), signed, block, codes.device).qmap
        shape = {"shape": (stop - start,)} if self.format == "int4" else {}
        return kind(
            codes, scales, self._tables[key], signed, dtype=torch.float32, **shape
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """PyTorch's, except that it would cast codes to float32."""
        groups = [group for group in state_dict["param_groups"] if group[MATRICES]]
        numbers = [number for group in groups for number in group["params"]]
        states = {
            number: state_dict["state"][number]
            for number in numbers
            if number in state_dict["state"]
        }
        others = {
            number: state
            for number, state in state_dict["state"].items()
            if number not in states
        }
        super().load_state_dict({**state_dict, "state": others})
        params = [
            param
            for group in self.param_groups
            if group[MATRICES]
            for param in group["params"]
        ]
        for number, param in zip(numbers, params, strict=True):
            if number in states:
                self.state[param] = {
                    key: value
                    if key == "step"
                    else value.to(local_tensor(param).device)
                    for key, value in states[number].items()
                }


class TorchaoOptim(NamedTuple):
    """The parts of torchao in use."""

    # AdamW for one parameter, in operators that the states implement
    update: Callable[..., None]
    states: dict[str, Any]  # Format → the class of its tensors
    # Context without the compiler's limit on recompilations
    many_sizes: Callable[[], AbstractContextManager[None]]


@functools.cache
def torchao_optim() -> TorchaoOptim:
    """Import torchao's parts, which have no public names; seen in torchao 0.18.0 with torch
    2.13."""
    # torchao warns about prebuilt kernels that it cannot load, and PyTorch about torchao's
    # registrations.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings(
        "ignore", message="OptimState.* does not implement _stable_hash_for_caching"
    )
    from torch._dynamo.utils import disable_cache_limit
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8

    states = {"int8": OptimState8bit, "float8": OptimStateFp8, "int4": OptimState4bit}
    return TorchaoOptim(single_param_adam, states, disable_cache_limit)


@functools.cache
def choose_update(compiles: bool) -> Callable[..., Any]:
    """The update of a part of a parameter, compiled for each size or eager."""
    update = torchao_optim().update
    return torch.compile(update, fullgraph=True, dynamic=False) if compiles else update


def _zeros(param: nn.Parameter, columns: int, dtype: torch.dtype) -> Tensor:
    """Zeros on a parameter's device, sharded like it, with ``columns`` columns in full."""
    local = local_tensor(param)
    zeros = local.new_zeros(
        (*local.shape[:-1], local.shape[-1] * columns // param.shape[-1]), dtype=dtype
    )
    if not is_dtensor(param):
        return zeros
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*param.shape[:-1], columns))
    stride = torch.empty(shape, device="meta").stride()
    dtensor = DTensor.from_local(
        zeros,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )
    return dtensor.to(local.device)  # from_local moves it to the mesh's device
