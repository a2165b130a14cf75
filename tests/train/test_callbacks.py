"""Callbacks: which hooks are called when, what they may do, and what happens when they fail."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fsdptoys import register
from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import StepMetrics
from fsdptoys.train import Callback, CallbackConfig, StartFacts
from fsdptoys.train.callbacks import Callbacks
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from tests.harness.ranks import run_ranks

WORDS = [
    *("experiment=null", "train.seq_len=32", "metrics.console=none"),
    *("train.steps=6", "train.callbacks=[observer]"),
]


class ObserverConfig(CallbackConfig):
    """Records its hooks; may stop the run, or fail in a hook."""

    stop_at: int = 0
    fails_in: str = ""

    def build(self) -> Callback:
        """Return the callback."""
        return Observer(self)


class Observer(Callback):
    """Writes the names of its hooks into a file of each rank."""

    def __init__(self, config: ObserverConfig) -> None:
        self._config = config
        self._steps = 0
        self._path = Path()

    def _note(self, hook: str, *values: object) -> None:
        if self._config.fails_in == hook:
            raise ZeroDivisionError("oh")
        with self._path.open("a") as file:
            file.write(f"{json.dumps([hook, *values])}\n")

    def on_start(self, facts: StartFacts) -> None:
        """Choose the file."""
        self._path = facts.run_dir / f"observed-{facts.rank}"
        self._note("on_start", facts.first_step, facts.steps, facts.world_size)
        assert facts.config_tree["callbacks"]["observer"]["stop_at"] >= 0

    def after_step(self, metrics: StepMetrics) -> Mapping[str, float]:
        """Count steps."""
        self._steps += 1
        self._note("after_step", metrics.step)
        if metrics.step == self._config.stop_at:
            self.stop("enough")
        return {"steps": self._steps}

    def after_evaluation(self, step: int, loss: float) -> None:
        """Note the step."""
        self._note("after_evaluation", step, loss > 0)

    def before_checkpoint(self, step: int) -> None:
        """Note the step."""
        self._note("before_checkpoint", step)

    def on_end(self, reason: str) -> None:
        """Note the reason."""
        self._note("on_end", reason)

    def state_dict(self) -> dict[str, Any]:
        """The number of steps."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count."""
        self._steps = state["steps"]


@pytest.fixture(autouse=True)
def observer() -> Any:
    """Register the callback for a test."""
    forget = register.snapshot()
    register.callback("observer")(ObserverConfig)
    yield
    forget()


def run(config: Config) -> list[dict[str, float]]:
    trainer = Trainer(config)
    Run(trainer).run()
    return [metrics.added for metrics in trainer.history]


def start(folder: Path, ranks: int, *overrides: str) -> list[list[dict[str, float]]]:
    parallel = "single" if ranks == 1 else "fsdp2"
    config = compose_config(
        [*WORDS, f"parallel={parallel}", f"metrics.run_dir={folder}", *overrides]
    )
    config.validate(ranks, "cpu")
    return run_ranks(ranks, run, config)


def observed(folder: Path, rank: int = 0) -> list[list[object]]:
    text = (folder / f"observed-{rank}").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_hooks_are_called_in_order_on_every_rank_and_across_a_resume(
    tmp_path: Path,
) -> None:
    """Oracle: the order in which the class lists them; a stop takes one more step, and the state
    continues."""
    overrides = ["checkpoint.every=2", "train.eval_every=2", "checkpoint.resume=auto"]
    histories = start(tmp_path, 2, *overrides, "callbacks.observer.stop_at=3")
    expected = [
        *(["on_start", 1, 6, 2], ["after_step", 1]),
        *(["after_step", 2], ["after_evaluation", 2, True], ["before_checkpoint", 2]),
        *(["after_step", 3], ["after_step", 4]),
        *(["after_evaluation", 4, True], ["before_checkpoint", 4]),
        ["on_end", "callback observer: enough"],
    ]
    assert observed(tmp_path, 0) == observed(tmp_path, 1) == expected
    key = "callbacks.observer.steps"
    assert histories == [[{key: float(step)} for step in range(1, 5)]] * 2
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["stop_reason"]) == (
        "done",
        "callback observer: enough",
    )

    start(tmp_path, 2, *overrides)
    assert observed(tmp_path)[len(expected)] == ["on_start", 5, 6, 2]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)[key] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert StepMetrics.from_json(lines[-1]).added == {key: 6.0}


