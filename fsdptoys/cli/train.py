"""``fsdptoys train``: resolve the run, check its folders, weights and data, and start or be its
ranks."""

import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml

from fsdptoys.config.overrides import SeveralValuesError
from fsdptoys.config.saved import read_tree
from fsdptoys.config.schema import Config
from fsdptoys.config.settings import read_settings
from fsdptoys.errors import ConfigError
from fsdptoys.imports import explain_missing
from fsdptoys.launch.hardware import profile_of_this_machine, set_allocator
from fsdptoys.launch.launch import check_master, launch, print_run, resolve_run
from fsdptoys.metrics.config import CONFIG_FILE
from fsdptoys.utils.console_stream import let_stdout_end
from fsdptoys.utils.text import print_status

from .commands import parse
from .planned import choose_largest, choose_switches


def train_command(argv: list[str]) -> int:
    """Run ``fsdptoys train``, or one of its ranks; return the exit status."""
    # -c is Hydra's short form of --cfg; as an argparse option, it would take every word that begins
    # with -c.
    options = parse("train", [re.sub("^-c(?==|$)", "--cfg", word) for word in argv])
    settings = read_settings(options.config, options.arguments)
    settings.tell()
    try:
        with settings.name_origin():
            return _train(settings.overrides, options.cfg)
    except SeveralValuesError as error:
        argv = [
            error.corrected if word == error.word else word
            for word in options.arguments
        ]
        raise ConfigError(
            f"{error}, or fsdptoys sweep {shlex.join(argv)} to train with each"
        ) from error


def _train(overrides: list[str], cfg: str | None) -> int:
    _check_imports(overrides)
    if cfg is not None:
        run = resolve_run(overrides, os.environ, choose_largest, choose_switches)
        _check_places(run.composition.config)
        choices = " ".join(
            f"{group}={name or 'null'}"
            for group, name in run.composition.choices.items()
        )
        print(
            f"# {choices}\n# validated for {run.world_size} ranks on {run.hardware.device_type}"
        )
        print(
            yaml.safe_dump(
                run.composition.config.to_dict(), sort_keys=False, allow_unicode=True
            ),
            end="",
        )
        return 0
    let_stdout_end()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from fsdptoys.launch.worker import run_as_worker

        return run_as_worker(lambda: _work(overrides))
    run = resolve_run(overrides, os.environ, choose_largest, choose_switches)
    if run.composition.config.launch.nnodes == 1:
        # With several nodes, rank 0 on another one may have made the folder already.
        _check_places(run.composition.config)
    _verify_weights(run.composition.config)
    _prepare_data(run.composition.config, run.world_size, run.local_ranks)
    return launch(run)


def _work(overrides: list[str]) -> None:
    """Run one rank."""
    import torch

    # First: the queries of hardware below create the allocator, which reads its variables once.
    environment = set_allocator()

    from fsdptoys.launch.worker import read_request
    from fsdptoys.train.run import train

    request = read_request()
    run = None
    if request is None:
        run = resolve_run(overrides, os.environ, choose_largest, choose_switches)
        check_master(os.environ)
        request = run.request()
        # Called by every rank; one of them prepares.
        _prepare_data(request.config, request.world_size, request.local_ranks)
    elif int(os.environ["WORLD_SIZE"]) != request.world_size:
        raise ConfigError(
            f"launch.nnodes={request.config.launch.nnodes} machines of {request.local_ranks} "
            f"ranks were expected, and {os.environ['WORLD_SIZE']} ranks have come; set "
            "launch.nproc_per_node to the same on each"
        )
    config = request.config
    # torchrun has not set these. OpenMP reads its own at import, which for forks was in the
    # launcher, so the threads are set again below.
    environment |= request.environment()
    os.environ.update(environment)
    # the others are for nested regions
    threads = os.environ["OMP_NUM_THREADS"].partition(",")[0]
    if threads.strip():
        torch.set_num_threads(int(threads))
    prediction = None
    if os.environ["RANK"] == "0":
        _check_places(config)
        if run is not None:
            _verify_weights(config)
            print_run(run, environment)
        if config.plan.hardware != "auto" or profile_of_this_machine() is not None:
            from fsdptoys.metrics import prediction_line
            from fsdptoys.plan.predict import estimate_run

            estimated = estimate_run(config, request.world_size)
            if estimated is not None:
                prediction, profile = estimated
                print_status(
                    prediction_line(prediction, profile.usable_bytes), stdout=True
                )
        elif request.hardware.device_type != "cpu" and config.plan.predict:
            print_status(
                "no forecast, and no choice of model or memory switches: no hardware profile "
                f"matches {request.hardware.name}; write one from a copy of a file in "
                "configs/hardware, correct it with fsdptoys plan calibrate, and set "
                "plan.hardware to it",
                stdout=True,
            )
    train(config, prediction)


def _check_imports(overrides: Sequence[str]) -> None:
    """Name the missing imports of the run to resume, before its choices are refused."""
    values = {
        key: value.strip("'\"")
        for key, _, value in (word.partition("=") for word in overrides)
        if key in ("checkpoint.resume", "metrics.run_dir")
    }
    for key, value in values.items() if "checkpoint.resume" in values else ():
        path = Path(value).expanduser()
        for folder in (path, *path.parents[:2]):  # of a checkpoint
            file = folder / CONFIG_FILE
            with contextlib.suppress(ConfigError):
                missing = explain_missing(read_tree(file)) if file.is_file() else None
                if missing is not None:
                    break
        else:
            continue
        raise ConfigError(f"{key}={value} cannot be resumed yet: {missing}")


def _check_places(config: Config) -> None:
    """Check the run's output folders and the checkpoint to resume from."""
    from fsdptoys.metrics import check_run_dir
    from fsdptoys.train.launch_env import restart_count
    from fsdptoys.train.resume import check_resume

    restarted = restart_count() > 0
    resumes = config.checkpoint.resumes or restarted
    check_run_dir(config.metrics, resumes, config.writers)
    check_resume(config, restarted)


def prepare_run(config: Config, world_size: int, local_ranks: int) -> None:
    """Check the folders and weights of a validated run, and prepare its data, before it starts."""
    _check_places(config)
    _verify_weights(config)
    _prepare_data(config, world_size, local_ranks)


def _verify_weights(config: Config) -> None:
    """Verify the checksums of the initial weights, if any, before a worker starts, and an adapter's
    values."""
    from fsdptoys.checkpoint import HuggingFaceFolder, verify_checksums
    from fsdptoys.checkpoint.adapter_folder import AdapterFolder
    from fsdptoys.tune import LoRAConfig

    if config.model.init_from is not None:
        verify_checksums(HuggingFaceFolder(config.model.init_from).path)
    if isinstance(config.tune, LoRAConfig) and config.tune.adapter is not None:
        folder = AdapterFolder(config.tune.adapter)
        verify_checksums(folder.path)
        folder.check_values()


def _prepare_data(config: Config, world_size: int, local_ranks: int) -> None:
    """Prepare the data before a rank starts or joins the others."""
    from fsdptoys.data import check_shared_memory

    check_shared_memory(config.data.workers, config.step_bytes, local_ranks)
    config.data.prepare(config.train.seq_len, config.model.vocab_size)
    config.check_evaluation()  # again: a split of few documents may be empty
    steps_sentence = config.count_steps(world_size)
    if steps_sentence is not None and os.environ.get("RANK", "0") == "0":
        print_status(steps_sentence, stdout=True)
