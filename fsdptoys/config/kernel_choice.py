"""Which implementation of each operation a run takes: settings, the choice by device, and giving it to a model.

The implementations are in ``models/kernels.py``; this is the one place that knows which of them belongs to which
device. ``auto`` is PyTorch's own on CUDA and on a CPU, and torch_npu's on an NPU. Compiled ones are taken only where
they are asked for: on an accelerator nobody has measured them here.
"""

import dataclasses
from dataclasses import dataclass
from enum import Enum

from fsdptoys.device import available_device_type
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel, choose_kernels, npu_kernels, use_kernels


class KernelLibrary(Enum):
    """Whose function."""

    auto = "auto"
    """torch_npu's on an NPU, else PyTorch's."""
    torch = "torch"
    npu = "npu"


class Kernel(Enum):
    """Whose function, or what the compiler makes of PyTorch's."""

    auto = "auto"
    """torch_npu's on an NPU, else PyTorch's."""
    torch = "torch"
    compiled = "compiled"
    npu = "npu"


class DocumentKernel(Enum):
    """Whose function."""

    auto = "auto"
    """``torch``."""
    torch = "torch"
    """A mask of the whole square, which every device takes."""
    flex = "flex"
    """PyTorch's flex_attention, which leaves out what no token sees; trains on CUDA alone."""


class GroupedKernel(Enum):
    """Whose function, or none but a loop."""

    auto = "auto"
    """torch_npu's on an NPU, else PyTorch's."""
    torch = "torch"
    looped = "looped"
    """A product for each expert, with the same arithmetic on every device: to compare devices by."""
    npu = "npu"


@dataclass
class KernelConfig:
    """Implementations of a model's operations."""

    attention: KernelLibrary = KernelLibrary.auto
    """Causal attention: PyTorch's, or torch_npu's."""
    document_attention: DocumentKernel = DocumentKernel.auto
    """Attention under ``data.mask_documents``: PyTorch's with a mask, or its flex_attention."""
    rms_norm: Kernel = Kernel.auto
    """RMSNorm: PyTorch's, compiled by itself, or torch_npu's."""
    rotary: Kernel = Kernel.auto
    """Rotary positions: PyTorch's, compiled by themselves, or torch_npu's."""
    swiglu: Kernel = Kernel.auto
    """Gate of a dense feed-forward: PyTorch's, compiled by itself, or torch_npu's."""
    grouped_matmul: GroupedKernel = GroupedKernel.auto
    """Products of experts: PyTorch's, one by one where it has no grouped one; always one by one; or torch_npu's."""

    def names(self) -> dict[str, str]:
        """Operation → implementation."""
        return {field.name: getattr(self, field.name).value for field in dataclasses.fields(self)}

    @property
    def compiles(self) -> bool:
        """Whether any operation is compiled by itself."""
        return Kernel.compiled.value in self.names().values()

    def resolve(self, device_type: str, *, compiles: bool, deterministic: bool) -> None:
        """Replace every ``auto``.

        Args:
            device_type: ``cuda``, ``npu`` or ``cpu``.
            compiles: whether blocks are compiled, which fuses PyTorch's operators and cannot see into others.
            deterministic: whether PyTorch must know that a kernel is deterministic.

        Raises:
            ConfigError: where an implementation is not this device's.
        """
        for operation, name in self.names().items():
            # Experts are left out of what is compiled.
            seen = compiles and operation != "grouped_matmul"
            if name == "npu" and device_type != "npu":
                raise ConfigError(
                    f"kernels.{operation}=npu is torch_npu's, and this run is on {device_type}; set "
                    f"kernels.{operation}=auto"
                )
            if name == "npu" and seen:
                raise ConfigError(
                    f"kernels.{operation}=npu is a kernel that train.compile=true cannot see into, which torch_npu "
                    f"documents for attention as not to be compiled; set kernels.{operation}=auto"
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
                    fused = False  # an older torch_npu; elsewhere, where a run is only planned, it is taken to be there
                setattr(self, operation, type(getattr(self, operation))("npu" if fused else "torch"))

    def check_documents(self, masks: bool, selective: bool) -> None:
        """Refuse flex_attention where it would do nothing or harm.

        Args:
            masks: ``data.mask_documents``.
            selective: whether ``memory.gradient_checkpointing=selective``.

        Raises:
            ConfigError: naming key, value and fix.
        """
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
    """Have a model take the implementations that the settings name.

    Args:
        model: before anything is compiled.
        config: resolved.

    Raises:
        ConfigError: if torch_npu, or an operator in it, is missing.
    """
    for operation, name in config.names().items():
        if name == "npu" and not npu_kernels.is_there(operation):
            needed = npu_kernels.OPERATORS[operation]
            raise ConfigError(
                f"kernels.{operation}=npu needs torch_npu's {needed}, which is not installed here; install the "
                f"torch_npu of this torch or set kernels.{operation}=torch"
            )
    use_kernels(model, choose_kernels(config.names()))
