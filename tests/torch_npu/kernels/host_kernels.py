"""The environment's second backend extension: it lets torch load torch_npu, then installs the
host's kernels."""

from collections.abc import Iterator

import torch

OWN = {
    *(
        "empty.memory_format",
        "empty_strided",
        "empty_with_format",
        "unsafe_empty_with_format",
        "copy_memory_",
    ),
    *(
        "as_strided",
        "view",
        "_reshape_alias",
        "alias",
        "detach",
        "resize_",
        "resize_as_",
        "_resize_output_",
    ),
    *("set_", "set_.source_Tensor", "set_.source_Tensor_storage_offset"),
    *(
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "record_stream",
        "is_pinned",
        "_pin_memory",
    ),
}
"""Kernels of torch_npu's that stay: they make and place tensors, and call no operator of the
device."""

ATTENTION = "scaled_dot_product_attention"
FUSED_ATTENTION = [
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
]
"""Operators that torch_npu lacks and the host's attention calls."""


def install() -> None:
    """Replace torch_npu's registrations for aten's operators."""
    import _host_kernels
    import torch_npu  # noqa: F401  (the extensions are loaded in no fixed order)

    on_host = list(FUSED_ATTENTION)
    composed = []
    composed_with_autograd = []
    for name in _aten_names():
        if name in OWN or name == ATTENTION:
            continue
        if _has(name, "AutogradPrivateUse1") and _has(
            name, "CompositeImplicitAutograd"
        ):
            composed_with_autograd.append(name)
        if _has(name, "PrivateUse1"):
            if _has(name, "CPU") or name == "copy_":
                on_host.append(name)
            elif any(
                _has(name, f"Composite{kind}Autograd{rest}")
                for kind, rest in COMPOSITES
            ):
                composed.append(name)
    _host_kernels.install(on_host, composed, composed_with_autograd)


COMPOSITES = (("Implicit", ""), ("Explicit", ""), ("Explicit", "NonFunctional"))


def _aten_names() -> Iterator[str]:
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            yield name.removeprefix("aten::")


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
