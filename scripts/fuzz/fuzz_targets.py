"""Readers of the specimens, for ``fuzz_readers.py``: their functions and documented errors."""

import io
import json
import math
import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from fsdptoys.checkpoint import HuggingFaceFolder, verify_checksums
from fsdptoys.cli.main import main
from fsdptoys.cli.sweep import read_arguments
from fsdptoys.config.compose import compose_config
from fsdptoys.config.saved import read_tree
from fsdptoys.data import find_sources, open_chat_encoder, open_encoder, read_index
from fsdptoys.data.dataset_index import check_folder
from fsdptoys.data.document_reader import read_documents
from fsdptoys.data.packing import pack_rows
from fsdptoys.data.shard_writer import ShardsWriter
from fsdptoys.data.tokenizer import find_token_ids, open_tokenizer
from fsdptoys.device.profile import load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.launch.exit_record import read_exit_record
from fsdptoys.metrics.config import Console as ConsoleChoice
from fsdptoys.metrics.config import MetricsConfig
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.metrics.results import read_result
from fsdptoys.metrics.resume_log import ResumePoint
from fsdptoys.metrics.run_directory import RunDirectory
from fsdptoys.metrics.summary import render_summary
from fsdptoys.plan.calibrate import read_run
from fsdptoys.report.figures_plotly import figure
from fsdptoys.report.html_page import render_page
from fsdptoys.report.live import follow
from fsdptoys.report.live_reader import FollowedRun
from fsdptoys.report.live_view import draw_run
from fsdptoys.report.memory_timeline import read_timeline
from fsdptoys.report.run_page import run_page
from fsdptoys.report.runs_table import gather
from fsdptoys.sweep import read_sweep
from fsdptoys.sweep.definition import read_definition
from fsdptoys.sweep.run_sweep import with_recorded_arguments
from fsdptoys.sweep.slurm_queue import read_submissions
from fsdptoys.train.heartbeat import (
    HEARTBEATS_FOLDER,
    _encode,
    describe_last_heartbeats,
    read_heartbeats,
)
from fsdptoys.train.pretrained import TrainedModel
from fsdptoys.train.resume import check_resume
from scripts.fuzz.fuzz_checkpoint import (
    damage_checkpoints,
    edit_generator,
    mend_checkpoint,
    resume_damaged,
    resume_edited,
)
from scripts.fuzz.fuzz_mutations import mutate_file
from scripts.fuzz.fuzz_specimens import RUN_WORDS, SEQ_LEN


@dataclass(frozen=True)
class Reader:
    """One way in which files are read."""

    specimen: str
    """Folder copied before each case."""
    files: tuple[str, ...]
    """Patterns of its files to mutate, one file in each case."""
    read: Callable[[Path], object]
    """Reads the copy. Text that it returns is checked like text that it prints."""
    errors: tuple[type[BaseException], ...] = (ConfigError,)
    """Its documented errors."""
    damage: Callable[[Path, random.Random], str] = mutate_file
    """Mutates a file, and says how."""
    mend: Callable[[Path], None] = lambda file: None
    """Makes checksums of a mutated file fit again, so that more than these is tested."""
    share: float = 1.0
    """Of the cases, compared with others."""

    def mutate(self, copy: Path, draw: random.Random) -> str:
        """Mutate a file of the copy; return which, and how."""
        pattern = draw.choice(self.files)
        file = draw.choice(
            [path for path in sorted(copy.glob(pattern)) if path.is_file()]
        )
        how = self.damage(file, draw)
        self.mend(file)
        return f"{file.relative_to(copy)} {how}"


def command(*argv: str) -> Callable[[Path], None]:
    """A command line; ``{}`` is the mutated copy, and ``{}/..`` its parent."""

    def run(copy: Path) -> None:
        status = main([word.format(copy) for word in argv])
        assert status in (0, 1, 2), status

    return run


def read_live(copy: Path) -> str:
    """Both forms of ``report --live`` of a run that has ended."""
    text = io.StringIO()
    console = Console(file=text, width=100)
    follow(copy, console, poll_seconds=0.0)
    run = FollowedRun(copy)
    run.poll()
    console.print(draw_run(run, run.state(), console))
    return text.getvalue()


def read_page(copy: Path) -> str:
    """The page of a run, without its PNGs and without plotly's script."""
    (record,) = gather([copy]).records
    assert record.run is not None
    if not record.run.steps:
        return ""
    sections, pictures = run_page(record, record.run, "pictures")
    for picture in pictures:
        json.dumps(figure(picture), allow_nan=False)
    page = render_page(record.name, "", sections, [])
    return page[: page.index('<script type="application/json"')]


