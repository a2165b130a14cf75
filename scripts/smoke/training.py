"""Checks of training: losses on a device against those of a CPU, and switches against the plain
run."""

import json
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from scripts.common.child_environment import child_environment
from scripts.smoke.report import Report
from scripts.smoke.runs import COMMON, Trained, small_model, train, train_apart

LOSS = 1e-5
"""Relative, in float32."""
BF16_LOSS = 1e-2
SINGLE = ["parallel=single", "parallel.param_dtype=float32"]
UNCLIPPED = ["train.max_grad_norm=null", "train.skip_nonfinite=false"]
MEMORY = {
    "chunk_loss": ["memory.chunk_loss=true"],
    "checkpointing full": ["memory.gradient_checkpointing=full"],
    "checkpointing selective": ["memory.gradient_checkpointing=selective"],
    "checkpointing every 2": ["memory.gradient_checkpointing=full", "memory.checkpointing_every=2"],
    "activation_offload": ["memory.gradient_checkpointing=full", "memory.activation_offload=true"],
    "optimizer_offload serial": ["memory.optimizer_offload=true", "memory.offload_schedule=serial"],
    "optimizer_offload pipelined": [
        "memory.optimizer_offload=true",
        "memory.offload_schedule=pipelined",
    ],
    "optimizer_offload lazy": ["memory.optimizer_offload=true", "memory.offload_schedule=lazy"],
    "cpu_offload native": ["memory.cpu_offload=true"],
    "cpu_offload overlapped": ["memory.cpu_offload=true", "memory.cpu_offload_executor=overlapped"],
    "optimizer_in_backward": ["memory.optimizer_in_backward=true", *UNCLIPPED],
}
"""Row → words added to FSDP2 in float32."""
LOWERS_PEAK = (
    "checkpointing full",
    "activation_offload",
    "optimizer_offload serial",
    "cpu_offload native",
)
"""Rows whose peak must be below the plain run's."""
COMPILED = {
    "compile": ["train.compile=true"],
    "compile, selective": ["train.compile=true", "memory.gradient_checkpointing=selective"],
    "compiled kernels": [
        "kernels.rms_norm=compiled",
        "kernels.rotary=compiled",
        "kernels.swiglu=compiled",
    ],
}
FLOAT8 = {
    "float8 tensorwise": ["train.float8=tensorwise"],
    "float8 rowwise": ["train.float8=rowwise"],
    "float8 all_gather": ["train.float8=tensorwise", "train.float8_all_gather=true"],
}
MOE = ["model=qwen3_moe_debug", "train.batch_size=2", "train.seq_len=64"]
OPTIMIZERS = {
    "foreach": ["optim.implementation=foreach"],
    "fused": ["optim.implementation=fused"],
    "bf16 states": ["optim.state_dtype=bfloat16"],
    "muon": ["optim=muon"],
    "8-bit": ["optim.state_dtype=int8"],
    "4-bit": ["optim.state_dtype=int4"],
}


def compare(
    report: Report, device: str, name: str, row: Trained, plain: Trained, tolerance: float
) -> bool:
    """Compare a row's losses with the oracle's; returns whether there are any.

    Refused rows and missing packages are facts: other devices than CUDA lack some switches.
    """
    if row.error:
        report.fact(f"{name}: {'refused' if row.refused else 'failed'}", row.error)
        report.expect(row.refused, f"{name} trains, or is refused in a sentence: {row.error}")
        return False
    assert len(plain.losses) == 3, plain.error
    report.close(f"{name}: losses", row.losses, plain.losses, tolerance)
    finite = all(0 < norm < float("inf") for norm in row.grad_norms)
    report.expect(finite, f"{name}: gradient norms {row.grad_norms} are positive and finite")
    facts = {"step_ms": row.step_ms, "peak_gib": row.peak_gib, "note": row.note}
    report.fact(name, {key: value for key, value in facts.items() if value})
    return True


