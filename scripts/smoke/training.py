"""Checks of training: losses on a device against those of a CPU, and switches against the plain
run."""

import shlex

from scripts.smoke.report import Report
from scripts.smoke.runs import (
    Trained,
    small_model,
    split_rows,
    train,
    train_apart,
)

Rows = dict[str, list[str]]
"""Name of a row → its words."""
LOSS = 1e-5
"""Relative, in float32."""
BF16_LOSS = 1e-2
SINGLE = shlex.split("parallel=single parallel.param_dtype=float32")
UNCLIPPED = "train.max_grad_norm=null train.skip_nonfinite=false"
CHECKPOINTING = "memory.gradient_checkpointing=full"
OPTIMIZER_OFFLOAD = "memory.optimizer_offload=true"
MEMORY = split_rows({
    "chunk_loss": "memory.chunk_loss=true",
    "checkpointing full": CHECKPOINTING,
    "checkpointing selective": "memory.gradient_checkpointing=selective",
    "checkpointing every 2": f"{CHECKPOINTING} memory.checkpointing_every=2",
    "activation_offload": f"{CHECKPOINTING} memory.activation_offload=true",
    "optimizer_offload serial": f"{OPTIMIZER_OFFLOAD} memory.offload_schedule=serial",
    "optimizer_offload pipelined": f"{OPTIMIZER_OFFLOAD} memory.offload_schedule=pipelined",
    "optimizer_offload lazy": f"{OPTIMIZER_OFFLOAD} memory.offload_schedule=lazy",
    "cpu_offload native": "memory.cpu_offload=true",
    "cpu_offload overlapped": "memory.cpu_offload=true memory.cpu_offload_executor=overlapped",
    "optimizer_in_backward": f"memory.optimizer_in_backward=true {UNCLIPPED}",
})  # fmt: skip
"""Row → words added to FSDP2 in float32."""
LOWERS_PEAK = (
    "checkpointing full",
    "activation_offload",
    "optimizer_offload serial",
    "cpu_offload native",
)
"""Rows whose peak must be below the plain run's."""
COMPILED = split_rows({
    "compile": "train.compile=true",
    "compile, selective": "train.compile=true memory.gradient_checkpointing=selective",
    "compiled kernels": (
        "kernels.rms_norm=compiled kernels.rotary=compiled kernels.swiglu=compiled"
    ),
})  # fmt: skip
FLOAT8 = split_rows({
    "float8 tensorwise": "train.float8=tensorwise",
    "float8 rowwise": "train.float8=rowwise",
    "float8 all_gather": "train.float8=tensorwise train.float8_all_gather=true",
})  # fmt: skip
MOE = shlex.split("model=qwen3_moe_debug train.batch_size=2 train.seq_len=64")
OPTIMIZERS = split_rows({
    "foreach": "optim.implementation=foreach",
    "fused": "optim.implementation=fused",
    "bf16 states": "optim.state_dtype=bfloat16",
    "muon": "optim=muon",
    "8-bit": "optim.state_dtype=int8",
    "4-bit": "optim.state_dtype=int4",
})  # fmt: skip


def compare(
    report: Report, name: str, row: Trained, plain: Trained, tolerance: float
) -> bool:
    """Compare a row's losses with the oracle's; returns whether there are any.

    Refused rows and missing packages are facts: other devices than CUDA lack some switches.
    """
    if row.error:
        report.fact(f"{name}: {'refused' if row.refused else 'failed'}", row.error)
        report.expect(
            row.refused, f"{name} trains, or is refused in a sentence: {row.error}"
        )
        return False
    assert len(plain.losses) == 3, plain.error
    report.close(f"{name}: losses", row.losses, plain.losses, tolerance)
    finite = all(0 < norm < float("inf") for norm in row.grad_norms)
    report.expect(
        finite, f"{name}: gradient norms {row.grad_norms} are positive and finite"
    )
    facts = {"step_ms": row.step_ms, "peak_gib": row.peak_gib, "note": row.note}
    report.fact(name, {key: value for key, value in facts.items() if value})
    return True


def in_both_dtypes(rows: Rows) -> Rows:
    """Return rows that compute in float32, and the same in bf16."""
    return {
        f"{name} {dtype}": [*overrides, f"parallel.param_dtype={dtype}"]
        for name, overrides in rows.items()
        for dtype in ("float32", "bfloat16")
    }


