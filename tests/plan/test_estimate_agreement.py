"""The fast estimate against traces of the real trainer."""

import pytest

from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.device.profile import load_hardware
from fsdptoys.plan.estimate.estimate import closed_form
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.replay import replay
from tests.plan.traced import configured, traced_on

FULL = ("memory.gradient_checkpointing=full", "memory.chunk_loss=true")
IN_BACKWARD = ("memory.optimizer_in_backward=true", "train.max_grad_norm=null", "train.skip_nonfinite=false")
TRACED = {
    "fsdp2": ("h100", ("parallel=fsdp2", *FULL, "memory.optimizer_offload=true")),
    "fsdp1": ("h100", ("parallel=fsdp1",)),
    # A micro-batch's gradients, next to DDP's buckets.
    "ddp": ("h100", ("parallel=ddp", "train.grad_accum=2")),
    "single": ("h100", ("parallel=single", "memory.optimizer_offload=true", "memory.offload_state_dtype=bfloat16")),
}
MORE = {
    "npu": ("a2", ("parallel=fsdp2",)),
    "muon": ("h100", ("parallel=fsdp2", "optim=muon")),
    "muon, ddp": ("h100", ("parallel=ddp", "optim=muon", "parallel.param_dtype=float32")),
    "bfloat16 states": ("h100", ("parallel=fsdp2", "optim.state_dtype=bfloat16")),
    "int4 states": ("h100", ("parallel=fsdp2", "optim.state_dtype=int4")),
    "optimizer in the backward": ("h100", ("parallel=fsdp2", *FULL, *IN_BACKWARD)),
    "lora": ("4090", ("parallel=single", "tune=lora", *FULL)),
    "nf4": ("h100", ("parallel=fsdp2", "tune=lora", "tune.base=nf4")),
}
MODEL = ("model=llama3_1b", "model.n_layers=4", "train.seq_len=2048")
ROWS = [pytest.param(*row, id=name) for name, row in TRACED.items()]
ROWS += [pytest.param(*row, id=name, marks=pytest.mark.extended) for name, row in MORE.items()]


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(("name", "words"), ROWS)
def test_closed_form_agrees_with_the_trace(name: str, words: tuple[str, ...]) -> None:
    """Oracle: the real trainer, traced and replayed, within the 10% above which a disagreement is reported."""
    hardware = load_hardware(name)
    ranks = 1 if "parallel=single" in words else 8
    config = configured([*MODEL, "parallel.param_dtype=bfloat16", *words], ranks, hardware.device_type)
    formula = closed_form(config, hardware, ranks)
    replayed = replay(traced_on(config, hardware, ranks), hardware, build_allocator(AllocatorKind.expandable))
    memory = replayed.memory()
    assert formula.memory.end_bytes == pytest.approx(memory.end_bytes, rel=0.01)
    assert formula.memory.peak_bytes == pytest.approx(memory.peak_bytes, rel=0.1)
    assert formula.memory.reserved_bytes == pytest.approx(memory.reserved_bytes, rel=0.1)
    assert formula.time.step_seconds == pytest.approx(replayed.time().step_seconds, rel=0.1)
    for exchange in ("all_to_all", "broadcast"):  # of Muon's matrices
        of_formula, of_trace = (
            [(each.axis, each.calls, each.bytes) for each in time.volumes if each.collective == exchange]
            for time in (formula.time, replayed.time())
        )
        assert of_formula == of_trace


@pytest.mark.extended
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ddp_buckets_match_the_trace(dtype: str) -> None:
    """Oracle: the real reducer's all-reduces; a trace has up to three more, of single numbers."""
    hardware = load_hardware("h100")
    config = configured([*MODEL, f"parallel.param_dtype={dtype}", "parallel=ddp"], 8, "cuda")
    formula = closed_form(config, hardware, 8).time
    traced = replay(traced_on(config, hardware, 8), hardware, build_allocator(AllocatorKind.expandable)).time()
    (ours,), (real,) = ([each for each in time.volumes if each.axis == "world"] for time in (formula, traced))
    assert 0 <= real.calls - ours.calls <= 3
    assert ours.bytes == pytest.approx(real.bytes, rel=1e-5)
