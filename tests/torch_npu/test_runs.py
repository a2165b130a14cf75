"""Other parts of a run on the real torch_npu: collectives, checkpoints, profiler, memory histories,
out of memory."""

import json
import pickle
import re
from pathlib import Path

import pytest

from tests.torch_npu.runs import differences, run, run_fused, run_python

pytestmark = pytest.mark.torch_npu


def test_collectives_are_correct_and_float64_is_refused(environment: Path) -> None:
    """Oracle: the values by hand. torch_npu pads lists itself, and checks the dtypes that HCCL
    accepts."""
    output = run_python(
        environment,
        [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "-m",
            "tests.torch_npu.collectives",
        ],
    )
    results = {
        int(rank): json.loads(text)
        for rank, text in re.findall(r"rank (\d): (.*)", output)
    }
    for rank in range(2):
        assert results[rank] == {
            "all_gather": [[0, 1, 2], [10, 11, 12]],
            "objects": [{"rank": 0}, {"rank": 1}],
            "mean": [5, 6, 7],
            "part": [[10], [12]][rank],
            "all_to_all": [[0, 10], [1, 11]][rank],
            "large": [3],
            "refused": "HCCL allreduce: Unsupported data type at::kDouble",
        }


@pytest.mark.parametrize(
    ("model", "operators"),
    [
        (
            "llama_debug",
            {"npu_fusion_attention", "npu_rms_norm", "npu_rotary_mul", "npu_swiglu"},
        ),
        (
            "qwen3_moe_debug",
            {
                "npu_fusion_attention",
                "npu_rms_norm",
                "npu_rotary_mul",
                "npu_grouped_matmul",
            },
        ),
    ],
)
def test_fused_operators_of_torch_npu_are_used_by_default(
    environment: Path, tmp_path: Path, model: str, operators: set[str]
) -> None:
    """Oracle: losses on a CPU with PyTorch's, to 1e-5; and the calls of the operators and of their
    backwards."""
    overrides = [f"model={model}", "parallel=fsdp2"]
    npu = run_fused(environment, tmp_path / "npu", overrides)
    counted = [
        json.loads(line)["calls"] for line in re.findall(r'{"calls": .*}', npu.output)
    ]
    backwards = {"npu_fusion_attention_grad", "npu_rms_norm_backward"}
    backwards |= {"npu_swiglu_backward"} if "npu_swiglu" in operators else set()
    assert [set(calls) for calls in counted] == [operators | backwards] * 2
    cpu = run(environment, tmp_path / "cpu", "cpu", overrides)
    assert npu.losses() == pytest.approx(cpu.losses(), rel=1e-5)


def test_float64_sums_are_refused_before_the_start(
    environment: Path, tmp_path: Path
) -> None:
    """Oracle: exit status 2, and no run directory."""
    refused = run(
        environment,
        tmp_path / "run",
        "npu",
        ["parallel=fsdp2", "train.sum_dtype=float64"],
        status=2,
    )
    assert "train.sum_dtype=float64" in refused.output and not refused.folder.exists()


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_resumed_run_equals_the_uninterrupted_one_bitwise(
    environment: Path, tmp_path: Path, strategy: str
) -> None:
    """Oracle: the uninterrupted run; weights bitwise."""
    overrides = [f"parallel={strategy}", "train.steps=4", "checkpoint.every=2"]
    whole = run(environment, tmp_path / "whole", "npu", overrides)
    (after_two,) = (whole.folder / "checkpoints").glob("*2")
    resumed = run(
        environment,
        tmp_path / "resumed",
        "npu",
        [*overrides, f"checkpoint.resume={after_two}"],
    )
    assert [step["step"] for step in resumed.steps()] == [3, 4]
    assert differences(resumed.weights(), whole.weights()) == []


def test_profile_uses_the_profiler_of_torch_npu(
    environment: Path, tmp_path: Path
) -> None:
    """Oracle: the trace that torch_npu's own analysis writes: the operators of the host, since CANN
    records nothing."""
    overrides = [
        "parallel=fsdp2",
        "profile.enabled=true",
        "profile.skip_steps=0",
        "profile.active_steps=1",
    ]
    result = run(environment, tmp_path / "run", "npu", overrides)
    (trace_folder,) = (result.folder / "profile").glob("rank0_*_ascend_pt")
    output = "".join(result.output.split())  # a console narrower than the path cuts it
    assert f"traceofstep2:{trace_folder}" in output, result.output
    events = json.loads(
        (trace_folder / "ASCEND_PROFILER_OUTPUT/trace_view.json").read_text()
    )
    names = {event["name"] for event in events}
    assert "aten::mm" in names and any(
        name.startswith("ProfilerStep#2") for name in names
    )


def test_memory_history_has_the_stacks_of_torch_npu(
    environment: Path, tmp_path: Path
) -> None:
    """Oracle: the pickle, which has Python's stack of the allocations in a step, and segments that
    hold them."""
    result = run(
        environment,
        tmp_path / "run",
        "npu",
        ["parallel=fsdp2", "profile.snapshot=true"],
    )
    history = pickle.loads((result.folder / "profile/memory-rank0.pickle").read_bytes())
    allocated = [
        event for event in history["device_traces"][0] if event["action"] == "alloc"
    ]
    assert any(
        "fsdptoys/train/trainer.py" in frame["filename"]
        for event in allocated
        for frame in event["frames"]
    )
    assert all(segment["is_expandable"] for segment in history["segments"])
    assert (result.folder / "profile/memory-rank0.html").exists()


def test_out_of_memory_is_explained_with_the_numbers_of_torch_npu(
    environment: Path, tmp_path: Path
) -> None:
    """Oracle: the stub's capacity of 40 MiB, and the report's text."""
    overrides = ["parallel=fsdp2", "train.batch_size=64", "profile.snapshot=true"]
    result = run(
        environment,
        tmp_path / "run",
        "npu",
        overrides,
        variables={"STUB_DEVICE_MIB": "40"},
        status=1,
    )
    assert re.search(
        r"the memory of the npu device ran out on rank \d in the forward of step 1",
        result.output,
    )
    assert re.search(
        r"MiB asked for, 40\.00 MiB in all, \d+\.\d+ MiB allocated, \d+\.\d+ MiB reserved",
        result.output,
    )
    assert "memory.gradient_checkpointing=full" in result.output
    assert (result.folder / "profile/memory-rank0-out-of-memory.pickle").exists()
