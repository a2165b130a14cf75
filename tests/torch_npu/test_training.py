"""Every strategy and every memory switch trains on the real torch_npu, to the weights of a CPU run.

Both run the same kernels and add losses and norms over ranks in float32 (``train.sum_dtype``: HCCL
has no float64), so they must agree in every bit, except for ``CLOSE``.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.torch_npu.runs import Result, differences, run

pytestmark = pytest.mark.torch_npu

PLAIN = ["parallel=fsdp2"]
"""Base run: settings that must not change the weights are compared with it."""
HYBRID = ["parallel=fsdp1", "mesh.fsdp_size=2"]
EXACT = {
    "ddp": ["parallel=ddp"],
    "fsdp1": ["parallel=fsdp1"],
    "fsdp2": PLAIN,
    "fsdp2, hsdp": [*PLAIN, "mesh.fsdp_size=1"],
    "fsdp2, attention and mlp": [
        *PLAIN, "parallel.wrap=block_attn_mlp", "parallel.forward_prefetch=1"
    ],
    "toy_ddp": ["parallel=toy_ddp"],
    "toy_zero1": ["parallel=toy_zero1"],
    "toy_zero2": ["parallel=toy_zero2"],
    "toy_zero3": ["parallel=toy_zero3"],
    "toy_fsdp": ["parallel=toy_fsdp"],
    "full checkpointing": [*PLAIN, "memory.gradient_checkpointing=full"],
    "selective checkpointing": [*PLAIN, "memory.gradient_checkpointing=selective"],
    "optimizer offload, lazy": [
        *PLAIN, "memory.optimizer_offload=true", "memory.offload_schedule=lazy"
    ],
    "optimizer offload, pipelined": [
        "parallel=fsdp1", "memory.optimizer_offload=true", "memory.offload_schedule=pipelined"
    ],
    "cpu offload": [*PLAIN, "memory.cpu_offload=true"],
    "cpu offload, overlapped": [
        *PLAIN, "memory.cpu_offload=true", "memory.cpu_offload_executor=overlapped"
    ],
}  # fmt: skip
OWN = {
    "single": ["parallel=single"],
    "fsdp1, flat": [
        "parallel=fsdp1",
        "parallel.use_orig_params=false",
        "optim.weight_decay_on=all",
    ],
    "bf16": [*PLAIN, "parallel.param_dtype=bfloat16"],
    "two microbatches": [*PLAIN, "train.grad_accum=2"],
}
"""Compared with the same arguments on a CPU."""
CLOSE = {
    "fsdp1, hsdp over four ranks": HYBRID,
    "chunked loss": [*PLAIN, "memory.chunk_loss=true"],
    "experts": [*PLAIN, "model=qwen3_moe_debug"],
}
"""Runs with another order of summation: gloo; the chunked loss and the experts, whose matmuls the
device chooses."""
THREE_BLOCKS = [*PLAIN, "model.n_layers=3"]
OFFLOADED = [
    *THREE_BLOCKS,
    "memory.gradient_checkpointing=full",
    "memory.activation_offload=true",
]
CASES = {name: (overrides, PLAIN) for name, overrides in EXACT.items()} | {
    name: (overrides, overrides) for name, overrides in OWN.items()
}
CASES["activation offload"] = (OFFLOADED, THREE_BLOCKS)

OnCPU = Callable[[list[str]], Result]


def ranks_of(overrides: list[str]) -> int:
    return 1 if "parallel=single" in overrides else 4 if overrides == HYBRID else 2


@pytest.fixture(scope="module")
def on_cpu(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> OnCPU:
    """Each run on a CPU once."""

    @functools.cache
    def result(overrides: tuple[str, ...]) -> Result:
        return run(
            environment,
            tmp_path_factory.mktemp("cpu") / "run",
            "cpu",
            overrides,
            ranks_of(list(overrides)),
        )

    return lambda overrides: result(tuple(overrides))


@pytest.mark.parametrize(("overrides", "oracle"), CASES.values(), ids=CASES)
def test_training_on_an_npu_matches_the_cpu_bitwise(
    environment: Path,
    tmp_path: Path,
    on_cpu: OnCPU,
    overrides: list[str],
    oracle: list[str],
) -> None:
    """Oracle: a run with launch.device=cpu; losses and weights bitwise, gradient norms to float32's
    rounding."""
    npu = run(environment, tmp_path / "npu", "npu", overrides, ranks_of(overrides))
    assert differences(npu.weights(), on_cpu(oracle).weights()) == []
    assert npu.losses() == on_cpu(oracle).losses()
    # Over shards of another partition
    assert npu.norms() == pytest.approx(on_cpu(oracle).norms(), rel=1e-6)


@pytest.mark.parametrize("overrides", CLOSE.values(), ids=CLOSE)
def test_training_on_an_npu_is_close_to_the_cpu(
    environment: Path, tmp_path: Path, on_cpu: OnCPU, overrides: list[str]
) -> None:
    """Oracle: the same on a CPU: losses to 1e-6, and all but a thousandth of each weight within
    1e-6 of it.

    AdamW turns a gradient close to zero into a step of the learning rate's size, here up to 3e-5.
    """
    ranks = ranks_of(overrides)
    npu = run(
        environment,
        tmp_path / "npu",
        "npu",
        overrides,
        ranks,
        {"STUB_DEVICES": str(ranks)},
    )
    expected = on_cpu(overrides).weights()
    assert npu.losses() == pytest.approx(on_cpu(overrides).losses(), rel=1e-6)
    for name, weight in npu.weights().items():
        far = (weight - expected[name]).abs() > 1e-6
        assert far.double().mean() < 1e-3, name
