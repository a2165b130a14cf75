"""Whole specimens of all that fsdptoys reads, for ``fuzz_readers.py``.

Of a real run of three steps come the run directory and its checkpoints; the others are written by
their own writers.
"""

import dataclasses
import gzip
import json
import pickle
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from fsdptoys.checkpoint import write_hugging_face
from fsdptoys.checkpoint.safetensors_io import slices
from fsdptoys.data import find_sources, open_encoder, prepare_folder, read_index
from fsdptoys.data.packing import pack_rows
from fsdptoys.data.request import Request
from fsdptoys.data.shard_writer import ShardsWriter
from fsdptoys.device.profile import dump_hardware, load_hardware
from fsdptoys.launch.exit_record import ExitRecord
from fsdptoys.sweep import Job, JobStatus, Skipped, Sweep
from fsdptoys.sweep.folder import write_job
from fsdptoys.sweep.slurm_queue import begin_submission
from fsdptoys.train.heartbeat import HEARTBEATS_FOLDER, _encode, heartbeat_path
from fsdptoys.train.pretrained import TrainedModel
from scripts.common.child_environment import child_environment
from scripts.fuzz.fuzz_checkpoint import save_steps
from tests.harness.chat_files import save_chat_tokenizer, write_rows

RUN_WORDS = (
    "experiment=null model=llama_debug model.n_layers=1 model.dim=16 model.n_heads=2 "
    "model.n_kv_heads=2 model.vocab_size=256 parallel=single data=synthetic train.steps=3 "
    "train.seq_len=16 train.batch_size=1 launch.device=cpu checkpoint.every=1 plan.hardware=cpu "
    "metrics.run_dir=run"
)

SEQ_LEN = 16


def make_specimens(folder: Path) -> None:
    """Write all specimens to mutate, each kind into a folder of its own."""
    _make_run(folder)
    save_steps(folder / "steps")
    _make_sweep(folder / "sweep")
    _make_model(folder / "hf")
    _make_chat(folder / "chat")
    _make_data(folder / "data")
    _make_profile(folder / "profile")
    small = folder / "small"
    small.mkdir()
    (small / "hardware.yaml").write_text(dump_hardware(load_hardware("h100")))
    definition = {
        "title": "t",
        "description": "d",
        "base": ["train.steps=2"],
        "time_limit_seconds": 60.0,
    }
    grid = {"train.seed": [1, 2], "data.x": [True, None]}
    (small / "grid.yaml").write_text(yaml.safe_dump(definition | {"grid": grid}))
    (small / "rows.yaml").write_text(
        yaml.safe_dump(definition | {"rows": [["a=1", "b=2"], ["a=2"]]})
    )
    (small / "outcome.json").write_text(
        json.dumps(dataclasses.asdict(ExitRecord(1, "why", True, "SIGTERM")))
    )
    write_rows(
        small / "lines.jsonl", [{"text": f"text {n}", "id": n} for n in range(5)]
    )


