"""Callbacks: own code at fixed points of a run, on every rank.

    @register.callback("patience")
    class PatienceConfig(CallbackConfig):
        evaluations: int = 3  # callbacks.patience.evaluations

        def build(self) -> Callback:
            return Patience(self.evaluations)


    class Patience(Callback):
        def __init__(self, evaluations: int) -> None:
            self._left = evaluations
            self._best: float | None = None

        def after_evaluation(self, step: int, loss: float) -> None:
            if self._best is None or loss < self._best:
                self._best = loss
                return
            self._left -= 1
            if self._left == 0:
                self.stop("the held-out loss does not improve")

``train.callbacks=[patience]`` chooses it. A callback reads the facts of the run and the metrics of
its steps; it has no access to model, optimizer or data, so it cannot change a step by accident. It
may ask the run to stop, and add numbers to the metrics. Every rank calls every hook, in the same
order, with the same losses; times and memory are the rank's own. An exception ends the run, since a
callback that stops a run must not vanish silently.

A callback with ``state_dict`` and ``load_state_dict`` continues after a resume. The state is a dict
of finite JSON values; that of rank 0 is saved, and every rank loads it.
"""

import json
import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fsdptoys.errors import ConfigError
from fsdptoys.metrics.step import ADDED_PREFIX, StepMetrics
from fsdptoys.register import registered
from fsdptoys.utils.bounds import check_bounds
from fsdptoys.utils.foreign import parse_json

if TYPE_CHECKING:
    from fsdptoys.config.schema import Config

LONGEST_STATE = 2**20
"""Characters of a callback's state as JSON."""
MOST_NUMBERS = 100
"""Numbers that callbacks may add to a step."""


@dataclass(frozen=True)
class StartFacts:
    """What a callback knows about its run."""

    rank: int
    world_size: int
    device_type: str
    """cpu, cuda or npu."""
    steps: int
    """Planned steps of the run."""
    first_step: int
    """The first step that this start takes, from 1; above 1 after a resume."""
    run_dir: Path
    """Only rank 0 should write there."""
    config_tree: Mapping[str, Any]
    """All settings as plain values, as in ``config.yaml``; a copy."""


class Callback:
    """Hooks of a run. Override those that you need."""

    stop_reason: str | None = None
    """Set by ``stop``."""

    def stop(self, reason: str) -> None:
        """Ask the run to stop after the next step, in which all ranks agree on it.

        Args:
            reason: completes "15 of 20 steps; …".
        """
        self.stop_reason = self.stop_reason or reason

    def on_start(self, facts: StartFacts) -> None:
        """Called before the first step of each start, after ``load_state_dict``."""

    def after_step(self, metrics: StepMetrics) -> Mapping[str, float] | None:
        """Called with the metrics of each step when they are read: on an accelerator up to
        ``metrics.log_every`` steps later, in order.

        Returns:
            Numbers to add to the step's metrics, as ``callbacks.NAME.KEY``; None for none.
        """
        return None

    def after_evaluation(self, step: int, loss: float) -> None:
        """Called after an evaluation and the metrics of its step.

        Args:
            step: after which the evaluation was made.
            loss: mean cross entropy on the held-out part, the same on all ranks.
        """

    def before_checkpoint(self, step: int) -> None:
        """Called before a checkpoint of the state after a step."""

    def on_end(self, reason: str) -> None:
        """Called when a run that ends in order has saved its results; ``reason`` says why it
        ends."""


@dataclass
class CallbackConfig(ABC):
    """Settings of a callback, ``callbacks.NAME.KEY``."""

    name: ClassVar[str]
    """The word in ``train.callbacks``."""

    def __post_init__(self) -> None:
        check_bounds(f"callbacks.{self.name}", self)

    @abstractmethod
    def build(self) -> Callback:
        """Construct the callback; each rank has its own."""


def chosen_callbacks(config: "Config") -> dict[str, CallbackConfig]:
    """Return the callbacks of a run in order, with their settings or their defaults."""
    classes = registered("callbacks")
    return {
        name: config.callbacks.get(name) or classes[name]()
        for name in config.train.callbacks
    }


