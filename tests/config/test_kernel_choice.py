"""Kernel implementations of a run: by device, by setting, and through to the trained parameters."""

from typing import Any

import pytest
import torch

from fsdptoys.config import kernel_choice as kernels
from fsdptoys.config.compose import compose_config
from fsdptoys.config.kernel_choice import Kernel, KernelConfig, put_kernels
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models.kernels import IMPLEMENTATIONS, UsesKernels
from fsdptoys.parallel import FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.train.trainer import Trainer
from scripts.parity import train_all
from scripts.ranks import run_ranks
from tests.npu_stand_ins import IS_REAL
from tests.parallel.runs import make_config

COMPILED = KernelConfig(rms_norm=Kernel.compiled)
FUSED = {operation for operation, named in IMPLEMENTATIONS.items() if "npu" in named}


def test_every_operation_has_a_setting_with_all_implementations() -> None:
    """Oracle: the table of the models."""
    choices = {name: {choice.value for choice in type(KernelConfig().__dict__[name])} for name in IMPLEMENTATIONS}
    assert choices == {name: {"auto", *named} for name, named in IMPLEMENTATIONS.items()}
    assert set(KernelConfig().names()) == set(IMPLEMENTATIONS)


@pytest.mark.parametrize(
    ("device_type", "words", "npu"),
    [
        ("cpu", (), set()),
        ("cuda", (), set()),
        ("npu", (), FUSED),
        ("npu", ("parallel=single", "train.deterministic=true"), set()),
        ("npu", ("train.compile=true",), {"grouped_matmul"}),
        ("npu", ("parallel=single", "train.deterministic=true", "kernels.rms_norm=npu"), {"rms_norm"}),
        ("npu", ("kernels.rms_norm=torch", "kernels.attention=torch"), {"rotary", "swiglu", "grouped_matmul"}),
    ],
)
def test_auto_is_torch_npu_on_npus_and_pytorch_elsewhere(
    device_type: str, words: tuple[str, ...], npu: set[str]
) -> None:
    """Oracle: the documented rule; explicit settings stay."""
    config = compose_config(["experiment=null", *words])
    config.validate(1, device_type)
    assert config.kernels.names() == {name: "npu" if name in npu else "torch" for name in IMPLEMENTATIONS}


def test_torch_npu_kernels_are_refused_in_compiled_blocks() -> None:
    """Oracle: the expected message."""
    config = compose_config(["train.compile=true", "kernels.attention=npu"])
    with pytest.raises(ConfigError) as caught:
        config.validate(2, "npu")
    assert str(caught.value) == (
        "kernels.attention=npu is a kernel that train.compile=true cannot see into, which torch_npu documents for "
        "attention as not to be compiled; set kernels.attention=auto"
    )


@pytest.mark.skipif(IS_REAL, reason="torch_npu is here")
def test_auto_is_pytorch_if_torch_npu_lacks_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: an NPU without registered operators; explicit settings stay."""
    monkeypatch.setattr(kernels, "available_device_type", lambda: "npu")
    config = compose_config(["experiment=null", "kernels.swiglu=npu"])
    config.validate(2, "npu")
    assert config.kernels.names() == {name: "npu" if name == "swiglu" else "torch" for name in IMPLEMENTATIONS}


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
        "kernels.attention=npu needs torch_npu's npu_fusion_attention, which is not installed here; install the "
        "torch_npu of this torch or set kernels.attention=torch"
    )


def _kernels_of_trainer() -> list[Any]:
    memory = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)
    trainer = Trainer(make_config(SingleConfig(), 1, kernels=COMPILED, memory=memory))
    return [
        (layer.kernels.rms_norm is IMPLEMENTATIONS["rms_norm"]["compiled"], layer.kernels.attention.__name__)
        for layer in trainer.strategy.model.modules()
        if isinstance(layer, UsesKernels)
    ]


def test_trainer_sets_the_configured_kernels_in_every_layer() -> None:
    """Oracle: the table's own functions, in all layers of a checkpointed model."""
    found = run_ranks(1, _kernels_of_trainer)[0]
    # Two norms, attention and feed-forward a block, the norm before the head, and the model, which makes masks.
    assert len(found) == 3 * 4 + 2
    assert set(found) == {(True, "attention")}


@pytest.mark.usefixtures("unmeasured")
def test_compiled_kernels_match_one_process_bitwise_and_pytorch_closely() -> None:
    """Oracle: one process that runs the same micro-batches, bitwise; PyTorch's operators to 1e-5 in float32."""

    def config(parallel: ParallelConfig, ranks: int, kernels: KernelConfig | None = COMPILED) -> Any:
        return make_config(parallel, ranks, steps=2, kernels=kernels)

    one = SingleConfig(simulated_ranks=2)
    single, plain = run_ranks(1, train_all, [config(one, 1), config(one, 1, None)])[0]
    (sharded,) = run_ranks(2, train_all, [config(FSDP2Config(), 2)])[0]
    assert sharded == single
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-5)
    assert sharded.parameters != plain.parameters  # others' roundings
