"""The command line: ``fsdptoys``, ``python -m fsdptoys`` and ``torchrun -m fsdptoys``.

Every user mistake ends with one sentence on stderr and status 2. Imports are deferred so that help is fast.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdptoys import __version__
from fsdptoys.errors import ConfigError
from fsdptoys.launch.exit_record import ExitRecord, write_exit_record
from fsdptoys.utils.console_stream import install_streams, let_stdout_end, lost_output
from fsdptoys.utils.text import print_status

from .system_errors import check_current_folder, explain_environment
from .torch_errors import check_log_level, explain_autoload

if TYPE_CHECKING:
    from fsdptoys.config.schema import Config

COMMANDS = ("train", "sweep", "plan", "report", "compare", "models", "convert", "generate", "evaluate", "data")

BROKEN_PIPE = 141
"""Exit status when the reader has closed the pipe, the same as for SIGPIPE."""

MULTIRUN = ("-m", "--multirun")
"""Hydra's own options for a sweep."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments after the program's name; None for those of this process.

    Returns:
        Exit status: 0, 1 after a failure, 2 after a mistake, 128 + number after a signal.
    """
    install_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    worker = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if worker:
        # Die of Ctrl-C at once, even inside a collective; the launcher waits for it and prints the message.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        check_log_level(os.environ)
        status = _run(words, worker)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except ConfigError as error:
        return _tell_mistake(str(error), worker)
    except (RuntimeError, OSError, MemoryError, ValueError) as error:
        reason = lost_output().get("stdout") if isinstance(error, OSError) else None
        if reason is not None:
            if isinstance(error, BrokenPipeError):  # as of | head
                return BROKEN_PIPE
            print_status(f"stdout cannot be written ({reason}); the output is incomplete")
            return 1
        # Any command may be the first to import torch, so its errors are handled here.
        told = explain_autoload(error) if isinstance(error, RuntimeError) else None
        told = told or explain_environment(error)
        if told is None:
            raise
        # A full disk or memory is a failure (1); a wrong environment variable is a mistake (2).
        passes = isinstance(error, (OSError, MemoryError)) and not isinstance(error, FileNotFoundError)
        return _tell_mistake(told, worker, 1 if passes else 2)
    except KeyboardInterrupt:
        print("fsdptoys: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        let_stdout_end()  # the interpreter's final flush exits with status 120 on failure


def _tell_mistake(sentence: str, worker: bool, status: int = 2) -> int:
    print_status(sentence.replace("\n", "\\n"))  # line breaks of a typed value
    if not worker:
        write_exit_record(ExitRecord(status, sentence))
    return status


def _run(words: list[str], worker: bool) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        from .help import command_help

        print(command_help(), end="")
        return 0
    if words[0] == "--version":
        print(f"fsdptoys {__version__}")
        return 0
    if words[0] not in COMMANDS:
        raise ConfigError(_unknown_command(words[0]))
    command, words = words[0], words[1:]
    if not any(word in ("-h", "--help") for word in words):
        check_current_folder()  # PyTorch cannot be imported without one
    if command == "sweep" or (command == "train" and any(word in MULTIRUN for word in words)):
        words = [word for word in words if word not in MULTIRUN]
        if not words or any(word in ("-h", "--help") for word in words):
            from .help import sweep_help

            print(sweep_help(), end="")
            return 0
        from .sweep import sweep_command

        let_stdout_end()
        return sweep_command(words, os.environ)
    if command == "models":
        if any(word in ("-h", "--help") for word in words):
            from .help import models_help

            print(models_help(), end="")
            return 0
        from .models import list_models

        return list_models(words)
    if command == "plan":
        if any(word in ("-h", "--help") for word in words):
            from .help import plan_help

            print(plan_help(), end="")
            return 0
        from .plan import run_plan

        return run_plan(words)
    if command == "report":
        if not words or any(word in ("-h", "--help") for word in words):
            from .help import report_help

            print(report_help(), end="")
            return 0
        from .report import run_report

        return run_report(words)
    if command == "compare":
        if not words or any(word in ("-h", "--help") for word in words):
            from .help import compare_help

            print(compare_help(), end="")
            return 0
        from .report import run_compare

        return run_compare(words)
    if command == "convert":
        if not words or any(word in ("-h", "--help") for word in words):
            from .help import convert_help

            print(convert_help(), end="")
            return 0
        from .convert import convert

        return convert(words)
    if command == "generate":
        if not words or any(word in ("-h", "--help") for word in words):
            from .help import generate_help

            print(generate_help(), end="")
            return 0
        from .generate import run_generate

        return run_generate(words)
    if command == "evaluate":
        if not words or any(word in ("-h", "--help") for word in words):
            from .help import evaluate_help

            print(evaluate_help(), end="")
            return 0
        from .evaluate import run_evaluate

        return run_evaluate(words)
    if command == "data":
        if not words or any(word in ("-h", "--help") for word in words):
            from .help import data_help

            print(data_help(), end="")
            return 0
        from .data import run_data

        return run_data(words)
    if any(word in ("-h", "--help") for word in words):
        from .help import train_help

        print(train_help(), end="")
        return 0
    words, show = _take_show(words)
    if show:
        _show(words)
        return 0
    let_stdout_end()
    if worker:
        from fsdptoys.launch.worker import run_as_worker

        return run_as_worker(lambda: _work(words))
    from fsdptoys.launch.launch import launch, resolve_run

    from .largest_preset import choose_largest

    run = resolve_run(words, os.environ, choose_largest)
    if run.composition.config.launch.nnodes == 1:
        # With several nodes, rank 0 on another one may have made the folder already.
        _check_places(run.composition.config)
    _verify_weights(run.composition.config.model.init_from)
    _prepare_data(run.composition.config, run.local_ranks)
    return launch(run)


def _work(words: list[str]) -> None:
    """Run one rank."""
    import torch

    from fsdptoys.launch.hardware import hardware_environment, profile_of_this_machine
    from fsdptoys.launch.worker import WorkerRequest, read_request
    from fsdptoys.train.run import train

    request, run = read_request(), None
    if request is None:
        from fsdptoys.launch.launch import check_master, print_run, resolve_run

        from .largest_preset import choose_largest

        run = resolve_run(words, os.environ, choose_largest)
        check_master(os.environ)
        request = WorkerRequest(run.composition.config, run.hardware, run.local_ranks, run.world_size)
        _prepare_data(request.config, request.local_ranks)  # called by every rank; one of them prepares
    elif int(os.environ["WORLD_SIZE"]) != request.world_size:
        raise ConfigError(
            f"launch.nnodes={request.config.launch.nnodes} machines of {request.local_ranks} ranks were expected, and "
            f"{os.environ['WORLD_SIZE']} ranks have come; set launch.nproc_per_node to the same on each"
        )
    config, hardware = request.config, request.hardware
    # torchrun has not set these. Allocators read theirs at the first allocation, OpenMP at import, which for forks was
    # in the launcher, so the threads are set again below.
    environment = hardware_environment(
        hardware.device_type,
        request.local_ranks,
        hardware.cores,
        config.train.deterministic,
        os.environ,
        config.launch.timeout_seconds,
    )
    os.environ.update(environment)
    threads = os.environ["OMP_NUM_THREADS"].partition(",")[0]  # the others are for nested regions
    if threads.strip():
        torch.set_num_threads(int(threads))
    prediction = None
    if os.environ["RANK"] == "0":
        _check_places(config)
        if run is not None:
            _verify_weights(config.model.init_from)
            print_run(run, environment)
        if config.plan.hardware != "auto" or profile_of_this_machine() is not None:
            from fsdptoys.metrics import prediction_line
            from fsdptoys.plan.predict import estimate_run

            estimated = estimate_run(config, request.world_size)
            if estimated is not None:
                prediction, profile = estimated
                print_status(prediction_line(prediction, profile.usable_bytes), stdout=True)
    train(config, prediction)


def _check_places(config: "Config") -> None:
    """Check the run's output folders and the checkpoint to resume from."""
    from fsdptoys.metrics import check_run_dir
    from fsdptoys.train.launch_env import (
        restart_count,
    )
    from fsdptoys.train.resume import check_resume

    restarted = restart_count() > 0
    check_run_dir(config.metrics, resumes=config.checkpoint.resumes or restarted)
    check_resume(config, restarted)


