"""Kernels against device, compiler, deterministic modes, dtype and mask."""

from fsdptoys.config.kernel_choice import KernelConfig
from fsdptoys.device import DEVICE_TYPES, KINDS
from fsdptoys.models.attention import BACKENDS

from .rule import Rules

KERNELS = Rules()
FLASH_WIDTH = 256
"""Widest head of FlashAttention in PyTorch."""

for _operation in sorted(KernelConfig().names().keys() - {"document_attention"}):
    KERNELS.exclude(
        f"kernels.{_operation}=npu",
        "launch.device!=npu",
        says=f"kernels.{_operation}=npu is torch_npu's, which {{launch.device}} does not have; set "
        f"kernels.{_operation}=auto",
    )
    if _operation != "grouped_matmul":  # experts are not compiled
        KERNELS.exclude(
            f"kernels.{_operation}=npu",
            "train.compile=true",
            says=f"kernels.{_operation}=npu is a kernel that train.compile=true cannot see into, "
            "which torch_npu documents for attention as not to be compiled; set "
            f"kernels.{_operation}=auto",
        )
for _operation in ("attention", "document_attention"):
    _flex = f"kernels.{_operation}=flex"
    KERNELS.exclude(
        _flex,
        "launch.device!=cuda",
        says=f"{_flex} is PyTorch's flex_attention, which trains on CUDA alone, not on "
        f"{{launch.device}}; set kernels.{_operation}=auto",
    )
    KERNELS.exclude(
        _flex,
        "train.deterministic!=false",
        says=f"{_flex} is not known to be deterministic, as {{train.deterministic}} asks for; set "
        f"kernels.{_operation}=auto",
    )
    KERNELS.exclude(
        _flex,
        "memory.gradient_checkpointing=selective",
        says="memory.gradient_checkpointing=selective knows no operator of "
        f"{_flex} whose result it could keep; set memory.gradient_checkpointing=full",
    )
KERNELS.exclude(
    "kernels.attention=flex",
    "train.compile=true",
    says="kernels.attention=flex is compiled by itself, and train.compile=true compiles whole "
    "blocks; set kernels.attention=auto or train.compile=false",
)
KERNELS.exclude(
    "kernels.document_attention=flex",
    "data.mask_documents=false",
    says="kernels.document_attention=flex is for sequences whose documents are kept apart; set "
    "data.mask_documents=true or kernels.document_attention=auto",
)
for _name in BACKENDS:
    for _device in DEVICE_TYPES:
        if _name in KINDS[_device].attention_backends:
            continue
        KERNELS.exclude(
            f"kernels.attention={_name}",
            f"launch.device={_device}",
            says=f"kernels.attention={_name} is a backend that {{launch.device}} lacks; set "
            "kernels.attention=auto",
        )
    KERNELS.exclude(
        f"kernels.attention={_name}",
        "kernels.document_attention=flex",
        "data.mask_documents=true",
        says=f"kernels.attention={_name} has no effect with kernels.document_attention=flex, which "
        "computes all attention under data.mask_documents=true; set kernels.attention=auto",
    )
for _name in ("cudnn", "flash"):
    KERNELS.exclude(
        f"kernels.attention={_name}",
        "launch.device=cuda",
        "parallel.param_dtype=float32",
        says=f"kernels.attention={_name} takes bfloat16 and float16 only on CUDA, not "
        "{parallel.param_dtype}; set parallel.param_dtype=bfloat16 or kernels.attention=auto",
    )
    KERNELS.exclude(
        f"kernels.attention={_name}",
        "launch.device=cuda",
        "data.mask_documents=true",
        says=f"kernels.attention={_name} cannot train with the mask of data.mask_documents=true: "
        "flash takes none, and cuDNN returned NaN gradients "
        "(github.com/pytorch/pytorch/issues/196678); set kernels.attention=auto",
    )
KERNELS.exclude(
    "kernels.attention=flash",
    "launch.device=cuda",
    when=lambda config, where: config.model.head_width > FLASH_WIDTH,
    says=f"kernels.attention=flash takes heads of at most {FLASH_WIDTH} channels, and this model's "
    "have {model.head_width}; set kernels.attention=auto",
)
KERNELS.exclude(
    "kernels.attention=cudnn",
    when=lambda config, where: config.model.head_width % 8 > 0,
    says="kernels.attention=cudnn takes heads whose width is a multiple of 8, and this model's "
    "have {model.head_width}; set kernels.attention=auto",
)
KERNELS.exclude(
    "kernels.attention=cudnn",
    "train.deterministic!=false",
    says="kernels.attention=cudnn is not deterministic, and {train.deterministic}; set "
    "kernels.attention=auto",
)
