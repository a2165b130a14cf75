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

from fsdptoys.device import available_device_type
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel, choose_ops, npu_kernels, use_ops
from fsdptoys.models.attention import BACKENDS, chosen_backend
from fsdptoys.models.layers import Attention
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.utils.options import Effect, option

COMPILED_ON_CUDA = ("rotary", "swiglu")
"""Operations that ``auto`` compiles on CUDA."""
TRITON_CAPABILITY = (7, 0)
"""Oldest compute capability for which ``torch.compile`` generates Triton kernels."""
FLASH_WIDTH = 256
"""Widest head of FlashAttention in PyTorch."""
CPU_BACKENDS = ("flash", "math")
"""Backends of ``scaled_dot_product_attention`` on a CPU."""


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
    document_attention: DocumentKernel = option(DocumentKernel.auto, effect=Effect.rounding)
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
        return {field.name: getattr(self, field.name).value for field in dataclasses.fields(self)}

    @property
    def compiles(self) -> bool:
        """Whether any operation is compiled separately."""
        return not {Kernel.compiled.value, DocumentKernel.flex.value}.isdisjoint(
            self.names().values()
        )

    def resolve(
        self, device_type: str, *, compiles: bool, deterministic: Deterministic | bool, fuses: bool
    ) -> None:
        """Replace every ``auto``, and check the choices against the device, compiled blocks and
        deterministic mode.

        ``fuses``: whether ``auto`` may compile operations by themselves.
        """
        for operation, name in self.names().items():
            # Experts are not compiled.
            seen, fix = compiles and operation != "grouped_matmul", f"set kernels.{operation}=auto"
            if name == "npu" and device_type != "npu":
                raise ConfigError(
                    f"kernels.{operation}=npu is torch_npu's, and this run is on {device_type}; "
                    f"{fix}"
                )
            if name == "npu" and seen:
                raise ConfigError(
                    f"kernels.{operation}=npu is a kernel that train.compile=true cannot see "
                    f"into, which torch_npu documents for attention as not to be compiled; {fix}"
                )
            mode = Deterministic(deterministic).word
            if name == "flex" and (device_type != "cuda" or deterministic):
                where = (
                    f"this run is on {device_type}"
                    if device_type != "cuda"
                    else f"train.deterministic={mode}"
                )
                raise ConfigError(
                    f"kernels.{operation}=flex is PyTorch's flex_attention, which trains on CUDA "
                    f"alone and is not known to be deterministic, and {where}; {fix}"
                )
            if name == "flex" and operation == "attention" and compiles:
                raise ConfigError(
                    "kernels.attention=flex is compiled by itself, and train.compile=true "
                    f"compiles whole blocks; {fix} or train.compile=false"
                )
            if name == "auto":
                plain = seen or bool(deterministic)
                compiled = device_type == "cuda" and fuses and operation in COMPILED_ON_CUDA
                # Assumed when planning on another machine
                if compiled and available_device_type() == "cuda":
                    compiled = triton_works()
                fused = device_type == "npu" and operation in npu_kernels.OPERATORS
                if fused and available_device_type() == "npu":  # which may be an older torch_npu
                    fused = npu_kernels.is_there(operation)
                chosen = (
                    "torch" if plain else "compiled" if compiled else "npu" if fused else "torch"
                )
                setattr(self, operation, type(getattr(self, operation))(chosen))

    def check_attention(
        self,
        device_type: str,
        dtype: torch.dtype,
        head_width: int,
        *,
        masks: bool,
        deterministic: Deterministic | bool,
    ) -> None:
        """Refuse a backend of attention that the device, dtype, head or mask rules out.

        Args:
            device_type: of the run.
            dtype: of queries, keys and values.
            head_width: channels of a head.
            masks: whether documents are kept apart.
            deterministic: whether kernels must be deterministic.
        """
        name = self.attention.value
        if name not in BACKENDS:
            return
        if device_type == "npu" or (device_type == "cpu" and name not in CPU_BACKENDS):
            has = (
                f"has {' and '.join(CPU_BACKENDS)} only"
                if device_type == "cpu"
                else "chooses by itself"
            )
            raise ConfigError(
                f"kernels.attention={name} is a backend that this run's device lacks: attention "
                f"on {device_type} {has}; set kernels.attention=auto"
            )
        if masks and self.document_attention is DocumentKernel.flex:
            raise ConfigError(
                f"kernels.attention={name} has no effect with kernels.document_attention=flex, "
                "which computes all attention under data.mask_documents=true; set "
                "kernels.attention=auto"
            )
        if device_type == "cpu":
            return
        narrow = name in ("cudnn", "flash")
        if narrow and dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"kernels.attention={name} takes bfloat16 and float16 only on CUDA, and "
                f"parallel.param_dtype={str(dtype).removeprefix('torch.')}; set "
                "parallel.param_dtype=bfloat16 or kernels.attention=auto"
            )
        if narrow and masks:
            raise ConfigError(
                f"kernels.attention={name} cannot train with the mask of "
                "data.mask_documents=true: flash takes none, and cuDNN returned NaN gradients "
                "(github.com/pytorch/pytorch/issues/196678); set kernels.attention=auto"
            )
        if (name == "flash" and head_width > FLASH_WIDTH) or (name == "cudnn" and head_width % 8):
            limit = f"at most {FLASH_WIDTH}" if name == "flash" else "a multiple of 8"
            raise ConfigError(
                f"kernels.attention={name} needs heads whose width is {limit}, and those of this "
                f"model have {head_width} channels; set kernels.attention=auto"
            )
        if name == "cudnn" and deterministic:
            raise ConfigError(
                "kernels.attention=cudnn is not deterministic, and train.deterministic="
                f"{Deterministic(deterministic).word}; set kernels.attention=auto"
            )

    def check_documents(self, masks: bool, selective: bool) -> None:
        """Refuse flex_attention of documents without any, and flex_attention with selective
        checkpointing."""
        flexes = [operation for operation, name in self.names().items() if name == "flex"]
        if self.document_attention is DocumentKernel.flex and not masks:
            raise ConfigError(
                "kernels.document_attention=flex is for sequences whose documents are kept "
                "apart; set data.mask_documents=true or kernels.document_attention=auto"
            )
        if selective and flexes:
            raise ConfigError(
                "memory.gradient_checkpointing=selective knows no operator of "
                f"kernels.{flexes[0]}=flex whose result it could keep; set "
                "memory.gradient_checkpointing=full"
            )


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
    layer = next(module for module in model.modules() if isinstance(module, Attention))
    flexes = masks and config.document_attention is DocumentKernel.flex
    if name in ("npu", "flex") or flexes or device.type not in ("cuda", "cpu"):
        return None
    memory_BTHK = torch.empty(
        (1, seq_len, layer.n_heads, layer.head_dim), dtype=dtype, device=device
    )
    if type(memory_BTHK) is not Tensor:  # a fake one, for predictions
        return None
    q_BHTK = memory_BTHK.transpose(1, 2).requires_grad_()
    k_BGTK = q_BHTK[:, : layer.n_kv_heads]
    # Fused kernels of CUDA refuse a mask whose last dim has no stride of 1, which a real one has.
    seen = memory_BTHK.new_zeros(1, 1, 1, seq_len).expand(1, 1, seq_len, seq_len) if masks else None
    backends = (BACKENDS[name],) if name in BACKENDS else ()
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            return chosen_backend(q_BHTK, k_BGTK, k_BGTK, seen, backends)
        except RuntimeError as error:
            if not backends:
                return None  # attention may run even if the private function does not
            why = "; ".join(
                dict.fromkeys(str(reason.message).partition(" (Triggered")[0] for reason in reasons)
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