def check_strategies(report: Report, device: str) -> None:
    """Every strategy of one rank in float32 and bf16, against one process on a CPU; two runs in one
    arithmetic."""
    model = small_model(device)
    oracle = train_apart("cpu", {"single": [*model, *SINGLE]})["single"]
    strategies = ["single", "ddp", "fsdp1", "fsdp2"]
    rows = {
        f"{name} {dtype}": [*model, f"parallel={name}", f"parallel.param_dtype={dtype}"]
        for name in strategies
        for dtype in ("float32", "bfloat16")
    }
    for name, row in train(device, rows).items():
        compare(report, device, name, row, oracle, LOSS if name.endswith("float32") else BF16_LOSS)
    exact = [*model, "parallel=fsdp2", "parallel.param_dtype=bfloat16"]
    # NPUs have no float64 sums, which deterministic mode needs.
    exact += ["train.deterministic=true"] if device != "npu" else []
    first, second = (train_apart(device, {"twice": exact})["twice"] for _ in range(2))
    report.expect(
        not first.error and bool(first.digest),
        f"deterministic training runs: {first.error or 'yes'}",
    )
    same = (first.losses, first.grad_norms, first.digest) == (
        second.losses,
        second.grad_norms,
        second.digest,
    )
    report.expect(
        same, "two deterministic processes have the same bits of losses, norms and parameters"
    )


def check_toys(report: Report, device: str) -> None:
    """The from-scratch strategies of one rank in float32 and bf16, against one process on a CPU."""
    model = small_model(device)
    oracle = train_apart("cpu", {"single": [*model, *SINGLE]})["single"]
    rows = {
        f"{name} {dtype}": [*model, f"parallel=toy_{name}", f"parallel.param_dtype={dtype}"]
        for name in ("ddp", "zero1", "zero2", "zero3", "fsdp")
        for dtype in ("float32", "bfloat16")
    }
    for name, row in train(device, rows).items():
        compare(report, device, name, row, oracle, LOSS if name.endswith("float32") else BF16_LOSS)


def check_memory(report: Report, device: str) -> None:
    """Every memory switch against the plain run: the same losses, and a lower peak."""
    base = [*small_model(device), "parallel=fsdp2", "parallel.param_dtype=float32"]
    rows = {"plain": base} | {name: [*base, *words] for name, words in MEMORY.items()}
    rows["plain without clipping"] = [*base, *UNCLIPPED]
    found = train(device, rows)
    plain, unclipped = found.pop("plain"), found.pop("plain without clipping")
    compare(report, device, "plain", plain, plain, 0.0)
    for name, row in found.items():
        like = unclipped if name == "optimizer_in_backward" else plain
        if compare(report, device, name, row, like, LOSS) and name in LOWERS_PEAK:
            assert row.peak_gib is not None and plain.peak_gib is not None
            sentence = f"{name}: peak {row.peak_gib:.4f} GiB below plain {plain.peak_gib:.4f}"
            report.expect(row.peak_gib < plain.peak_gib, sentence)


def check_documents(report: Report, device: str) -> None:
    """Training with masked documents, by both implementations on CUDA, against a CPU in float32."""
    base = [*small_model(device), "parallel=single", "data.mask_documents=true"]
    oracle = train_apart("cpu", {"torch": [*base, "parallel.param_dtype=float32"]})["torch"]
    rows = {}
    for name in ("torch", "flex") if device == "cuda" else ("torch",):
        for dtype in ("float32", "bfloat16"):
            words = [*base, f"kernels.document_attention={name}", f"parallel.param_dtype={dtype}"]
            rows[f"{name} {dtype}"] = words
    for name, row in train(device, rows).items():
        compare(report, device, name, row, oracle, LOSS if name == "torch float32" else BF16_LOSS)


FAMILIES = ["llama_debug", "gpt2_debug", "qwen3_debug", "qwen3_moe_debug", "llama4_debug"]


def layout_models(device: str) -> dict[str, list[str]]:
    """Prefix of a row's name → words of its model; the first is for all strategies."""
    small = ["train.batch_size=2", "train.seq_len=64"]
    return {"": small_model(device)} | {f"{name} ": [f"model={name}", *small] for name in FAMILIES}