@pytest.mark.parametrize(
    "hook",
    [
        "on_start",
        "after_step",
        "after_evaluation",
        "before_checkpoint",
        pytest.param("on_end", marks=pytest.mark.extended),
    ],
)
def test_exception_of_a_hook_ends_the_run_in_one_sentence(
    hook: str, tmp_path: Path
) -> None:
    """Oracle: the expected sentence; the step that was taken is recorded."""
    overrides = ["checkpoint.every=2", "train.eval_every=2"]
    with pytest.raises(RuntimeError) as error:
        start(tmp_path, 1, *overrides, f"callbacks.observer.fails_in={hook}")
    assert (
        f"ConfigError: the callback observer failed in {hook} (ZeroDivisionError: oh, "
        "test_callbacks.py line "
    ) in str(error.value)
    steps = len((tmp_path / "metrics.jsonl").read_text().splitlines())
    assert steps == {"on_start": 0, "after_step": 1, "on_end": 6}.get(hook, 2)
    assert (tmp_path / "summary.md").exists() is (hook == "on_end")


def test_checkpoint_and_callbacks_that_differ_are_reported() -> None:
    """Oracle: the expected sentences."""
    callbacks = Callbacks({"observer": ObserverConfig()})
    assert callbacks.load_state_dict({"other": {}}) == [
        "the checkpoint has no state of the callback observer, which starts anew",
        "the checkpoint has states of callbacks that the run does not have: other",
    ]
    assert callbacks.load_state_dict({"observer": {"steps": 3}}) == []
    assert callbacks.state_dict() == {"observer": {"steps": 3}}


class Answering(Callback):
    """Returns something from ``after_step``."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def after_step(self, metrics: StepMetrics) -> Any:
        """Return it."""
        return self.answer


@pytest.mark.parametrize("answer", [{"a b": 1.0}, {"a": "1"}, {1: 1.0}, 3, [1.0]])
def test_answer_that_is_no_dict_of_numbers_is_refused(answer: object) -> None:
    """Oracle: the hook's name in a ConfigError."""
    config = ObserverConfig()
    callbacks = Callbacks({"observer": config})
    callbacks._by_name["observer"] = Answering(answer)
    metrics = StepMetrics.from_json(
        json.dumps(
            dict.fromkeys(
                [
                    *("loss", "grad_norm", "learning_rate", "step_time_seconds"),
                    *("tokens_per_second", "tflops_per_second_per_rank"),
                ],
                1.0,
            )
            | dict.fromkeys(["step", "valid_tokens"], 1)
            | dict.fromkeys(
                [
                    *("mfu", "memory_allocated_gib", "memory_peak_gib"),
                    *("memory_reserved_gib", "resident_set_gib"),
                ]
            )
        )
    )
    with pytest.raises(ConfigError, match="observer failed in after_step"):
        callbacks.after_step(metrics)


def test_names_and_options_of_callbacks_are_checked() -> None:
    """Oracle: the expected sentences."""
    mistakes = {
        "train.callbacks=[observr]": (
            "train.callbacks names observr, which is none of observer; did you mean "
            "train.callbacks=[observer]?"
        ),
        "callbacks.observer.stop=3": (
            "callbacks.observer.stop=3 names a key that does not exist; did you mean "
            "callbacks.observer.stop_at=3?"
        ),
        "callbacks.observer.stop_at=soon": (
            "callbacks.observer.stop_at=soon must be an integer; set "
            "callbacks.observer.stop_at=0"
        ),
    }
    for word, sentence in mistakes.items():
        with pytest.raises(ConfigError) as error:
            compose_config([*WORDS, word])
        assert str(error.value) == sentence
    with pytest.raises(ConfigError) as error:
        compose_config(["callbacks.observer.stop_at=3"])
    assert str(error.value) == (
        "callbacks.observer.stop_at=3 has no effect unless train.callbacks names observer; set "
        "train.callbacks=[observer] or leave it out"
    )