def read_resumed(copy: Path) -> None:
    """Files that a resumed run reads in its run directory."""
    config = MetricsConfig(run_dir=str(copy), console=ConsoleChoice.none)
    resumed = ResumePoint(
        2, {"metrics.jsonl": 10, "routing.jsonl": 10}, "step-00000002"
    )
    RunDirectory(
        config, "title", {"train": {"steps": 3}}, {"world_size": 1}, resumed
    ).close()


def run_overrides(copy: Path) -> list[str]:
    """Overrides of the run in the copy."""
    return [*shlex.split(RUN_WORDS)[:-1], f"metrics.run_dir={copy}"]


def read_launchers_view(copy: Path) -> None:
    """Files that the launcher reads before any rank starts."""
    check_resume(
        compose_config([*run_overrides(copy), "checkpoint.resume=auto"]),
        restarted=False,
    )


def read_hugging_face(copy: Path) -> None:
    """As ``convert from-hf`` and the start of a training from it."""
    folder = HuggingFaceFolder(copy)
    config = folder.model_config()
    with torch.device("meta"):
        model = config.build()
    folder.check(model)
    verify_checksums(folder.path)
    folder.check_values()
    TrainedModel(str(copy), lambda text: None).ends()
    folder.fill(torch.empty(config.dim), "norm.weight")


def read_data(copy: Path) -> None:
    """A prepared folder and its packed rows."""
    index = read_index(str(copy / "out"), "data.folder=out")
    check_folder(str(copy / "out"))
    packed = pack_rows(
        copy / "cache",
        str(copy / "out"),
        index,
        "train",
        SEQ_LEN,
        report=lambda sentence: None,
    )
    for number in range(min(len(packed), 3)):
        packed.row(number)


def read_tokenizers(copy: Path) -> None:
    """A tokenizer for training and one for generating."""
    path = str(copy / "tokenizer")
    open_encoder(path, None, "data.tokenizer", "data.document_end").encode(
        ["one two three", "", "é<|endoftext|>"]
    )
    tokenizer = open_tokenizer(path, 400)
    tokenizer.decode(tokenizer.encode("one two"))


def read_half_written(copy: Path) -> None:
    """Remains of an interrupted preparation."""
    ShardsWriter(copy / "half", "request", "uint16", 1000).close()


def read_texts(copy: Path) -> None:
    """Documents in JSON lines."""
    (source,) = find_sources("data.files", [str(copy / "lines.jsonl")])
    for _ in read_documents("data.files", source, "text"):
        pass


def read_conversations(copy: Path) -> None:
    """Rows as the template of their tokenizer's folder writes them, and the tokens that are
    learned."""
    encoder = open_chat_encoder(
        str(copy / "tokenizer"),
        None,
        None,
        "data.tokenizer",
        "data.template",
        "data.end",
    )
    (source,) = find_sources("data.files", [str(copy / "rows.jsonl")])
    rows = [
        row
        for row, _ in read_documents(
            "data.files", source, "messages", records=encoder.records
        )
    ]
    encoder.encode_documents(rows)
    find_token_ids(copy / "tokenizer")


def read_sweep_files(copy: Path) -> str:
    """Files that ``--resume`` reads in a sweep's folder."""
    sweep = read_sweep(copy)
    read_submissions(sweep)
    arguments = with_recorded_arguments(read_arguments(["--resume", str(copy)]), sweep)
    assert not any("setup" in word for word in arguments.launcher_overrides)
    return ""


def mend_heartbeat(file: Path) -> None:
    """Give a record a checksum of its content."""
    try:
        if file.is_file() and file.stat().st_size < 10_000:
            record = json.loads(file.read_bytes())
            record.pop("crc32", None)
            file.write_bytes(_encode(record))
    except (OSError, ValueError, TypeError, AttributeError):
        pass  # no record any more


def read_signs(copy: Path) -> str:
    """Heartbeats as reports and sentences use them."""
    signs = read_heartbeats(copy / HEARTBEATS_FOLDER)
    lines = [
        f"{sign.describe(2e9)} {sign.state()} {max(s.progress for s in signs.values())}"
        for sign in signs.values()
    ]
    return "".join(
        [*lines, describe_last_heartbeats(copy / HEARTBEATS_FOLDER, {0: 7}) or ""]
    )


def read_prediction(copy: Path) -> str:
    """A prediction, and all that follows from it."""
    try:
        prediction = Prediction.from_dict(read_tree(copy / "prediction.json"))
    except ConfigError:
        raise
    except ValueError:
        return ""
    assert math.isfinite(prediction.time.step_seconds)
    json.dumps(prediction.to_dict())
    return ""


