"""Kernel implementations of a run: by device, by setting, and through to the trained parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.config import kernel_choice as kernels
from fsdptoys.config.compose import compose_config
from fsdptoys.config.kernel_choice import (
    AttentionKernel,
    Kernel,
    KernelConfig,
    find_attention_backend,
    put_kernels,
)
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models.kernels import IMPLEMENTATIONS
from fsdptoys.models.ops import Layer
from fsdptoys.parallel import FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.train.trainer import Trainer
from tests.harness.families import SMALL
from tests.harness.folders import build
from tests.harness.npu_stand_ins import IS_REAL
from tests.harness.outcomes import train_all
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config

COMPILED = KernelConfig(rms_norm=Kernel.compiled)
FUSED = {operation for operation, names in IMPLEMENTATIONS.items() if "npu" in names}


def test_every_operation_has_a_setting_with_all_implementations() -> None:
    """Oracle: the table of the models."""
    choices = {
        name: {choice.value for choice in type(KernelConfig().__dict__[name])}
        for name in IMPLEMENTATIONS
    }
    assert choices == {
        name: {"auto", *names} for name, names in IMPLEMENTATIONS.items()
    }
    assert set(KernelConfig().names()) == set(IMPLEMENTATIONS)


@pytest.mark.parametrize(
    ("device_type", "overrides", "fused"),
    [
        ("cpu", (), set()),
        ("cuda", (), {"rotary", "swiglu"}),
        ("cuda", ("kernels.rotary=torch",), {"swiglu"}),
        ("cuda", ("train.compile=true",), set()),
        ("cuda", ("parallel=single", "train.deterministic=true"), set()),
        ("cuda", ("debug.trace_collectives=true",), set()),
        ("npu", (), FUSED),
        ("npu", ("parallel=single", "train.deterministic=true"), set()),
        ("npu", ("train.compile=true",), {"grouped_matmul"}),
        (
            "npu",
            ("parallel=single", "train.deterministic=true", "kernels.rms_norm=npu"),
            {"rms_norm"},
        ),
        (
            "npu",
            ("kernels.rms_norm=torch", "kernels.attention=torch"),
            {"rotary", "swiglu", "grouped_matmul"},
        ),
    ],
)
def test_auto_is_torch_npu_on_npus_compiled_for_two_operations_on_cuda_and_pytorch_elsewhere(
    device_type: str, overrides: tuple[str, ...], fused: set[str]
) -> None:
    """Oracle: the documented rule; explicit settings stay."""
    config = compose_config(["experiment=null", *overrides])
    config.validate(1, device_type)
    library = {"npu": "npu", "cuda": "compiled"}.get(device_type)
    assert config.kernels.names() == {
        name: library if name in fused else "torch" for name in IMPLEMENTATIONS
    }


@pytest.mark.parametrize("has_triton", [False, True])
def test_operations_are_compiled_only_where_triton_works(
    has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: PyTorch's own without it."""
    monkeypatch.setattr(kernels, "available_device_type", lambda: "cuda")
    monkeypatch.setattr(kernels, "triton_works", lambda: has_triton)
    config = KernelConfig()
    config.resolve("cuda", compiles=False, deterministic=False, fuses=True)
    assert (
        config.rotary
        is config.swiglu
        is (Kernel.compiled if has_triton else Kernel.torch)
    )


@pytest.mark.parametrize(
    ("attention", "masks", "expected"),
    [("torch", False, "flash"), ("torch", True, "flash"), ("math", True, "math")],
)
def test_backend_of_the_run_is_found(
    attention: str, masks: bool, expected: str
) -> None:
    """Oracle: the only fused backend of a CPU, and the one that is set."""
    model = build(SMALL["llama4"])
    config = KernelConfig(attention=AttentionKernel(attention))
    assert (
        find_attention_backend(
            model, config, torch.device("cpu"), torch.float32, 20, masks=masks
        )
        == expected
    )


def test_backend_that_the_device_refuses_is_reported_in_one_sentence() -> None:
    """Oracle: the expected message, with PyTorch's reason."""
    config = KernelConfig(attention=AttentionKernel.cudnn)
    with pytest.raises(ConfigError) as caught:
        find_attention_backend(
            build(SMALL["qwen3"]),
            config,
            torch.device("cpu"),
            torch.float32,
            20,
            masks=False,
        )
    message = str(caught.value)
    assert message.startswith(
        "kernels.attention=cudnn cannot run here, with 4 heads of 32 channels in torch.float32 ("
    )
    assert (
        message.endswith("; set kernels.attention=auto")
        and "No viable backend" in message
    )


