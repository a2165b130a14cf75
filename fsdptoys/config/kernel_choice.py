"""Select the implementation of each operation by settings and device.

The implementations are in ``models/kernels.py``. ``auto`` is torch_npu's on an NPU. On CUDA it
compiles rotary positions and SwiGLU, which are about ten and two kernels otherwise. Everything else
is PyTorch's.
"""

import dataclasses
import functools
import importlib.util
import os
import shutil
import sysconfig
import warnings
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from fsdptoys.device import KINDS, available_device_type
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel, choose_ops, npu_kernels, use_ops
from fsdptoys.models.attention import BACKENDS, chosen_backend
from fsdptoys.models.self_attention import Attention
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.utils.options import Effect, option

COMPILED_ON_CUDA = ("rotary", "swiglu")
"""Operations that ``auto`` compiles on CUDA."""
TRITON_CAPABILITY = (7, 0)
"""Oldest compute capability for which ``torch.compile`` generates Triton kernels."""


class AttentionKernel(Enum):
    """Library of the implementation, or one backend of PyTorch's
    ``scaled_dot_product_attention``."""

    auto = "auto"
    """torch_npu's on an NPU, else ``torch``."""
    torch = "torch"
    """PyTorch's choice of backend; on CUDA without cuDNN for masks, evaluation and generation."""
    cudnn = "cudnn"
    """cuDNN's; CUDA, 16-bit dtypes, no masks."""
    flash = "flash"
    """FlashAttention; CUDA with 16-bit dtypes and no masks, or CPU."""
    efficient = "efficient"
    """The memory-efficient kernel of CUDA; shared heads are repeated."""
    math = "math"
    """Matmuls and a softmax, which write all scores; CUDA and CPU, for comparisons."""
    flex = "flex"
    """PyTorch's flex_attention, compiled, which skips masked blocks; trains on CUDA only."""
    npu = "npu"


class Kernel(Enum):
    """Library of the implementation, or PyTorch's compiled with ``torch.compile``."""

    auto = "auto"
    """torch_npu's on an NPU; ``compiled`` for rotary and swiglu on CUDA where Triton works; else
    PyTorch's."""
    torch = "torch"
    compiled = "compiled"
    npu = "npu"


class DocumentKernel(Enum):
    """PyTorch function for attention under document masking."""

    auto = "auto"
    """``torch``."""
    torch = "torch"
    """A full (T, T) mask; runs on every device."""
    flex = "flex"
    """PyTorch's flex_attention, which skips fully masked blocks; trains on CUDA only."""


class GroupedKernel(Enum):
    """Library of the grouped matmul, or a loop over experts."""

    auto = "auto"
    """torch_npu's on an NPU, else PyTorch's."""
    torch = "torch"
    looped = "looped"
    """One matmul per expert, with the same arithmetic on every device; for comparisons between
    devices."""
    npu = "npu"


@dataclass
class KernelConfig:
    """Implementations of a model's operations."""

    attention: AttentionKernel = option(AttentionKernel.auto, effect=Effect.rounding)
    """Attention: PyTorch's, one of its backends or flex_attention (documents included), or
    torch_npu's."""
    document_attention: DocumentKernel = option(
        DocumentKernel.auto, effect=Effect.rounding
    )
    """Attention under ``data.mask_documents``: PyTorch's with a mask, or flex_attention."""
    rms_norm: Kernel = option(Kernel.auto, effect=Effect.rounding)
    """RMSNorm: PyTorch's, compiled separately, or torch_npu's."""
    rotary: Kernel = option(Kernel.auto, effect=Effect.rounding)
    """Rotary position embedding: PyTorch's, compiled separately, or torch_npu's."""
    swiglu: Kernel = option(Kernel.auto, effect=Effect.rounding)
    """SwiGLU gate of a dense feed-forward layer: PyTorch's, compiled separately, or torch_npu's."""
    grouped_matmul: GroupedKernel = option(GroupedKernel.auto, effect=Effect.rounding)
    """Matmuls of experts: PyTorch's (a loop where it has no grouped one), always a loop, or
    torch_npu's."""

    def names(self) -> dict[str, str]:
        """Map each operation to the name of its implementation."""
        return {
            field.name: getattr(self, field.name).value
            for field in dataclasses.fields(self)
        }

    @property
    def compiles(self) -> bool:
        """Whether any operation is compiled separately."""
        return not {Kernel.compiled.value, DocumentKernel.flex.value}.isdisjoint(
            self.names().values()
        )

    def leave_to_model(self) -> None:
        """Replace every ``auto`` for a model that computes its operations itself."""
        for operation, name in self.names().items():
            if name == "auto":
                setattr(self, operation, type(getattr(self, operation)).torch)

    def resolve(
        self,
        device_type: str,
        *,
        compiles: bool,
        deterministic: Deterministic | bool,
        fuses: bool,
    ) -> None:
        """Replace every ``auto``; ``rules/kernels.py`` has the rules of the others.

        Args:
            device_type: of the run.
            compiles: whether blocks are compiled, experts left out.
            deterministic: whether kernels must be deterministic.
            fuses: whether ``auto`` may compile operations by themselves.
        """
        for operation, name in self.names().items():
            if name != "auto":
                continue
            chosen = "torch"
            is_here = available_device_type() == device_type  # else it is planned for
            if deterministic or (compiles and operation != "grouped_matmul"):
                pass
            elif device_type == "cuda" and operation in COMPILED_ON_CUDA:
                if fuses and (not is_here or triton_works()):
                    chosen = "compiled"
            elif device_type == "npu" and operation in npu_kernels.OPERATORS:
                # An older torch_npu may lack it
                chosen = (
                    "npu" if not is_here or npu_kernels.is_there(operation) else "torch"
                )
            setattr(self, operation, type(getattr(self, operation))(chosen))