def tolerance_of(name: str) -> float:
    """Return the tolerance of a row by the dtype in its name."""
    return LOSS if name.endswith("float32") else BF16_LOSS


def against_cpu(report: Report, device: str, oracle: list[str], rows: Rows) -> None:
    """Compare rows in both dtypes with one process on a CPU in float32."""
    overrides = [*oracle, "parallel.param_dtype=float32"]
    plain = train_apart("cpu", {"oracle": overrides})["oracle"]
    for name, row in train(device, in_both_dtypes(rows)).items():
        compare(report, name, row, plain, tolerance_of(name))


def against_plain(
    report: Report, device: str, base: list[str], rows: Rows, tolerance: float
) -> None:
    """Compare rows with switches to the plain run in bf16 on the same device."""
    overrides = [*base, "parallel=fsdp2", "parallel.param_dtype=bfloat16"]
    trained_rows = train(
        device,
        {"eager": overrides} | {name: [*overrides, *row] for name, row in rows.items()},
    )
    eager = trained_rows.pop("eager")
    for name, row in trained_rows.items():
        compare(report, name, row, eager, tolerance)


def check_strategies(report: Report, device: str) -> None:
    """Every strategy of one rank in float32 and bf16, against one process on a CPU; two runs in one
    arithmetic."""
    model = small_model(device)
    rows = {
        name: [*model, f"parallel={name}"]
        for name in ("single", "ddp", "fsdp1", "fsdp2")
    }
    against_cpu(report, device, [*model, "parallel=single"], rows)
    exact = [*model, "parallel=fsdp2", "parallel.param_dtype=bfloat16"]
    # NPUs have no float64 sums, which deterministic mode needs.
    exact += ["train.deterministic=true"] if device != "npu" else []
    first, second = (train_apart(device, {"twice": exact})["twice"] for _ in range(2))
    report.expect(
        bool(first.digest), f"deterministic training runs: {first.error or 'yes'}"
    )
    sentence = (
        "two deterministic processes have the same bits of losses, norms and parameters"
    )
    report.expect(first.bits == second.bits, sentence)


def check_toys(report: Report, device: str) -> None:
    """The from-scratch strategies of one rank in float32 and bf16, against one process on a CPU."""
    model = small_model(device)
    names = ("ddp", "zero1", "zero2", "zero3", "fsdp")
    rows = {name: [*model, f"parallel=toy_{name}"] for name in names}
    against_cpu(report, device, [*model, "parallel=single"], rows)


def check_memory(report: Report, device: str) -> None:
    """Every memory switch against the plain run: the same losses, and a lower peak."""
    base = [*small_model(device), "parallel=fsdp2", "parallel.param_dtype=float32"]
    switches = {"plain": [], "plain without clipping": shlex.split(UNCLIPPED)} | MEMORY
    trained_rows = train(
        device, {name: [*base, *overrides] for name, overrides in switches.items()}
    )
    plain = trained_rows["plain"]
    unclipped = trained_rows.pop("plain without clipping")
    for name, row in trained_rows.items():
        like = unclipped if name == "optimizer_in_backward" else plain
        if compare(report, name, row, like, LOSS) and name in LOWERS_PEAK:
            assert row.peak_gib is not None and plain.peak_gib is not None
            sentence = (
                f"{name}: peak {row.peak_gib:.4f} GiB below plain {plain.peak_gib:.4f}"
            )
            report.expect(row.peak_gib < plain.peak_gib, sentence)


def check_documents(report: Report, device: str) -> None:
    """Training with masked documents, by both implementations on CUDA, against a CPU in float32."""
    base = [*small_model(device), "parallel=single", "data.mask_documents=true"]
    names = ("torch", "flex") if device == "cuda" else ("torch",)
    oracle = train_apart("cpu", {"torch": [*base, "parallel.param_dtype=float32"]})[
        "torch"
    ]
    rows = {name: [*base, f"kernels.document_attention={name}"] for name in names}
    for name, row in train(device, in_both_dtypes(rows)).items():
        compare(
            report, name, row, oracle, LOSS if name == "torch float32" else BF16_LOSS
        )


FAMILIES = [
    "llama_debug",
    "gpt2_debug",
    "mistral_debug",
    "qwen2_debug",
    "qwen3_debug",
    "qwen3_moe_debug",
    "llama4_debug",
]