@pytest.mark.skipif(IS_REAL, reason="torch_npu is here")
def test_missing_torch_npu_is_reported_before_anything_is_allocated() -> None:
    """Oracle: the expected message, while the model is on the meta device."""
    config = compose_config(["experiment=null"])
    config.validate(2, "npu")
    with torch.device("meta"):
        model = config.model.build()
    with pytest.raises(ConfigError) as caught:
        put_kernels(model, config.kernels)
    assert str(caught.value) == (
        "kernels.attention=npu needs torch_npu's npu_fusion_attention, which is not installed "
        "here; install the torch_npu of this torch or set kernels.attention=torch"
    )


def _kernels_of_trainer() -> list[Any]:
    memory = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)
    trainer = Trainer(make_config(SingleConfig(), 1, kernels=COMPILED, memory=memory))
    return [
        (
            layer.ops.rms_norm is IMPLEMENTATIONS["rms_norm"]["compiled"],
            layer.ops.attention.__name__,
        )
        for layer in trainer.strategy.model.modules()
        if isinstance(layer, Layer)
    ]


def test_trainer_sets_the_configured_kernels_in_every_layer() -> None:
    """Oracle: the table's own functions, in all layers of a checkpointed model."""
    kernels = run_ranks(1, _kernels_of_trainer)[0]
    # A block: two norms, attention with four projections, feed-forward with three. Beside the
    # blocks: embedding, norm, head, and the model, which makes masks.
    assert len(kernels) == 3 * (2 + 5 + 4) + 4
    assert set(kernels) == {(True, "attention")}


@pytest.mark.extended
def test_compiled_kernels_match_one_process_bitwise_and_pytorch_closely() -> None:
    """Oracle: one process that runs the same micro-batches, bitwise; PyTorch's operators to 1e-5 in
    float32."""

    def config(
        parallel: ParallelConfig, ranks: int, kernels: KernelConfig | None = COMPILED
    ) -> Any:
        return make_config(parallel, ranks, steps=2, kernels=kernels)

    one = SingleConfig(simulated_ranks=2)
    single, plain = run_ranks(1, train_all, [config(one, 1), config(one, 1, None)])[0]
    (sharded,) = run_ranks(2, train_all, [config(FSDP2Config(), 2)])[0]
    assert sharded == single
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-5)
    assert sharded.parameters != plain.parameters  # others' roundings


@pytest.mark.parametrize(
    "missing", [None, "triton", "compiler", "headers", "capability"]
)
def test_nothing_is_compiled_on_a_cuda_machine_without_a_part_of_triton(
    missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the parts one by one; a configuration without any of them is PyTorch's own."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(kernels, "available_device_type", lambda: "cuda")
    monkeypatch.setattr(
        kernels.importlib.util,
        "find_spec",
        lambda _: None if missing == "triton" else object(),
    )
    monkeypatch.setattr(
        kernels.shutil,
        "which",
        lambda _: None if missing == "compiler" else "/usr/bin/gcc",
    )
    folder = tmp_path / ("lost" if missing == "headers" else "")
    monkeypatch.setattr(kernels.sysconfig, "get_path", lambda _: str(folder))
    capability = (6, 1) if missing == "capability" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    kernels.triton_works.cache_clear()
    config = KernelConfig()
    config.resolve("cuda", compiles=False, deterministic=False, fuses=True)
    kernels.triton_works.cache_clear()
    assert (
        config.rotary is config.swiglu is (Kernel.torch if missing else Kernel.compiled)
    )


@pytest.mark.skipif(IS_REAL, reason="torch_npu is here")
def test_auto_is_pytorch_if_torch_npu_lacks_the_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: an NPU without registered operators; explicit settings stay."""
    monkeypatch.setattr(kernels, "available_device_type", lambda: "npu")
    config = compose_config(["experiment=null", "kernels.swiglu=npu"])
    config.validate(2, "npu")
    assert config.kernels.names() == {
        name: "npu" if name == "swiglu" else "torch" for name in IMPLEMENTATIONS
    }