CHAT_TEMPLATE = (
    "{% set ns = namespace(out='') %}{{ bos_token }}{% if tools %}{% for tool in tools %}"
    "{{ tool | tojson(indent=1) }}"
    "{% endfor %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' and loop.last %}{% generation %}"
    "{{ m.content | trim }}{% endgeneration %}{% else %}"
    "{{ m['role'] + ': ' + (m.content or '') }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% set ns.out = ns.out ~ call.function.name %}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ key }}={{ value | string | length }}{% endfor %}"
    "{% endfor %}<|im_end|>{{ messages[loop.index0 - 1].role[:3] }}{% endfor %}{{ ns.out }}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _make_run(folder: Path) -> None:
    run = folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    environment = child_environment(OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "fsdptoys", "train", *shlex.split(RUN_WORDS)]
    subprocess.run(
        command,
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        timeout=300,
    )
    resume = {
        "time": "2026-01-01T00:00:00+00:00",
        "step": 1,
        "checkpoint": "step-00000001",
        "world_size_before": 1,
        "world_size": 1,
        "changed": {"train.steps": [2, 3]},
        "moved_to": None,
    }
    (run / "resumes.jsonl").write_text(json.dumps(resume) + "\n")
    (run / "routing.jsonl").write_text(
        "".join(f'{{"step": {n}, "expert_tokens": [[1, 2]]}}\n' for n in (1, 2, 3))
    )
    beats = run / HEARTBEATS_FOLDER
    beats.mkdir(exist_ok=True)
    for rank in (0, 1):
        sign = {
            "rank": rank,
            "host": "elsewhere",
            "pid": 7,
            "start": "s",
            "step": 3,
            "phase": "forward",
            "beat": 1,
        }
        heartbeat_path(beats, rank).write_bytes(_encode(sign | {"time": 1.5e9}))
    (run / "loss.png").unlink(missing_ok=True)


def _make_sweep(folder: Path) -> None:
    job = Job(
        "01",
        ("train.seed=1",),
        {"train.seed": "1"},
        "f1",
        JobStatus.failed,
        1,
        "a reason",
        "2026",
        2.5,
    )
    jobs = [job, Job("02", ("train.seed=2",), {"train.seed": "2"}, "f2")]
    argv = (
        "train.seed=1,2",
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.partition=gpu",
    )
    sweep = Sweep(
        folder,
        "title",
        "fsdptoys sweep",
        jobs,
        [Skipped({"train.seed": "3"}, "why")],
        60.0,
        argv,
    )
    sweep.write()
    begin_submission(sweep, "submitit_slurm", jobs)
    # A run of a job is read as all others.
    shutil.copytree(
        folder.parent / "run",
        sweep.run_dir(jobs[0]),
        ignore=shutil.ignore_patterns("checkpoints"),
    )
    write_job(sweep.job_folder(jobs[0]), job)


def _make_model(folder: Path) -> None:
    config = TrainedModel(str(folder.parent / "run"), lambda text: None).config
    torch.manual_seed(0)
    model = config.build()
    parameters = dict(model.named_parameters())

    def read(name: str, region: Any) -> torch.Tensor:
        return parameters[name].detach()[slices(region)]

    write_hugging_face(folder, config, read, torch.float32, max_file_bytes=9000)
    save_chat_tokenizer(folder, None)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')


def _make_chat(folder: Path) -> None:
    folder.mkdir()
    tokenizer = folder / "tokenizer"
    save_chat_tokenizer(tokenizer, CHAT_TEMPLATE)
    (tokenizer / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": None})
    )
    (tokenizer / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "two", "arguments": {"one": [1, None, {"two": "x"}]}},
    }
    messages = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "one two",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "{}"},
        {"role": "assistant", "content": "<think>one</think>two", "weight": 1},
    ]
    turns = [
        {"from": "human", "value": "one"},
        {"from": "function_call", "value": '{"name": "one"}'},
    ]
    rows = [
        {
            "messages": messages,
            "tools": [{"type": "function", "function": {"name": "two"}}],
        },
        {"messages": turns, "system": "two", "chat_template_kwargs": {"thinks": True}},
    ]
    write_rows(folder / "rows.jsonl", rows)


def _make_data(folder: Path) -> None:
    folder.mkdir()
    save_chat_tokenizer(folder / "tokenizer", None)
    (folder / "a.txt").write_text("one two\n" * 50)
    encoder = open_encoder(
        str(folder / "tokenizer"), None, "--tokenizer", "--document-end"
    )
    prepare_folder(
        Request(
            "FILE",
            find_sources("FILE", [str(folder / "a.txt")]),
            encoder,
            folder / "out",
        )
    )
    index = read_index(str(folder / "out"), "data.folder=out")
    pack_rows(
        folder / "cache",
        str(folder / "out"),
        index,
        "train",
        SEQ_LEN,
        report=lambda sentence: None,
    )
    writer = ShardsWriter(folder / "half", "request", "uint16", 1000)
    writer.add(
        "train", torch.arange(9).numpy().astype("uint16"), torch.tensor([4, 5]).numpy()
    )
    writer.read(2, 0)
    writer.save()
    writer.close()


def _make_profile(folder: Path) -> None:
    (folder / "trace").mkdir(parents=True)
    (folder / "snapshot").mkdir()
    events: list[dict[str, Any]] = []
    for number in range(6):
        size = 64 if number % 2 == 0 else -64
        moment = 1000.0 + 10 * number
        details = {
            "Device Type": 0,
            "Addr": 4096,
            "Bytes": size,
            "Total Allocated": 64,
            "Ev Idx": number,
        }
        events.append({"name": "[memory]", "ph": "i", "ts": moment, "args": details})
        name = (
            "aten::embedding",
            "autograd::engine::evaluate_function: x",
            "Optimizer.step#SGD.step",
        )[number % 3]
        events.append({"name": name, "ph": "X", "ts": moment - 1, "dur": 3.0})
    text = json.dumps({"traceEvents": events})
    (folder / "trace" / "rank0.json.gz").write_bytes(gzip.compress(text.encode()))
    frames = [{"name": "_update", "filename": "fsdptoys/train/trainer.py", "line": 3}]
    trace = [
        {"action": action, "addr": 4096, "size": 64, "frames": frames}
        for action in ("alloc", "free_completed", "alloc")
    ]
    block = {"size": 64, "requested_size": 60, "state": "active_allocated"}
    snapshot = {
        "device_traces": [trace],
        "segments": [{"device": 0, "blocks": [block]}],
    }
    (folder / "snapshot" / "memory-rank0.pickle").write_bytes(pickle.dumps(snapshot))
