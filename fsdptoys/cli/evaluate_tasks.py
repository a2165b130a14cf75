"""``fsdptoys evaluate RUN --tasks``: tasks of the package lm-eval (EleutherAI's harness).

fsdptoys evaluate runs/mine --tasks my_task --tasks-dir tasks
fsdptoys evaluate DIR --tasks hellaswag,arc_easy --allow-downloads --limit 100

Contexts and continuations are tokenized by lm-eval's own rules, so results are comparable with
those of its other models. A text without context, as in perplexities, begins with the folder's end
of text; a tokenizer that has none, such as bytes, takes a line break in its place.
"""

import argparse
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdptoys.data.tokenizer import Tokenizer
from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.models.generate import Draw
from fsdptoys.train.continuations import Continuations
from fsdptoys.train.pretrained import TrainedModel
from fsdptoys.utils.atomic_write import check_output, write_atomically
from fsdptoys.utils.tables import align_columns
from fsdptoys.utils.text import one_line, print_status

from .task_files import ALLOW_CODE, ALLOW_DOWNLOADS, read_tasks, task_path

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

PACKAGE = "lm_eval"
DEFAULT_FILE = "tasks.json"
NEW_TOKENS = 256
"""Most tokens that a task without a limit generates; lm-eval's own default."""
GENERATION_KEYS = {
    *("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"),
}
"""Settings of generation that tasks may have."""
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")


def check_task_options(options: argparse.Namespace) -> None:
    """Refuse options that only tasks have, or do not have, and a missing package."""
    if options.tasks is None:
        for name in ("tasks_dir", "limit", "few_shot", "out"):
            if (value := getattr(options, name)) is not None:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{option} {value} is for tasks; add --tasks NAME, or leave it out"
                )
        for name in (ALLOW_CODE, ALLOW_DOWNLOADS):
            if getattr(options, name.removeprefix("--").replace("-", "_")):
                raise ConfigError(
                    f"{name} is for tasks; add --tasks NAME, or leave it out"
                )
        return
    for name in ("text", "windows"):
        if (value := getattr(options, name)) is not None:
            raise ConfigError(
                f"--{name} {value} is no part of --tasks {options.tasks}; leave out one of them"
            )
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"--tasks {options.tasks} needs the package lm-eval, which is not installed; run pip "
            "install -e '.[lm-eval]'"
        )


def evaluate_tasks(
    options: argparse.Namespace, source: str, device: Device, dtype: torch.dtype
) -> int:
    """Evaluate a model on tasks; print a table and write the results; return the exit status."""
    folder = Path(source).expanduser()
    default = folder / DEFAULT_FILE if folder.is_dir() else Path(DEFAULT_FILE)
    out = Path(options.out).expanduser() if options.out else default
    check_output(out, "--out", DEFAULT_FILE, [".json"])
    names = list(dict.fromkeys(filter(None, options.tasks.split(","))))
    if not names:
        raise ConfigError(f"--tasks {options.tasks!r} names none; write --tasks NAME")
    if options.tasks_dir is None and not options.allow_downloads:
        raise ConfigError(
            f"--tasks {options.tasks} are tasks of lm-eval itself, whose data is downloaded; add "
            f"{ALLOW_DOWNLOADS}, or --tasks-dir DIR with task files of your own"
        )
    if not options.allow_downloads:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))  # read at import
    tasks: list[Any] = names
    if options.tasks_dir is not None and options.allow_task_code:
        root = Path(options.tasks_dir).expanduser()
        tasks = [str(task_path(name, root)) for name in names]
    elif options.tasks_dir is not None:
        tasks = list(
            read_tasks(names, options.tasks_dir, downloads=options.allow_downloads)
        )
    trained = TrainedModel(source, say=print_status, adapter=options.adapter)
    context = trained.choose_context(options.context)
    tokenizer = trained.tokenizer(options.tokenizer)
    ends = trained.ends()
    model = trained.load(device, dtype)
    continuations = Continuations(model, context, device.torch_device)
    print_status(f"evaluating {', '.join(names)} with contexts of {context} tokens")
    results = _run(
        _make_lm(continuations, tokenizer, ends, options.batch),
        tasks,
        options,
        with_defaults=options.tasks_dir is None,
    )
    record = {
        "source": source,
        "context": context,
        "dtype": options.dtype,
        "few_shot": options.few_shot,
        "limit": options.limit,
        "lm_eval": version(PACKAGE),
        "tasks": results,
    }
    text = json.dumps(record, indent=2) + "\n"
    write_atomically(out, text)
    print(text if options.json else _table(results), end="")
    print_status(f"results written to {out}")
    return 0