def check_layout_mode(report: Report, device: str) -> None:
    """``train.deterministic=layout``: every strategy and two micro-batches have the bits of
    ``single``."""
    _compare_bits(report, device, {"": layout_models(device)[""]}, ("ddp", "fsdp1", "fsdp2"))


def check_layout_families(report: Report, device: str) -> None:
    """The same for FSDP2 and debug models of every family."""
    models = {prefix: words for prefix, words in layout_models(device).items() if prefix}
    _compare_bits(report, device, models, ("fsdp2",))


def _compare_bits(
    report: Report, device: str, models: dict[str, list[str]], strategies: tuple[str, ...]
) -> None:
    groups = {}
    for model, words in models.items():
        for dtype in ("float32", "bfloat16"):
            base = [*words, f"parallel.param_dtype={dtype}", "train.deterministic=layout"]
            half = next(
                int(word.split("=")[1]) // 2
                for word in words
                if word.startswith("train.batch_size=")
            )
            rows = {name: [*base, f"parallel={name}"] for name in ("single", *strategies)}
            rows["two micro-batches"] = [
                *rows["fsdp2"],
                f"train.batch_size={half}",
                "train.grad_accum=2",
            ]
            groups[model, dtype] = {f"{model}{name} {dtype}": row for name, row in rows.items()}
    found = train_apart(
        device, {name: row for rows in groups.values() for name, row in rows.items()}
    )
    for (model, dtype), rows in groups.items():
        reference = f"{model}single {dtype}"
        single = found[reference]
        report.expect(not single.error, f"{reference} trains: {single.error or 'yes'}")
        for name in (name for name in rows if name != reference and single.losses):
            row = found[name]
            if compare(
                report, device, name, row, single, LOSS if dtype == "float32" else BF16_LOSS
            ):
                same = (row.losses, row.grad_norms, row.digest) == (
                    single.losses,
                    single.grad_norms,
                    single.digest,
                )
                report.expect(
                    same, f"{name}: losses, norms and parameters have the bits of {model}single"
                )


def adapter_rows(device: str) -> dict[str, list[str]]:
    """Form of the frozen weights → words."""
    base = [*small_model(device), "tune=lora", "memory.gradient_checkpointing=full"]
    return {form: [*base, f"tune.base={form}"] for form in ("plain", "nf4")}


def check_adapters(report: Report, device: str) -> None:
    """Low-rank adapters beside plain and 4-bit weights, against a CPU in float32."""
    rows = adapter_rows(device)
    oracles = train_apart("cpu", {form: [*words, *SINGLE] for form, words in rows.items()})
    for form, words in rows.items():
        kinds = {f"{form} {dtype}": [*words, "parallel=fsdp2", f"parallel.param_dtype={dtype}"]
                 for dtype in ("float32", "bfloat16")}  # fmt: skip
        for name, row in train(device, kinds).items():
            compare(
                report,
                device,
                name,
                row,
                oracles[form],
                LOSS if name.endswith("float32") else BF16_LOSS,
            )


def check_compile(report: Report, device: str) -> None:
    """Compiled training against eager, in bf16."""
    base = [*small_model(device), "parallel=fsdp2", "parallel.param_dtype=bfloat16"]
    found = train(
        device, {"eager": base} | {name: [*base, *words] for name, words in COMPILED.items()}
    )
    eager = found.pop("eager")
    for name, row in found.items():
        compare(report, device, name, row, eager, BF16_LOSS)


def check_float8(report: Report, device: str) -> None:
    """Compiled float8 training against eager bf16."""
    base = [*small_model(device), "parallel=fsdp2", "parallel.param_dtype=bfloat16"]
    rows = {name: [*base, "train.compile=true", *words] for name, words in FLOAT8.items()}
    found = train(device, {"eager": base} | rows)
    eager = found.pop("eager")
    for name, row in found.items():
        compare(report, device, name, row, eager, 3e-2)


def check_experts(report: Report, device: str) -> None:
    """A model with experts, against a CPU in float32."""
    oracle = train_apart("cpu", {"single": [*MOE, *SINGLE]})["single"]
    rows = {
        dtype: [*MOE, "parallel=fsdp2", f"parallel.param_dtype={dtype}"]
        for dtype in ("float32", "bfloat16")
    }
    for name, row in train(device, rows).items():
        compare(
            report, device, f"experts {name}", row, oracle, LOSS if name == "float32" else BF16_LOSS
        )