class Callbacks:
    """The callbacks of a run, in the order of ``train.callbacks``.

    Args:
        configs: name → settings.
    """

    def __init__(self, configs: Mapping[str, CallbackConfig]) -> None:
        self._by_name: dict[str, Callback] = {}
        for name, config in configs.items():
            with _explained(name, "build"):
                self._by_name[name] = config.build()

    def start(self, facts: Callable[[], StartFacts]) -> None:
        """Call ``on_start``; the facts are only made if there is a callback."""
        for name, callback in self._by_name.items():
            with _explained(name, "on_start"):
                callback.on_start(facts())

    def after_step(self, metrics: StepMetrics) -> dict[str, float]:
        """Call ``after_step``, and ``after_evaluation`` if the step has one.

        Returns:
            Key → number that a callback adds.
        """
        added: dict[str, float] = {}
        for name, callback in self._by_name.items():
            with _explained(name, "after_step"):
                added |= _read_numbers(callback.after_step(metrics), name)
            if metrics.eval_loss is not None:
                with _explained(name, "after_evaluation"):
                    callback.after_evaluation(metrics.step, metrics.eval_loss)
        if len(added) > MOST_NUMBERS:
            raise ConfigError(
                f"train.callbacks=[{','.join(self._by_name)}] add {len(added)} numbers to a step; "
                f"add at most {MOST_NUMBERS}"
            )
        return added

    def before_checkpoint(self, step: int) -> None:
        """Call ``before_checkpoint``."""
        for name, callback in self._by_name.items():
            with _explained(name, "before_checkpoint"):
                callback.before_checkpoint(step)

    def end(self, reason: str) -> None:
        """Call ``on_end``."""
        for name, callback in self._by_name.items():
            with _explained(name, "on_end"):
                callback.on_end(reason)

    def votes(self) -> list[float]:
        """Return this rank's votes to stop, 1 or 0 for each callback."""
        return [
            float(callback.stop_reason is not None)
            for callback in self._by_name.values()
        ]

    def stop_reason(self, votes: Sequence[float]) -> str | None:
        """Return the reason of the first callback with a vote of any rank; None without one."""
        for (name, callback), ranks in zip(self._by_name.items(), votes, strict=True):
            if ranks:
                reason = callback.stop_reason or "asked on another rank"
                return f"callback {name}: {reason}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return name → state of each callback that has one."""
        states = {}
        for name, callback in self._by_name.items():
            get_state = getattr(callback, "state_dict", None)
            if get_state is None:
                continue
            with _explained(name, "state_dict"):
                states[name] = _to_json(get_state())
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> list[str]:
        """Give each callback its state; return sentences on states that no callback takes, and on
        callbacks that start anew."""
        notes = []
        for name, callback in self._by_name.items():
            load = getattr(callback, "load_state_dict", None)
            if load is None:
                continue
            if name not in states:
                notes.append(
                    f"the checkpoint has no state of the callback {name}, which starts anew"
                )
                continue
            with _explained(name, "load_state_dict"):
                load(states[name])
        unread = [name for name in states if name not in self._by_name]
        if unread:
            notes.append(
                f"the checkpoint has states of callbacks that the run does not have: "
                f"{', '.join(unread)}"
            )
        return notes


def _to_json(state: object) -> dict[str, Any]:
    """Return a state as it will be read from a checkpoint."""
    text = json.dumps(state, allow_nan=False)
    value = parse_json(text)
    if not isinstance(value, dict) or len(text) > LONGEST_STATE:
        raise ValueError(
            f"a state is a dict of at most {LONGEST_STATE} characters as JSON"
        )
    return value


def _read_numbers(numbers: object, name: str) -> dict[str, float]:
    if numbers is None:
        return {}
    if not isinstance(numbers, Mapping):
        raise TypeError(f"it returned {type(numbers).__name__}, not a dict of numbers")
    for key, value in numbers.items():
        is_name = isinstance(key, str) and key.isidentifier()
        if not (is_name and isinstance(value, (int, float))):
            raise TypeError(f"{key!r}: {value!r} is no name with a number")
    return {
        f"{ADDED_PREFIX}{name}.{key}": float(value) for key, value in numbers.items()
    }


@contextmanager
def _explained(name: str, hook: str) -> Iterator[None]:
    """Raise what a callback raises as a ConfigError in one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise ConfigError(
            f"the callback {name} failed in {hook} ({text}{_location(error)}); correct it, or "
            f"leave {name} out of train.callbacks"
        ) from error


def _location(error: Exception) -> str:
    """Where own code failed: the last line outside of this package."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(here):
            return f", {os.path.basename(frame.filename)} line {frame.lineno}"
    return ""
