"""Checks before a run starts: a usable run directory, and writers that can start."""

import os
from collections.abc import Mapping
from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import check_length
from fsdptoys.utils.file_lock import LOCK_FILE
from fsdptoys.utils.regular_file import NotRegularFileError, check_regular, kind_of

from .config import (
    PROFILE_FOLDER,
    RUN_FILES,
    RUN_FOLDERS,
    RUNS_FOLDER,
    MetricsConfig,
    run_dir_path,
)
from .registry import check_writers
from .writer import WriterConfig

OWN_FOLDERS = ("heartbeats", "flight_recorder", "weights")
"""Folders that must not be symbolic links, unlike those of checkpoints and profiles, since a run
writes files with fixed names into them."""

REMOVE_IT = "remove it, or set metrics.run_dir to another folder"


def check_run_dir(
    config: MetricsConfig,
    resumes: bool = False,
    options: Mapping[str, WriterConfig] = {},
) -> None:
    """Check that the run directory can be created or written, without creating it, and check the
    writers.

    ConfigError if it is a file or not writable, has links or pipes in place of a run's files or,
    unless the run ``resumes``, files that a run would overwrite; or if a writer's package or
    credentials are missing.
    """
    check_writers(config, os.environ, options)
    path = RUNS_FOLDER if config.run_dir is None else run_dir_path(config.run_dir)
    key = f"metrics.run_dir={'null' if config.run_dir is None else config.run_dir}"
    absolute = path.absolute()
    nearest = next(
        parent for parent in (path, *absolute.parents) if os.path.lexists(parent)
    )
    try:
        # With a missing parent, lstat does not report that the path is too long.
        check_length(key, absolute, nearest)
        os.lstat(absolute)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ConfigError(
            f"{key} cannot be used ({error.strerror}); set metrics.run_dir to another folder"
        ) from error
    if config.run_dir is not None:
        file_name = next(
            (name for name in RUN_FILES if os.path.lexists(path / name)), None
        )
        if file_name is not None and not resumes:
            raise ConfigError(already_holds(config.run_dir, file_name))
        check_files(path)
    if not nearest.is_dir():
        raise ConfigError(
            f"{key} needs a folder at {nearest}, which is not a folder; set "
            "metrics.run_dir=runs/NAME"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{key} needs write access to {nearest}; set metrics.run_dir to a folder that can be "
            "written"
        )


def check_files(path: Path) -> None:
    """Check that the files that a run reads, appends to or replaces are regular files, and
    ``profile`` a folder or a link to one; ConfigError for the first file of another type.

    The run directory may have another author: a named pipe would block the run forever, and a
    symbolic link would let the run write to any file of its user.
    """
    try:
        for name in (LOCK_FILE, *RUN_FILES):
            if name not in RUN_FOLDERS:
                check_regular(path / name)
            elif (
                name == PROFILE_FOLDER
                and (kind := kind_of(path / name))
                and not (path / name).is_dir()
            ):
                raise ConfigError(
                    f"{path / name} is {kind} and not a folder; {REMOVE_IT}"
                )
        for name in OWN_FOLDERS:
            if (path / name).is_symlink():
                raise ConfigError(
                    f"{path / name} is a symbolic link and not a folder of this run; {REMOVE_IT}"
                )
    except NotRegularFileError as error:
        raise ConfigError(f"{error.sentence}; {REMOVE_IT}") from error


def already_holds(run_dir: object, name: str) -> str:
    """Error message for a folder in which a run would overwrite a file."""
    return (
        f"metrics.run_dir={run_dir} already contains {name}, which a run would overwrite; set "
        "checkpoint.resume=auto to continue it, or metrics.run_dir to a new folder (null for one "
        "named by time and title)"
    )
