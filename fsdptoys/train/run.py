"""A training run in its run directory: resume, records, checkpoints and final weights around a
``Trainer``.

Every rank has a ``Run``. Only rank 0 has a recorder, which prints and writes metrics; all ranks
write checkpoints.
"""

import dataclasses
import functools
import json
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fsdptoys.checkpoint import Checkpoint, Checkpointer
from fsdptoys.config.schema import Config
from fsdptoys.errors import GivenUpError
from fsdptoys.imports import check_same_imports, record_imports
from fsdptoys.metrics import (
    PROFILE_FOLDER,
    ResumePoint,
    RunRecorder,
    StepMetrics,
    environment,
    lock_run_dir,
    new_run_dir,
    run_dir_path,
)
from fsdptoys.metrics.layout import Layout
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.metrics.results import ProfileResult
from fsdptoys.parallel import full_tensors, host_copy
from fsdptoys.profiler import Profiler
from fsdptoys.utils.file_lock import FolderLock
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.from_tree import build

from .callbacks import StartFacts
from .collective_trace import trace_collectives
from .distributed import process_group
from .final_weights import save_final_weights, set_weights_aside
from .heartbeat import HEARTBEATS_FOLDER, HeartbeatWriter, explain_lost_ranks
from .launch_env import remember_run_dir, remembered_run_dir, restart_count
from .layout import measure_layout
from .random_states import random_states, restore_random_states
from .resume import (
    FACTS,
    check_restart,
    check_same_run,
    check_states,
    checkpoint_folder,
    run_facts,
)
from .stop import Stop, StopRequest, run_status
from .text_sample import sample_text
from .trainer import Trainer

LAST_WAIT_SECONDS = 5.0
"""Longest wait of a failed rank for a background save before it raises its error."""


def train(config: Config, prediction: Prediction | None = None) -> Trainer:
    """Train in this process, as the rank that the environment names; return the trainer with its
    history.

    The config must be validated for the world size in the environment; rank 0 records the
    prediction with the measured values. GivenUpError if too many steps were skipped, or the last
    checkpoint could not be saved.
    """
    with process_group(config):
        trainer = Trainer(config)
        try:
            Run(trainer, prediction).run()
        finally:
            trainer.patches.undo()
        return trainer


