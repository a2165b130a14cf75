"""Select the implementation of each operation by settings and device.

The implementations are in ``models/kernels.py``. ``auto`` is PyTorch's on CUDA and CPU, and torch_npu's on an NPU.
Compiled kernels are used only on request, since their speed on accelerators has not been measured.
"""

import dataclasses
from dataclasses import dataclass
from enum import Enum

from fsdptoys.device import available_device_type
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel, choose_kernels, npu_kernels, use_kernels


class KernelLibrary(Enum):
    """Library of the implementation."""

    auto = "auto"
    """torch_npu's on an NPU, else PyTorch's."""
    torch = "torch"
    npu = "npu"


class Kernel(Enum):
    """Library of the implementation, or PyTorch's compiled with ``torch.compile``."""

    auto = "auto"
    """torch_npu's on an NPU, else PyTorch's."""
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
    """One matmul per expert, with the same arithmetic on every device; for comparisons between devices."""
    npu = "npu"


@dataclass
class KernelConfig:
    """Implementations of a model's operations."""

    attention: KernelLibrary = KernelLibrary.auto
    """Causal attention: PyTorch's, or torch_npu's."""
    document_attention: DocumentKernel = DocumentKernel.auto
    """Attention under ``data.mask_documents``: PyTorch's with a mask, or flex_attention."""
    rms_norm: Kernel = Kernel.auto
    """RMSNorm: PyTorch's, compiled separately, or torch_npu's."""
    rotary: Kernel = Kernel.auto
    """Rotary position embedding: PyTorch's, compiled separately, or torch_npu's."""
    swiglu: Kernel = Kernel.auto
    """SwiGLU gate of a dense feed-forward layer: PyTorch's, compiled separately, or torch_npu's."""
    grouped_matmul: GroupedKernel = GroupedKernel.auto
    """Matmuls of experts: PyTorch's (a loop where it has no grouped one), always a loop, or torch_npu's."""

    def names(self) -> dict[str, str]:
        """Map each operation to the name of its implementation."""
        return {field.name: getattr(self, field.name).value for field in dataclasses.fields(self)}

    @property
    def compiles(self) -> bool:
        """Whether any operation is compiled separately."""
        return Kernel.compiled.value in self.names().values()

    def resolve(self, device_type: str, *, compiles: bool, deterministic: bool) -> None:
        """Replace every ``auto``, and check the choices against the device, compiled blocks and deterministic mode."""
        for operation, name in self.names().items():
            # Experts are not compiled.
            seen, fix = compiles and operation != "grouped_matmul", f"set kernels.{operation}=auto"
            if name == "npu" and device_type != "npu":
                raise ConfigError(f"kernels.{operation}=npu is torch_npu's, and this run is on {device_type}; {fix}")
            if name == "npu" and seen:
                raise ConfigError(
                    f"kernels.{operation}=npu is a kernel that train.compile=true cannot see into, which torch_npu "
                    f"documents for attention as not to be compiled; {fix}"
                )
            if name == "flex" and (device_type != "cuda" or deterministic):
                where = f"this run is on {device_type}" if device_type != "cuda" else "train.deterministic=true"
                raise ConfigError(
                    "kernels.document_attention=flex is PyTorch's flex_attention, which trains on CUDA alone and is "
                    f"not known to be deterministic, and {where}; set kernels.document_attention=auto"
                )
            if name == "auto":
                fused = device_type == "npu" and not seen and not deterministic and operation in npu_kernels.OPERATORS
                if fused and available_device_type() == "npu" and not npu_kernels.is_there(operation):
                    fused = False  # an older torch_npu; when planning on another machine, the operator is assumed
                setattr(self, operation, type(getattr(self, operation))("npu" if fused else "torch"))

    def check_documents(self, masks: bool, selective: bool) -> None:
        """Refuse flex_attention without document masking or with selective checkpointing."""
        if self.document_attention is not DocumentKernel.flex:
            return
        if not masks:
            raise ConfigError(
                "kernels.document_attention=flex is for sequences whose documents are kept apart; set "
                "data.mask_documents=true or kernels.document_attention=auto"
            )
        if selective:
            raise ConfigError(
                "memory.gradient_checkpointing=selective knows no operator of kernels.document_attention=flex whose "
                "result it could keep; set memory.gradient_checkpointing=full"
            )


def put_kernels(model: DecoderModel, config: KernelConfig) -> None:
    """Set the implementations of a model that is not compiled yet to those of the resolved settings."""
    for operation, name in config.names().items():
        if name == "npu" and not npu_kernels.is_there(operation):
            needed = npu_kernels.OPERATORS[operation]
            raise ConfigError(
                f"kernels.{operation}=npu needs torch_npu's {needed}, which is not installed here; install the "
                f"torch_npu of this torch or set kernels.{operation}=torch"
            )
    use_kernels(model, choose_kernels(config.names()))
