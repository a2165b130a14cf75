"""The trainer's interface to the metrics on rank 0: sends steps and messages to console, run
directory and writers."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from fsdptoys.utils.console_stream import lost_output
from fsdptoys.utils.file_lock import FolderLock
from fsdptoys.utils.text import print_status

from . import figures
from .compilation import Compilations, compilation_line
from .config import (
    EXPERTS_FILE,
    LOSS_FILE,
    METRICS_FILE,
    PREDICTION_FILE,
    RESULT_FILE,
    ROUTING_FILE,
    RUN_FILES,
    SUMMARY_FILE,
    MetricsConfig,
)
from .console import Reporter, build_reporter
from .definitions import definitions
from .layout import Layout, layout_lines, layout_rows
from .prediction import Prediction
from .registry import build_writers
from .results import (
    ProfileResult,
    RunResult,
    RunStatus,
    plain_tree,
    prediction_errors,
    summarize,
)
from .resume_log import ResumePoint, starts
from .run_directory import RunDirectory, writing
from .run_environment import hardware_line
from .step import StepMetrics
from .summary import render_summary
from .writer import RunStart, WriterConfig
from .writers import Writers


class RunRecorder(AbstractContextManager["RunRecorder"]):
    """Context manager for one run; an exit without ``finish`` keeps all recorded steps.

    All methods raise ConfigError if the run directory cannot be created or written.

    Args:
        config_tree: all settings, as plain values.
        defaults: key → default of settings that the summary leaves out at this value.
        environment: from :func:`~fsdptoys.metrics.run_environment.environment`.
        steps: configured number of optimizer steps.
        references: label → nats per token, shown with the loss.
        resumed: the state from which the run resumes, in a folder that may contain earlier steps;
            None for a new run.
        layout: parameters, units and bytes of a rank, printed at the start and kept in the results.
        make_room: called if the disk is full; returns whether it may have room now.
        writers: name → settings of writers; a missing one has its defaults.
    """

    def __init__(
        self,
        config: MetricsConfig,
        title: str,
        config_tree: dict[str, Any],
        environment: dict[str, Any],
        steps: int,
        references: dict[str, float],
        resumed: ResumePoint | None = None,
        lock: FolderLock | None = None,
        make_room: Callable[[], bool] = lambda: False,
        prediction: Prediction | None = None,
        layout: Layout | None = None,
        defaults: Mapping[str, Any] = {},
        writers: Mapping[str, WriterConfig] = {},
    ) -> None:
        self._defaults = defaults
        self._prediction = prediction
        self._layout = layout
        self._config = config
        self._title = title
        self._config_tree = config_tree
        self._environment = environment
        self._planned_steps = steps
        self._references = references
        self._last_counts: list[list[int]] = []
        self._counts_step = 0
        self._started = time.perf_counter()
        self._lost_output: str | None = None
        self._directory = RunDirectory(
            config, title, config_tree, environment, resumed, lock, make_room, writers
        )
        self.run_dir = self._directory.path
        self._steps = self._directory.earlier_steps
        resumed_step = resumed.step if resumed else 0
        self._reporter: Reporter = build_reporter(
            config.console, steps, config.log_every, resumed_step
        )
        self.message(
            f"{title}\n{hardware_line(environment)}, {steps} steps into {self.run_dir}"
        )
        if layout is not None:
            self.message(layout_lines(layout_rows(layout)))
        if resumed and resumed_step:
            self.message(
                f"resuming after step {resumed_step}"
                + f" from {resumed.checkpoint}" * bool(resumed.checkpoint)
            )
        self.message(*self._directory.notes)
        if prediction is not None:
            self._directory.write(
                PREDICTION_FILE, json.dumps(prediction.to_dict(), indent=2) + "\n"
            )
        self._writers = Writers(
            build_writers(config, writers), self.message, resumed_step
        )
        start = RunStart(title, config_tree, environment, self.run_dir, resumed_step)
        self._writers.call(lambda writer: writer.start(start))
        self._watch_console()

    def __exit__(self, *error: object) -> None:
        self._reporter.close()
        self._writers.call(lambda writer: writer.close())
        self._directory.close()

    def step(self, metrics: StepMetrics) -> None:
        """Record a completed step."""
        self._steps.append(metrics.without_counts())
        self.message(*self._directory.append(METRICS_FILE, metrics.to_json()))
        if metrics.routing is not None:
            self._last_counts = metrics.routing.counts
            if metrics.step == 1 or metrics.step % self._config.log_every == 0:
                self._write_counts()
        self._reporter.step(metrics)
        self._watch_console()
        self._writers.last_step = metrics.step
        self._writers.call(lambda writer: writer.step(metrics))

    def offsets(self) -> dict[str, int]:
        """Flush all files to the disk, and return ``ResumePoint.offsets`` for a checkpoint after
        the last step."""
        self._writers.call(lambda writer: writer.flush())
        self.message(*self._directory.restore())
        return self._directory.offsets()

    def message(self, *texts: str) -> None:
        """Show texts on the console only."""
        for text in texts:
            self._reporter.message(text)

    def finish(
        self,
        stop_reason: str,
        status: RunStatus = RunStatus.completed,
        sample: str | None = None,
        profile: ProfileResult | None = None,
        compilation: Compilations | None = None,
    ) -> None:
        """Write the plots, ``result.json`` and ``summary.md``, and print the results.

        ``stop_reason`` completes "15 of 20 steps; …"; ``compilation`` is that of this rank, if the
        model is compiled.
        """
        resumes = self._directory.resumes
        self._directory.flush()
        self.message(*self._directory.restore())
        results = summarize(self._steps, self._config.warmup_steps, starts(resumes))
        errors = (
            prediction_errors(self._prediction, results)
            if self._prediction is not None
            else []
        )
        self._reporter.close()
        self._watch_console()
        with writing(self.run_dir):
            figures.draw_loss(
                self.run_dir / LOSS_FILE, self._title, self._steps, self._references
            )
        if self._last_counts:
            self._write_counts()
            with writing(self.run_dir):
                figures.draw_experts(
                    self.run_dir / EXPERTS_FILE,
                    self._title,
                    self._steps,
                    self._last_counts,
                )
        result = RunResult(
            title=self._title,
            status=status,
            stop_reason=stop_reason,
            planned_steps=self._planned_steps,
            wall_seconds=time.perf_counter() - self._started,
            steps=results,
            references_nats=self._references,
            prediction=tuple(errors),
            compilation=compilation,
            resumes=tuple(resumes),
            profile=profile,
            sample=sample,
            lost_output=self._lost_output,
            files=self._files(),
            definitions=definitions(
                [results],
                predicted=bool(errors),
                compiled=compilation is not None,
                laid_out=self._layout is not None,
            ),
            environment=plain_tree(self._environment),
            settings=plain_tree(self._config_tree),
            layout=self._layout,
        )
        self._directory.write(RESULT_FILE, result.to_json())
        # Last, since readers take a folder with a summary for a finished run.
        self._directory.write(SUMMARY_FILE, render_summary(result, self._defaults))
        self._writers.call(
            lambda writer: writer.finish(results, stop_reason, self.run_dir / LOSS_FILE)
        )
        self._writers.call(lambda writer: writer.close())
        if sample is not None:
            self.message(f"sample of the trained model:\n{sample}\n")
        checkpoint = self._config_tree.get("checkpoint", {})
        loses = (
            checkpoint.get("every") == 0 and checkpoint.get("final_weights") is False
        )
        note = (
            ", without the trained weights (checkpoint.final_weights=true keeps them)"
            if loses
            else ""
        )
        self.message(
            "\n".join([*closing_lines(result), f"run directory: {self.run_dir}{note}"])
        )

    def _files(self) -> dict[str, str]:
        """Entry of the run directory → its content; the last two are about to be written."""
        return {
            name: content
            for name, content in RUN_FILES.items()
            if name in (RESULT_FILE, SUMMARY_FILE) or (self.run_dir / name).exists()
        }

    def _watch_console(self) -> None:
        """Report lost console output once, on stderr and in the summary; the run continues without
        a console."""
        lost = lost_output()
        if not lost or self._lost_output is not None:
            return
        when = (
            f"at step {self._steps[-1].step}"
            if self._steps
            else "before the first step"
        )
        streams = ", ".join(f"{name}: {reason}" for name, reason in lost.items())
        self._lost_output = (
            f"Console output was lost {when} ({streams}); {METRICS_FILE} has "
            "every step."
        )
        print_status(self._lost_output)

    def _write_counts(self) -> None:
        """Write the token counts per expert of the last step, unless already written."""
        step = self._steps[-1].step
        if step != self._counts_step:
            line = json.dumps({"step": step, "expert_tokens": self._last_counts})
            self.message(*self._directory.append(ROUTING_FILE, line))
            self._counts_step = step


def closing_lines(run: RunResult) -> list[str]:
    """Last lines on the console: losses, speed, inaccurate predictions, and compilations."""
    results = run.steps
    lines = [f"{results.steps} of {run.planned_steps} steps; {run.stop_reason}"]
    if results.last_loss is not None:
        losses = [f"last loss {results.last_loss:.4f}"]
        if results.eval_loss is not None:
            losses.append(f"held-out loss {results.eval_loss:.4f}")
        losses += [f"{label} {nats:.4f}" for label, nats in run.references_nats.items()]
        lines.append(", ".join(losses) + " (nats per token)")
    if results.step_time_seconds is not None and results.tokens_per_second is not None:
        stall = (
            f", {results.data_stall:.2%} of the time waiting for data"
            if results.data_stall is not None
            else ""
        )
        lines.append(
            f"median step {results.step_time_seconds.median * 1e3:,.1f} ms, "
            f"{results.tokens_per_second.median:,.0f} tokens/s over all ranks{stall} (excluding "
            f"the first {results.warmup_steps} "
            f"steps{' of each start' * (len(results.starts) > 1)})"
        )
    lines += [
        f"predicted {error.quantity} differs by {error.difference:+.0%} from the measurement"
        for error in run.prediction
        if error.flagged
    ]
    return lines + (
        [compilation_line(run.compilation)] if run.compilation is not None else []
    )