def check_optimizers(report: Report, device: str) -> None:
    """Every optimizer against a CPU's update one parameter after the other; low-bit states against
    those of float32."""
    base = [*small_model(device), *SINGLE]
    names = [name for name in OPTIMIZERS if device == "cuda" or name not in ("8-bit", "4-bit")]
    oracles = train_apart(
        "cpu", {"adamw": [*base, "optim.implementation=for_loop"], "muon": [*base, "optim=muon"]}
    )
    found = train(device, {name: [*base, *OPTIMIZERS[name]] for name in names})
    for name, row in found.items():
        tolerance = LOSS if name in ("foreach", "fused") else 1e-2
        compare(
            report, device, name, row, oracles["muon" if name == "muon" else "adamw"], tolerance
        )


def fsdptoys(words: list[str], folder: Path, launcher: list[str] | None = None) -> str:
    """Standard output of a command of the project; RuntimeError with its last line if it fails."""
    command = [sys.executable, *(launcher or []), "-m", "fsdptoys", *words]
    done = subprocess.run(
        command, cwd=folder, env=child_environment(), capture_output=True, text=True
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        lines = (done.stderr + done.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(
            f"{' '.join(words[:2])} ended with status {done.returncode}: {lines[-1]}"
        )
    return done.stdout


def train_command(device: str, run_dir: str, *words: str) -> list[str]:
    """A command line of a small run."""
    common = [word for word in COMMON if not word.startswith(("train.steps", "metrics.console"))]
    return [
        "train", *common, *small_model(device), f"launch.device={device}",
        "launch.nproc_per_node=1", "parallel=fsdp2", "parallel.param_dtype=float32",
        "metrics.console=plain", f"metrics.run_dir={run_dir}", *words,
    ]  # fmt: skip


def losses_of(run_dir: Path) -> list[float]:
    """Losses of a run's steps."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def check_commands(report: Report, device: str) -> None:
    """A run that is resumed against one without a break; generation and evaluation on the device
    against a CPU.

    Most of a command's time is imports, so independent commands run concurrently.
    """
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        folder = Path(name)

        def trained(run_dir: str, *words: str) -> "Future[str]":
            return pool.submit(
                fsdptoys, train_command(device, run_dir, "plan.predict=false", *words), folder
            )

        halves = ["checkpoint.every=2"]
        first, whole = trained("run", "train.steps=2", *halves), trained("whole", "train.steps=4")
        first.result()
        trained("run", "train.steps=4", *halves, "checkpoint.resume=must").result()
        whole.result()
        report.close("resumed losses", losses_of(folder / "run"), losses_of(folder / "whole"), 1e-6)
        evaluate = ["evaluate", "run", "--windows", "8", "--json", "--device"]
        generate = [
            "generate",
            "run",
            *shlex.split("--tokenizer ids --prompt '1 2 3' --tokens 10 --temperature 0"),
        ]
        evaluated = {
            where: pool.submit(fsdptoys, [*evaluate, where], folder)
            for where in dict.fromkeys(("cpu", device))
        }
        generated = {
            (where, dtype): pool.submit(
                fsdptoys, [*generate, "--json", "--device", where, "--dtype", dtype], folder
            )
            for where, dtype in {("cpu", "float32"), (device, "float32"), (device, "bfloat16")}
        }
        losses = {
            where: float(json.loads(said.result())["loss"]) for where, said in evaluated.items()
        }
        report.close("evaluated loss", [losses[device]], [losses["cpu"]], LOSS)
        ids = {key: json.loads(said.result())[0]["ids"] for key, said in generated.items()}
        same = ids[device, "float32"] == ids["cpu", "float32"]
        report.expect(
            same, f"the most likely tokens in float32 are those of a CPU: {ids[device, 'float32']}"
        )
        report.fact("generated ids", {" ".join(key): value for key, value in ids.items()})