def _verify_weights(init_from: str | None) -> None:
    """Verify the checksums of the initial weights, if any, before a worker starts; reads every file once."""
    from fsdptoys.checkpoint import HuggingFaceFolder

    if init_from is not None:
        HuggingFaceFolder(init_from).verify_checksums()


def _prepare_data(config: "Config", local_ranks: int) -> None:
    """Prepare the data before a rank starts or joins the others."""
    from fsdptoys.data import check_shared_memory

    check_shared_memory(config.data.workers, config.step_bytes, local_ranks)
    config.data.prepare(config.train.seq_len, config.model.vocab_size)
    config.check_evaluation()  # again: a split of few documents may be empty


def _show(words: list[str]) -> None:
    import yaml

    from fsdptoys.launch.launch import resolve_run

    from .largest_preset import choose_largest

    run = resolve_run(words, os.environ, choose_largest)
    _check_places(run.composition.config)
    chosen = " ".join(f"{group}={name or 'null'}" for group, name in run.composition.choices.items())
    print(f"# {chosen}\n# validated for {run.world_size} ranks on {run.hardware.device_type}")
    print(yaml.safe_dump(run.composition.config.to_dict(), sort_keys=False, allow_unicode=True), end="")


def _take_show(words: list[str]) -> tuple[list[str], bool]:
    """Remove ``--cfg job`` from the words; return them and whether it was present."""
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in ("--cfg", "-c"):
            taken = 1 if equals else 2
            value = value if equals else "".join(words[index + 1 : index + 2])
            if value != "job":
                raise ConfigError(f"{option}={value} must be job; write {option} job")
            return words[:index] + words[index + taken :], True
    return words, False


def _unknown_command(word: str) -> str:
    from fsdptoys.utils.text import (
        near_miss,
    )

    near = near_miss(word, COMMANDS)
    if "=" in word:
        return f"{word} stands where a command is expected; write fsdptoys train {word}"
    return f"{word} is not a command; " + (f"did you mean fsdptoys {near}?" if near else "write fsdptoys train")
