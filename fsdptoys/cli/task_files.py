"""Task files of lm-eval, read as data: nothing in them runs.

lm-eval's own reader would import the functions that ``!function`` names, fill templates that can
reach Python's objects, and download data sets and metrics. So files are read here, what would run
code or use the network is refused by name, and lm-eval gets plain values.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import MAX_YAML_BYTES, ForeignError, parse_yaml
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import near_miss, one_line

BUILDERS = ("json", "csv", "text", "parquet", "arrow")
"""Data sets that are files without code."""
CODE_KEYS = ("class", "custom_dataset", "unsafe_code", "use_prompt")
"""Keys that name code, or run the code that a model writes."""
MOST_INCLUDES = 10
ALLOW_CODE = "--allow-task-code"
ALLOW_DOWNLOADS = "--allow-downloads"


def read_tasks(
    names: Sequence[str], folder: str, *, downloads: bool
) -> list[dict[str, Any]]:
    """Read ``NAME.yaml`` of a folder for each task.

    Args:
        names: of tasks.
        folder: with the files.
        downloads: whether data sets and metrics may be downloaded.

    Raises:
        ConfigError: for a missing or invalid file, or one that would run code.
    """
    root = Path(folder).expanduser()
    return [_read_task(name, root, downloads=downloads) for name in names]


def task_path(name: str, root: Path) -> Path:
    """Return the file of a task; ConfigError if there is none."""
    paths = [root / f"{name}{suffix}" for suffix in (".yaml", ".yml")]
    existing_files = [path for path in paths if path.is_file()]
    if existing_files and "/" not in name:
        return existing_files[0]
    others = sorted(path.stem for path in root.glob("*.y*ml")) if root.is_dir() else []
    near = near_miss(name, others)
    fix = (
        f"did you mean {near}?"
        if near
        else f"name one of {', '.join(others[:10])}"
        if others
        else "name the folder with the task files"
    )
    raise ConfigError(f"--tasks {name} has no file {paths[0]}; {fix}")


def _read_task(name: str, root: Path, *, downloads: bool) -> dict[str, Any]:
    path = task_path(name, root)
    task = _read_file(path, MOST_INCLUDES)
    where = f"the task file {path}"
    if not isinstance(task.get("task", name), str) or "group" in task:
        raise ConfigError(f"{where} is a group of tasks; name its tasks in --tasks")
    for key in CODE_KEYS:
        if task.get(key):
            raise ConfigError(
                f"{where} has {key}, which runs code, and no file that is read may; leave it out "
                f"of the file, or add {ALLOW_CODE} if you trust it"
            )
    task = {"task": name, **task}
    if not downloads:
        task["dataset_kwargs"] = _local_data(task, where, path.parent)
        _check_metrics(task, where)
    return task


def _read_file(path: Path, includes: int) -> dict[str, Any]:
    """Read a task file with those that it includes, whose values it replaces."""
    where = f"the task file {path}"
    try:
        text = read_regular(path, MAX_YAML_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where} cannot be read ({one_line(error)}); name another"
        ) from error
    if b"!function" in text:
        raise ConfigError(
            f"{where} has !function, which runs code, and no file that is read may; add "
            f"{ALLOW_CODE} if you trust it and the modules beside it"
        )
    try:
        tree = parse_yaml(text)
    except ForeignError as error:
        raise ConfigError(
            f"{where} cannot be read ({one_line(error)}); correct it"
        ) from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"{where} holds no settings of a task; name another")
    include = tree.pop("include", None)
    if include is None:
        return tree
    if not isinstance(include, str) or Path(include).name != include or not includes:
        raise ConfigError(
            f"{where} includes {str(include)[:100]}, which is no file beside it; copy the file "
            "there"
        )
    return _read_file(path.parent / include, includes - 1) | tree


def _local_data(task: Mapping[str, Any], where: str, folder: Path) -> dict[str, Any]:
    """Return the ``dataset_kwargs`` of a task with paths that exist here."""
    builder = task.get("dataset_path")
    settings = task.get("dataset_kwargs") or {}
    files = settings.get("data_files") if isinstance(settings, dict) else None
    if builder not in BUILDERS or not files or set(settings) - {"data_files", "field"}:
        raise ConfigError(
            f"{where} takes its data from dataset_path={builder}, which may be downloaded; set "
            f"dataset_path to one of {', '.join(BUILDERS)} with dataset_kwargs.data_files, or add "
            f"{ALLOW_DOWNLOADS}"
        )
    return {**settings, "data_files": _local_files(files, where, folder)}


def _local_files(files: Any, where: str, folder: Path) -> Any:
    if isinstance(files, dict):
        return {key: _local_files(value, where, folder) for key, value in files.items()}
    if isinstance(files, list):
        return [_local_files(value, where, folder) for value in files]
    path = folder / str(files)
    if not path.is_file():
        raise ConfigError(
            f"{where} names the data file {str(files)[:200]}, which is not in {folder}; put it "
            f"there, or add {ALLOW_DOWNLOADS}"
        )
    return str(path.resolve())


def _check_metrics(task: Mapping[str, Any], where: str) -> None:
    """Refuse metrics that lm-eval does not have itself, since it would download their code."""
    from lm_eval.api.registry import metric_registry

    importlib.import_module("lm_eval.api.metrics")  # fills the registry

    for metric in task.get("metric_list") or ():
        name = metric.get("metric") if isinstance(metric, dict) else metric
        foreign = isinstance(metric, dict) and metric.get("hf_evaluate")
        if not isinstance(name, str) or foreign or name not in metric_registry:
            raise ConfigError(
                f"{where} has the metric {str(name)[:100]}, which lm-eval does not have and would "
                f"download as code; use another, or add {ALLOW_DOWNLOADS}"
            )
