"""The command line, compared with the dataclasses and the YAML folder. Mistakes are in
``tests/messages``."""

import multiprocessing
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fsdptoys
from fsdptoys.cli.commands import command_names, parse
from fsdptoys.cli.main import main
from fsdptoys.config.choices import list_choices
from fsdptoys.config.compose import compose_config
from tests.harness.levels import by_level

ROOT = Path(__file__).parents[2]

HELP = [
    "",
    "--version",
    "--help",
    "models --help",
    "plan --help",
    "plan search -h",
    "convert",
    "convert to-hf -h",
]
HELP += ["generate", "evaluate -h", "data prepare --help", "train --help"]
PLAN = "train --cfg job launch.device=cpu"
"""A command line that stops before the launcher starts its workers."""
SLOW = [
    "torch",
    "sympy",
    *(f"torch.distributed.{name}" for name in ("tensor", "fsdp", "checkpoint")),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Slow modules imported by a new interpreter after each command line."""
    code = f"""
import sys
from fsdptoys.__main__ import main
from fsdptoys.utils.text import value_text
for line in {[*HELP, PLAN]}:
    main(line.split())
    print("loaded", line, *(name for name in {SLOW} if name in sys.modules), sep="|")
"""
    # without coverage, since other tests run the same lines
    present = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("COVERAGE_PROCESS_")
    }
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path_factory.mktemp("interpreter"),
        env=present | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (process.returncode, process.stderr) == (0, "") and process.stdout.count(
        "fsdptoys"
    ) > len(HELP)
    lines = [
        line.split("|")[1:]
        for line in process.stdout.splitlines()
        if line.startswith("loaded|")
    ]
    return {line: names for line, *names in lines}


def test_help_needs_no_torch(loaded: dict[str, list[str]]) -> None:
    """Oracle: the modules of the interpreter that printed the help."""
    assert {line: loaded[line] for line in HELP} == {line: [] for line in HELP}


def test_launcher_imports_no_slow_torch_module(loaded: dict[str, list[str]]) -> None:
    """Oracle: the modules of the interpreter that planned a run."""
    assert loaded[PLAN] == ["torch"]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the dispatch table of the command line."""
    main(["--help"])
    page = capsys.readouterr().out
    for command in command_names():
        assert f" fsdptoys {command} " in page and f"\n    {command} " in page


@pytest.mark.parametrize(
    ("line", "usage"),
    [
        ("models --help", "models [NAME ...] [--json]\n"),
        ("convert", "convert to-hf RUN OUT_DIR"),
        ("convert from-hf -h", "convert to-hf RUN OUT_DIR"),
        ("checkpoint", "checkpoint ls PATH"),
        ("compare --help", "compare "),
    ],
)
def test_help_of_a_command_begins_with_its_usage(
    line: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the usage line; the page fits 120 columns."""
    assert main(line.split()) == 0
    page = capsys.readouterr().out
    assert (
        page.startswith(f"usage: fsdptoys {usage}")
        and max(map(len, page.splitlines())) <= 120
    )


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the package's own."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fsdptoys {fsdptoys.__version__}\n"


def test_help_lists_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the names of the YAML files; the keys are a generated file."""
    assert main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.replace("*", "").replace(",", "").splitlines()
    for group, names in list_choices().items():
        (line,) = [line for line in lines if line.startswith(f"  {group}= ")]
        assert set(names) <= set(line.split())


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "parallel", by_level(("fsdp2", "single", "ddp", "fsdp1"), ["fsdp2"])
)
@pytest.mark.parametrize("experiment", list_choices()["experiment"])
def test_every_experiment_is_accepted_by_every_strategy(
    experiment: str, parallel: str
) -> None:
    """Oracle: ``Config.validate``, for the hardware that the experiment is for."""
    config = compose_config([f"experiment={experiment}", f"parallel={parallel}"])
    ranks = 1 if parallel == "single" else 8 if experiment == "llama2_7b" else 2
    config.validate(ranks, "cpu" if experiment.startswith("cpu_") else "cuda")
    assert config.parallel.name == parallel


@pytest.mark.parametrize("spelling", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_cfg_prints_the_resolved_configuration(
    spelling: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the same arguments composed and validated in this process."""
    overrides = [
        "experiment=null",
        "train.steps=7",
        "train.seed=3",
        "optim.warmup_steps=${train.grad_accum}",
    ]
    assert main(["train", *overrides, *spelling, "launch.device=cpu"]) == 0
    config = compose_config([*overrides, "launch.device=cpu"])
    config.validate(2, "cpu")
    output = capsys.readouterr().out
    assert yaml.safe_load(output) == config.to_dict()
    assert config.train.init_seed == 3 and config.optim.warmup_steps == 1
    assert "model=llama_debug" in output.splitlines()[0]


@pytest.mark.parametrize(
    "has_error_file", [False, True], ids=["alone", "under a launcher"]
)
def test_rank_of_an_external_launcher_reports_its_mistake(
    has_error_file: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Oracle: torchrun's contract: exit status, and errors in the file that it names."""
    rank = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    for name, value in (
        rank
        | (
            {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
            if has_error_file
            else {}
        )
    ).items():
        monkeypatch.setenv(name, value)
    process = multiprocessing.get_context("fork").Process(
        target=main, args=(["train", "train.steps=0"],)
    )
    process.start()
    process.join()
    assert process.exitcode == 2
    report = (
        (tmp_path / "error.json").read_text()
        if has_error_file
        else capfd.readouterr().err
    )
    assert (
        "train.steps=0 must be at least 1, or -1; set train.steps=1" in report
        and "Traceback" not in report
    )


LINES = {
    "memory=lean": (
        "memory.chunk_loss=true memory.gradient_checkpointing=full memory.cpu_offload=false"
    ),
    "memory=lean memory.chunk_loss=false": (
        "memory.chunk_loss=false memory.gradient_checkpointing=full"
    ),
    "memory.chunk_loss=false memory=lean": (
        "memory.chunk_loss=false memory.gradient_checkpointing=full"
    ),
    "memory=cpu_offload memory=lean": "memory.chunk_loss=true memory.cpu_offload=false",
    "memory=cpu_offload": "memory.cpu_offload=true",
    "memory=optimizer_offload": "memory.optimizer_offload=true",
    "model=llama_bytes memory=smallest": "memory.cpu_offload=true memory.activation_offload=true",
    "experiment=llama3_1b": "memory.gradient_checkpointing=full",
    "experiment=llama3_1b memory=none": "memory.gradient_checkpointing=none",
    "mesh=hsdp": "mesh.fsdp_size=1",
    "mesh=node": "mesh.fsdp_size=2",
    "mesh=hsdp mesh.fsdp_size=2": "mesh.fsdp_size=2",
    "model=llama3_8b model=gpt2_debug": "model.name=gpt2_debug",
    "parallel=ddp parallel=fsdp1": "parallel.name=fsdp1",
    "parallel=fsdp1 parallel.min_params=1e6": "parallel.min_params=1000000.0",
    "parallel=fsdp2 parallel.min_params=20000": "parallel.min_params=20000.0",
}
"""Typed line → settings, as they would be typed."""


@pytest.mark.parametrize("line", LINES)
def test_typed_line_composes_to_its_settings(line: str) -> None:
    """Oracle: the table above."""
    config = compose_config(parse("train", shlex.split(line)).arguments)
    config.validate(world_size=2, device_type="cpu")
    tree = config.to_dict()
    for word in LINES[line].split():
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        assert str(tree[section][name]).lower() == value