def put_kernels(model: DecoderModel, config: KernelConfig) -> None:
    """Set the implementations of a model that is not compiled yet to those of the resolved
    settings."""
    for operation, name in config.names().items():
        if name == "npu" and not npu_kernels.is_there(operation):
            needed = npu_kernels.OPERATORS[operation]
            raise ConfigError(
                f"kernels.{operation}=npu needs torch_npu's {needed}, which is not installed "
                f"here; install the torch_npu of this torch or set kernels.{operation}=torch"
            )
    use_ops(model, choose_ops(config.names()))


def find_attention_backend(
    model: DecoderModel,
    config: KernelConfig,
    device: torch.device,
    dtype: torch.dtype,
    seq_len: int,
    *,
    masks: bool,
) -> str | None:
    """Backend of PyTorch's attention in a training step, by the heads of the first layer and the
    length of a sequence.

    Returns:
        None if another function computes attention, or PyTorch does not say.

    Raises:
        ConfigError: if the device cannot run the configured backend.
    """
    name = config.attention.value
    layer = next(
        (module for module in model.modules() if isinstance(module, Attention)), None
    )
    if layer is None:  # a model that computes attention itself
        return None
    flexes = masks and config.document_attention is DocumentKernel.flex
    if name in ("npu", "flex") or flexes or device.type not in KINDS:
        return None
    if not KINDS[device.type].attention_backends:
        return None
    memory_BTHK = torch.empty(
        (1, seq_len, layer.n_heads, layer.head_dim), dtype=dtype, device=device
    )
    if type(memory_BTHK) is not Tensor:  # a fake one, for predictions
        return None
    q_BHTK = memory_BTHK.transpose(1, 2).requires_grad_()
    k_BGTK = q_BHTK[:, : layer.n_kv_heads]
    # Fused kernels of CUDA refuse a mask whose last dim has no stride of 1, which a real one has.
    mask = (
        memory_BTHK.new_zeros(1, 1, 1, seq_len).expand(1, 1, seq_len, seq_len)
        if masks
        else None
    )
    backends = (BACKENDS[name],) if name in BACKENDS else ()
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            return chosen_backend(q_BHTK, k_BGTK, k_BGTK, mask, backends)
        except RuntimeError as error:
            if not backends:
                return None  # attention may run even if the private function does not
            why = "; ".join(
                dict.fromkeys(
                    str(reason.message).partition(" (Triggered")[0]
                    for reason in reasons
                )
            )
            raise ConfigError(
                f"kernels.attention={name} cannot run here, with {layer.n_heads} heads of "
                f"{layer.head_dim} channels in {dtype} ({why or str(error).splitlines()[0]}); "
                "set kernels.attention=auto"
            ) from error


@functools.cache
def triton_works() -> bool:
    """Whether ``torch.compile`` can generate kernels for the CUDA device here, found without
    importing the compiler.

    Triton compiles a launcher for each kernel, with a C compiler and Python's headers.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include"), "Python.h")
    installed = importlib.util.find_spec("triton") is not None
    if not (installed and compiler and header.is_file()):
        return False
    return torch.cuda.get_device_capability() >= TRITON_CAPABILITY