def read_results(copy: Path) -> str:
    """The results of a run, and the summary rendered from them."""
    try:
        result = read_result(copy)
    except ValueError:
        return ""
    if result is not None:
        render_summary(result)
    return ""


def read_measured(copy: Path) -> None:
    """A run as ``plan calibrate`` reads it, up to its validation."""
    read_run(copy)[1].validate(1, "cpu")


RUN_FILES = (
    "config.yaml", "environment.json", "metrics.jsonl", "resumes.jsonl", "prediction.json",
    "result.json", "summary.md",
)  # fmt: skip
STEP = "checkpoints/step-00000003"

READERS: dict[str, Reader] = {
    "report --table": Reader("run", RUN_FILES, command("report", "{}", "--table")),
    "report --markdown": Reader(
        "run", RUN_FILES, command("report", "{}", "--markdown"), share=0.5
    ),
    "report --csv": Reader(
        "run", RUN_FILES, command("report", "{}", "--csv"), share=0.5
    ),
    "report --json": Reader(
        "run", RUN_FILES, command("report", "{}", "--json"), share=0.5
    ),
    "report page": Reader("run", RUN_FILES, read_page, share=0.2),
    "report sweep": Reader(
        "sweep",
        ("sweep.json", "jobs/*/job.json", "jobs/01/run/*"),
        command("report", "{}", "--table"),
    ),
    "report --live": Reader(
        "run", (*RUN_FILES, "heartbeats/*"), read_live, mend=mend_heartbeat
    ),
    "compare": Reader("run", RUN_FILES, command("compare", "{}", "{}/../run")),
    "plan calibrate": Reader("run", RUN_FILES[:4], read_measured),
    "heartbeats": Reader("run", ("heartbeats/*",), read_signs, mend=mend_heartbeat),
    "prediction": Reader("run", ("prediction.json",), read_prediction, share=0.5),
    "results": Reader("run", ("result.json",), read_results, share=0.5),
    "resumed run directory": Reader("run", (*RUN_FILES, "routing.jsonl"), read_resumed),
    "damaged checkpoints": Reader(
        "steps",
        ("latest",),
        resume_damaged,
        damage=lambda file, draw: damage_checkpoints(file.parent, draw),
    ),
    "edited checkpoints": Reader(
        "run",
        (f"{STEP}/*", "checkpoints/latest"),
        lambda copy: resume_edited(copy, run_overrides(copy)),
        mend=mend_checkpoint,
    ),
    "edited generators": Reader(
        "run",
        (f"{STEP}/rank-00000.json",),
        lambda copy: resume_edited(copy, run_overrides(copy)),
        damage=edit_generator,
        mend=mend_checkpoint,
        share=0.5,
    ),
    "launcher's checkpoints": Reader(
        "run", (f"{STEP}/*.json",), read_launchers_view, mend=mend_checkpoint, share=0.2
    ),
    "Hugging Face folder": Reader("hf", ("*.json", "*.safetensors"), read_hugging_face),
    "prepared data": Reader(
        "data", ("out/*.json", "cache/*/*.json", "out/*"), read_data
    ),
    "interrupted preparation": Reader(
        "data", ("half.part/*.json", "half.part/*"), read_half_written, share=0.5
    ),
    "tokenizers": Reader("data", ("tokenizer/*",), read_tokenizers),
    "conversations": Reader(
        "chat",
        ("rows.jsonl", "tokenizer/*.jinja", "tokenizer/*.json"),
        read_conversations,
        share=2.0,
    ),
    "JSON lines of text": Reader("small", ("lines.jsonl",), read_texts, share=0.5),
    "hardware": Reader(
        "small", ("hardware.yaml",), lambda copy: load_hardware(copy / "hardware.yaml")
    ),
    "sweep definition": Reader(
        "small", ("grid.yaml",), lambda copy: read_definition(str(copy / "grid.yaml"))
    ),
    "rows of a sweep": Reader(
        "small",
        ("rows.yaml",),
        lambda copy: read_definition(str(copy / "rows.yaml")),
        share=0.3,
    ),
    "outcome": Reader(
        "small",
        ("outcome.json",),
        lambda copy: read_exit_record(copy / "outcome.json"),
        share=0.3,
    ),
    "sweep folder": Reader(
        "sweep",
        ("sweep.json", "jobs/*/job.json", "queue/1/jobs.json"),
        read_sweep_files,
    ),
    "trace": Reader(
        "profile", ("trace/*",), lambda copy: read_timeline(copy / "trace", "cpu")
    ),
    "snapshot": Reader(
        "profile",
        ("snapshot/*",),
        lambda copy: read_timeline(copy / "snapshot", "cuda"),
        share=0.5,
    ),
}