def layout_models(device: str) -> Rows:
    """Prefix of a row's name → words of its model; the first is for all strategies."""
    small = ["train.batch_size=2", "train.seq_len=64"]
    return {"": small_model(device)} | {
        f"{name} ": [f"model={name}", *small] for name in FAMILIES
    }


def check_layout_mode(report: Report, device: str) -> None:
    """``train.deterministic=layout``: every strategy and two micro-batches have the bits of
    ``single``."""
    _compare_bits(
        report, device, {"": layout_models(device)[""]}, ("ddp", "fsdp1", "fsdp2")
    )


def check_layout_families(report: Report, device: str) -> None:
    """The same for FSDP2 and debug models of every family."""
    models = {
        prefix: overrides
        for prefix, overrides in layout_models(device).items()
        if prefix
    }
    _compare_bits(report, device, models, ("fsdp2",))


def _compare_bits(
    report: Report, device: str, models: Rows, strategies: tuple[str, ...]
) -> None:
    rows: Rows = {}
    for model, overrides in models.items():
        base = [*overrides, "train.deterministic=layout"]
        rows |= {
            f"{model}{name}": [*base, f"parallel={name}"]
            for name in ("single", *strategies)
        }
        size = next(
            int(word[17:]) for word in overrides if word.startswith("train.batch_size=")
        )
        halves = [
            "parallel=fsdp2",
            f"train.batch_size={size // 2}",
            "train.grad_accum=2",
        ]
        rows[f"{model}two micro-batches"] = [*base, *halves]
    trained_rows = train_apart(device, in_both_dtypes(rows))
    for name, row in trained_rows.items():
        prefix = next(prefix for prefix in reversed(models) if name.startswith(prefix))
        reference = f"{prefix}single {name.split()[-1]}"
        single = trained_rows[reference]
        if name == reference:
            report.expect(
                not single.error, f"{reference} trains: {single.error or 'yes'}"
            )
        elif single.losses and compare(report, name, row, single, tolerance_of(name)):
            sentence = (
                f"{name}: losses, norms and parameters have the bits of {prefix}single"
            )
            report.expect(row.bits == single.bits, sentence)


def adapter_rows(device: str) -> Rows:
    """Form of the frozen weights → words."""
    base = [*small_model(device), "tune=lora", "memory.gradient_checkpointing=full"]
    return {form: [*base, f"tune.base={form}"] for form in ("plain", "nf4")}


def check_adapters(report: Report, device: str) -> None:
    """Low-rank adapters beside plain and 4-bit weights, against a CPU in float32."""
    for form, overrides in adapter_rows(device).items():
        oracle = [*overrides, "parallel=single"]
        against_cpu(report, device, oracle, {form: [*overrides, "parallel=fsdp2"]})


def check_compile(report: Report, device: str) -> None:
    """Compiled training against eager, in bf16."""
    against_plain(report, device, small_model(device), COMPILED, BF16_LOSS)


def check_float8(report: Report, device: str) -> None:
    """Compiled float8 training against eager bf16."""
    rows = {
        name: ["train.compile=true", *overrides] for name, overrides in FLOAT8.items()
    }
    against_plain(report, device, small_model(device), rows, 3e-2)


def check_experts(report: Report, device: str) -> None:
    """A model with experts, against a CPU in float32."""
    rows = {"experts": [*MOE, "parallel=fsdp2"]}
    against_cpu(report, device, [*MOE, "parallel=single"], rows)


def check_optimizers(report: Report, device: str) -> None:
    """Every optimizer against a CPU's update one parameter after the other; low-bit states against
    those of float32."""
    base = [*small_model(device), *SINGLE]
    names = [
        name
        for name in OPTIMIZERS
        if device == "cuda" or name not in ("8-bit", "4-bit")
    ]
    oracles = train_apart(
        "cpu",
        {
            "adamw": [*base, "optim.implementation=for_loop"],
            "muon": [*base, "optim=muon"],
        },
    )
    trained_rows = train(device, {name: [*base, *OPTIMIZERS[name]] for name in names})
    for name, row in trained_rows.items():
        tolerance = LOSS if name in ("foreach", "fused") else 1e-2
        compare(report, name, row, oracles.get(name, oracles["adamw"]), tolerance)