class Run:
    """Runs a trainer, and writes its records and checkpoints."""

    def __init__(self, trainer: Trainer, prediction: Prediction | None = None) -> None:
        self.trainer = trainer
        self._prediction = prediction
        self.config = trainer.config
        self.rank = trainer.world.rank
        self.world_size = trainer.world.world_size
        self.title = f"{self.config.model.name}-{self.config.parallel.name}"
        self._check_imports()
        self._lock: FolderLock | None = None
        self.run_dir = self._claim_run_dir()
        self._recorder: RunRecorder | None = None
        self._resumed: ResumePoint | None = None
        self._saved = True
        self._problem: str | None = None

    def run(self) -> None:
        """Resume from a checkpoint if there is one, train, save the weights, sample, and write the
        summary."""
        trainer = self.trainer
        config = self.config
        heartbeats = self.run_dir / HEARTBEATS_FOLDER
        with ExitStack() as stack:
            if self._lock is not None:
                stack.callback(self._lock.release)
            heartbeat = HeartbeatWriter(heartbeats, self.rank)
            stack.callback(heartbeat.close)
            trainer.follow_phases(heartbeat.beat)
            limits = {
                "launch.timeout_seconds": config.launch.timeout_seconds,
                "checkpoint.timeout_seconds": config.checkpoint.timeout_seconds,
            }
            stack.enter_context(
                explain_lost_ranks(heartbeats, self.rank, self.world_size, limits)
            )
            heartbeat.beat(0, "start")
            self.checkpoints = self._open_checkpoints()
            self._resume()
            layout = measure_layout(trainer)
            if self.rank == 0:
                self._recorder = stack.enter_context(self._open_recorder(layout))
            # The run directory is claimed before any rank writes into it.
            dist.barrier(device_ids=self.trainer.world.device.barrier_devices)
            trainer.callbacks.start(self._start_facts)
            profiler = self._profiler()
            if self._recorder and config.debug.trace_collectives:
                trace_collectives(trainer, self.run_dir, self._say)
            # Stays open until the end: a repeated signal must not kill the process before the last
            # checkpoint.
            request = stack.enter_context(StopRequest())
            try:
                stop = trainer.train(self._on_step, profiler, self._save, request)
            except Exception:
                self.checkpoints.wait(LAST_WAIT_SECONDS)
                raise
            heartbeat.beat(trainer.steps_done, "end")
            problem = self._finish(stop, profiler)
            heartbeat.remove()
            trainer.callbacks.end(stop.reason)
            if problem is not None:
                raise GivenUpError(problem)

    def _finish(self, stop: Stop, profiler: Profiler) -> str | None:
        """Write final weights, sample and summary; after a signal or too many skipped steps, the
        summary only.

        Return an error message if the run gave up, or its last checkpoint is missing.
        """
        if not self.checkpoints.finish():
            self._saved = False
        self._say(*self.checkpoints.report())
        is_early = stop.signal or stop.gave_up
        reason = self._early_reason(stop) if is_early else stop.reason
        sample = None
        try:
            if not is_early:
                if self.config.checkpoint.final_weights:
                    save_final_weights(self.config, self.trainer.strategy, self.run_dir)
                sample = sample_text(self.trainer)
        finally:
            # A disk too full for the weights must not lose the results as well.
            if self._recorder:
                watch = self.trainer.compilation
                compilation = watch.result() if watch else None
                planned = self.config.train.steps
                status = run_status(stop, self.trainer.steps_done, planned)
                findings = profiler.findings()
                profile = (
                    build(ProfileResult, findings) if findings is not None else None
                )
                self._recorder.finish(reason, status, sample, profile, compilation)
        if stop.gave_up:
            return (
                f"stopped after step {self.trainer.steps_done}: {reason}; lower optim.lr or look "
                "at the data of these steps, and to go back to an older checkpoint, move the "
                "newer ones away"
            )
        if self._saved:
            return None
        return self._broadcast(self._problem) or "the last checkpoint was not saved"

    def _early_reason(self, stop: Stop) -> str:
        """Return the reason of an early stop with the newest checkpoint; say what continues the
        run."""
        newest = self.checkpoints.last_step
        if newest is None:
            return f"{stop.reason}; nothing is saved"
        if stop.signal:
            missing = []
            if not self.config.checkpoint.resumes:
                missing.append("checkpoint.resume=auto")
            if self.config.metrics.run_dir is None:
                missing.append(f"metrics.run_dir={self.run_dir}")
            added = f" with {' and '.join(missing)}" if missing else ""
            self._say(f"the same command{added} continues the run")
        return f"{stop.reason}; the newest checkpoint is that of step {newest}"

    def _check_imports(self) -> None:
        """Check that all ranks have loaded the same code of the user."""
        records = self._broadcast(json.dumps({"imports": record_imports()}))
        check_same_imports(parse_json(str(records)), self.rank)

    def _start_facts(self) -> StartFacts:
        """Facts of this start for callbacks."""
        return StartFacts(
            rank=self.rank,
            world_size=self.world_size,
            device_type=self.trainer.world.device.type,
            steps=self.config.train.steps,
            first_step=self.trainer.steps_done + 1,
            run_dir=self.run_dir,
            config_tree=self.config.to_dict(),
        )

    def _claim_run_dir(self) -> Path:
        """Choose and lock the run directory on rank 0, and broadcast it."""
        path: Path | None = None
        if self.rank == 0:
            run_dir = self.config.metrics.run_dir
            path = remembered_run_dir() or (
                run_dir_path(run_dir) if run_dir is not None else None
            )
            if path is None:
                check_restart(self.config)
                path = new_run_dir(self.title)
            self._lock = lock_run_dir(path)  # before anything there is touched
        path = Path(str(self._broadcast(str(path))))
        remember_run_dir(path)
        return path

    def _broadcast(self, text: str | None) -> str | None:
        """Rank 0's text. A collective."""
        shared = [text]
        device = self.trainer.world.device.torch_device
        dist.broadcast_object_list(shared, device=device)
        return shared[0]

    def _open_checkpoints(self) -> Checkpointer:
        folder = checkpoint_folder(self.config, self.run_dir)
        assert folder is not None
        # A group of its own, so that a background thread can use it during training.
        group = dist.new_group(
            backend="gloo",
            timeout=timedelta(seconds=self.config.checkpoint.timeout_seconds),
        )
        return Checkpointer(
            self.config.checkpoint,
            folder,
            group,
            message=self._report_problem,
            copy=host_copy,
            gather_full=full_tensors,
            schema=FACTS,
        )

    def _resume(self) -> None:
        """Load the checkpoint selected by the settings or a restart, if any."""
        trainer = self.trainer
        config = self.config
        restarted = restart_count() > 0
        checkpoint = self.checkpoints.resume(restarted=restarted)
        if checkpoint is None:
            if restarted or config.checkpoint.resumes:
                self._resumed = ResumePoint(0, {}, None)
                if self.rank == 0:
                    set_weights_aside(self.run_dir)
            return
        self._say(*check_same_run(config, checkpoint.facts))
        before = checkpoint.facts["global_batch"]
        now = trainer.data.batches.global_batch
        if before != now:
            self._say(
                f"the global batch was {before} sequences and is {now}, so the steps differ from "
                "those of the uninterrupted run; train.batch_size and train.grad_accum set it"
            )
        if self.rank == 0 and checkpoint.step < config.train.steps:
            set_weights_aside(self.run_dir)
        trainer.load_state_dict(
            checkpoint.facts, checkpoint.load, checkpoint.read_states
        )
        states = checkpoint.facts.get("callbacks", {})
        self._say(*trainer.callbacks.load_state_dict(states))
        self._restore_random_states(checkpoint)
        self._resumed = ResumePoint(
            checkpoint.step, checkpoint.facts["metrics"], checkpoint.name
        )

    def _restore_random_states(self, checkpoint: Checkpoint) -> None:
        """Restore each rank's generators; rank 0 reports the ranks that start from the seed
        instead."""
        seed = self.config.train.init_seed
        assert seed is not None
        reason = restore_random_states(
            checkpoint.own_facts,
            self.trainer.world.device,
            seed,
            checkpoint.step,
            self.rank,
        )
        reasons = self.checkpoints.gather(reason)
        ranks = [rank for rank, of_rank in enumerate(reasons) if of_rank is not None]
        if ranks:
            whose = f"rank {ranks[0]}" + (
                f" and {len(ranks) - 1} others" if ranks[1:] else ""
            )
            self._say(
                f"the random number states of {whose} in {checkpoint.name} cannot be used here "
                f"({reasons[ranks[0]]}), so generators start from the seed"
            )

    def _open_recorder(self, layout: Layout) -> RunRecorder:
        trainer = self.trainer
        dataset = trainer.data.dataset
        patches = trainer.patches.outcomes(trainer.strategy.model)
        references = {
            "unigram entropy of the data": dataset.unigram_entropy_nats,
            "conditional entropy of the data": dataset.conditional_entropy_nats,
        }
        return RunRecorder(
            dataclasses.replace(self.config.metrics, run_dir=str(self.run_dir)),
            title=self.title,
            config_tree=self.config.to_dict(),
            defaults=self.config.defaults(),
            environment=environment(trainer.world.device, self.world_size, sys.argv)
            | {
                "attention_backend": trainer.parallel_model.attention_backend,
                "patches_of_pytorch": patches or "none",
            },
            steps=self.config.train.steps,
            references={
                label: nats for label, nats in references.items() if nats is not None
            },
            resumed=self._resumed,
            lock=self._lock,
            make_room=self.checkpoints.wait,
            prediction=self._prediction,
            layout=layout,
            writers=self.config.writers,
        )

    def _profiler(self) -> Profiler:
        say = (
            self._recorder.message
            if self._recorder
            else functools.partial(print, f"rank {self.rank}:", flush=True)
        )
        return Profiler(
            self.config.profile,
            self.trainer.world.device,
            self.rank,
            self.run_dir / PROFILE_FOLDER,
            first_step=self.trainer.steps_done + 1,
            message=say,
        )

    def _on_step(self, metrics: StepMetrics) -> None:
        if self._recorder:
            self._recorder.step(metrics)
            if self.trainer.compilation:
                self._recorder.message(*self.trainer.compilation.take_messages())
        self._say(*self.checkpoints.report())

    def _save(self, stop: Stop | None) -> None:
        """Save a checkpoint, or begin an async save; all ranks call this after the same step."""
        started = time.perf_counter()
        trainer = self.trainer
        trainer.callbacks.before_checkpoint(trainer.steps_done)
        facts = run_facts(self.config, self.world_size) | trainer.state_dict()
        facts["metrics"] = self._recorder.offsets() if self._recorder else {}
        tensors = trainer.strategy.state_tensors(trainer.optimizer)
        check_states(self.config.optim, facts, tensors)
        # The cause may be older than the oldest checkpoint kept.
        prunes = stop is None or not stop.gave_up
        self._saved = self.checkpoints.save(
            trainer.steps_done,
            tensors,
            facts,
            random_states(trainer.world.device),
            prunes,
        )
        if self._saved:
            seconds = time.perf_counter() - started
            paused = self.config.checkpoint.async_save
            how = "being written; training paused for" if paused else "saved in"
            self._say(f"checkpoint of step {trainer.steps_done} {how} {seconds:.2f} s")

    def _report_problem(self, sentence: str) -> None:
        self._problem = sentence
        self._say(sentence)

    def _say(self, *texts: str) -> None:
        for text in texts:
            if self._recorder:
                self._recorder.message(text)
            elif self.rank == 0:
                print(f"fsdptoys: {text}", file=sys.stderr, flush=True)