def _run(
    model: Any, tasks: list[Any], options: argparse.Namespace, *, with_defaults: bool
) -> dict[str, dict[str, float]]:
    """Return task → measure → number."""
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    if not options.allow_task_code:
        _sandbox_templates()
    try:
        results = evaluator.simple_evaluate(
            model,
            tasks=tasks,
            num_fewshot=options.few_shot,
            limit=options.limit,
            task_manager=TaskManager(include_defaults=with_defaults),
            log_samples=False,
            bootstrap_iters=1000,
        )
    except ConfigError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(
            f"--tasks {options.tasks} cannot be evaluated ({type(error).__name__}: "
            f"{one_line(error)[:300]}); correct the task's file or name"
        ) from error
    except Exception as error:
        if not type(error).__module__.startswith(("jinja2", "datasets")):
            raise
        raise ConfigError(
            f"--tasks {options.tasks} cannot be evaluated ({type(error).__name__}: "
            f"{one_line(error)[:300]}); correct the task's file"
        ) from error
    assert results is not None
    return {
        str(task): {
            str(measure): float(value)
            for measure, value in measures.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for task, measures in results["results"].items()
    }


def _sandbox_templates() -> None:
    """Have lm-eval fill its templates in a sandbox, from which they reach no Python objects."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils

    sandbox = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    sandbox.filters.update(utils.env.filters)
    utils.env = sandbox


def _table(results: dict[str, dict[str, float]]) -> str:
    rows = [["task", "measure", "value", "standard error"]]
    for task, measures in results.items():
        for measure, value in measures.items():
            name, _, filter_name = measure.partition(",")
            if name.endswith("_stderr") or not filter_name:
                continue
            error = measures.get(f"{name}_stderr,{filter_name}")
            label = name if filter_name == "none" else f"{name} ({filter_name})"
            rows.append(
                [task, label, f"{value:.4f}", "" if error is None else f"{error:.4f}"]
            )
    return "\n".join(align_columns(rows, right=(2, 3))) + "\n"


def _make_lm(
    continuations: Continuations, tokenizer: Tokenizer, ends: frozenset[int], batch: int
) -> Any:
    """Return lm-eval's interface to a model; a function, since the package is optional."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class FSDPToysLM(TemplateLM):
        """A model of ours for lm-eval."""

        @property
        def eot_token_id(self) -> int:
            """The end of a text, or what takes its place."""
            return min(ends) if ends else tokenizer.encode("\n")[-1]

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            """Ids of a text."""
            return tokenizer.encode(string)

        def _loglikelihood_tokens(
            self, requests: Sequence[Any], **_: Any
        ) -> list[tuple[float, bool]]:
            pairs = []
            for _texts, before, continuation in requests:
                if len(continuation) > continuations.context:
                    raise ConfigError(
                        f"a continuation has {len(continuation)} tokens, and the model sees "
                        f"{continuations.context}; write a larger --context"
                    )
                pairs.append((before or [self.eot_token_id], continuation))
            return [
                (score.log_probability, score.is_greedy)
                for score in continuations.scores(pairs, batch)
            ]

        def loglikelihood_rolling(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[float]:
            """Log-probability of whole texts, each token predicted once."""
            totals = []
            for request in requests:
                windows = get_rolling_token_windows(
                    token_list=tokenizer.encode(request.args[0]),
                    prefix_token=self.eot_token_id,
                    max_seq_len=continuations.context,
                    context_len=1,
                )
                pairs = [make_disjoint_window(window) for window in windows]
                scores = continuations.scores(pairs, batch)
                totals.append(sum(score.log_probability for score in scores))
            return totals

        def generate_until(
            self, requests: list["Instance"], disable_tqdm: bool = False
        ) -> list[str]:
            """Texts up to the first of the strings that end them."""
            return [self._generate(*request.args) for request in requests]

        def _generate(self, text: str, settings: dict[str, Any]) -> str:
            draw, count, until = read_generation(settings)
            room = continuations.context - count
            if room < 1:
                raise ConfigError(
                    f"a task generates {count} tokens, and the model sees "
                    f"{continuations.context}; write a larger --context"
                )
            ids = tokenizer.encode(text)[-room:] or [self.eot_token_id]
            added = continuations.generate(
                ids, count, draw, ends, _has_any(tokenizer.decode, until)
            )
            answer = tokenizer.decode(added)
            for end in until:
                answer = answer.partition(end)[0]
            return answer

    return FSDPToysLM()


def _has_any(
    decode: Callable[[list[int]], str], texts: Sequence[str]
) -> Callable[[list[int]], bool]:
    """Return whether ids decode to a text that contains one of ``texts``."""

    def is_done(ids: list[int]) -> bool:
        text = decode(ids)
        return any(end in text for end in texts)

    return is_done


def read_generation(settings: dict[str, Any]) -> tuple[Draw, int, list[str]]:
    """Return sampling, most tokens and ends of a task's ``generation_kwargs``.

    Raises:
        ConfigError: for settings that would be ignored.
    """
    unknown = sorted(set(settings) - GENERATION_KEYS)
    if unknown:
        raise ConfigError(
            f"a task sets {', '.join(unknown)} for generation, which is not supported; leave it "
            "out of its generation_kwargs"
        )
    until = settings.get("until") or []
    temperature = float(settings.get("temperature") or 0.0)
    samples = settings.get("do_sample", temperature > 0)
    draw = Draw(temperature=0.0)
    if samples:
        draw = Draw(
            temperature or 1.0,
            settings.get("top_k"),
            float(settings.get("top_p") or 1.0),
        )
    count = int(settings.get("max_gen_toks") or NEW_TOKENS)
    return draw, count, [until] if isinstance(until, str) else list(until)
