"""``fsdptoys report`` and ``fsdptoys compare``: show and compare the results of runs and sweeps.

fsdptoys report sweeps/20261122-101500-debug
fsdptoys report runs/a runs/b --markdown
fsdptoys report --live runs/a
fsdptoys compare runs/a runs/b --tolerance 1e-6
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import counted, encodable, one_line, print_status

from .commands import check_count, parse

PAGE = "report.html"

WIDEST = 10_000
"""Line width when stdout is not a terminal."""


def report_command(argv: Sequence[str]) -> int:
    """Run ``fsdptoys report``; return the exit status."""
    options = parse("report", argv)
    paths = options.arguments
    form = options.form
    _check_names(paths)
    if not paths:
        raise ConfigError(
            "fsdptoys report needs a run or a sweep; write fsdptoys report runs/NAME"
        )
    if form and options.out is not None:
        raise ConfigError(
            f"--out names the page, and {form} prints to the terminal; leave one of them out, or "
            f"write fsdptoys report {paths[0]} {form} > FILE"
        )
    if form == "--live":
        check_count("report --live", paths, 1, "one run", "runs/NAME")
        from fsdptoys.report.live import follow

        return follow(Path(paths[0]), Console())
    # in the reported folder, or in the current one
    page = Path(paths[0] if len(paths) == 1 else "", PAGE)
    if options.out is not None:
        page = Path(os.path.expanduser(options.out))
    if not form and (options.out is not None or page.absolute().parent.is_dir()):
        from fsdptoys.report.html_page import check_page

        check_page(page, "--out" if options.out is not None else "the page")
    from fsdptoys.report.runs_table import gather

    try:
        collection = gather([Path(path) for path in paths])
    except OSError as mistake:
        raise ConfigError(
            f"{one_line(mistake)}; check its name and permissions"
        ) from mistake
    if not form:
        from fsdptoys.report.html_page import write_page

        files = write_page(collection, page)
        pictures = sum(path.suffix == ".png" for path in files)
        beside = f", and {counted(pictures, 'picture')} next to it" if pictures else ""
        print_status(f"the report is in {page}{beside}")
        return 0
    from fsdptoys.report.table import make_table
    from fsdptoys.report.table_export import to_csv, to_json, to_markdown
    from fsdptoys.report.table_terminal import print_table

    table = make_table(collection)
    if form == "--table":
        print_table(table, _console())
    else:
        text = {"--markdown": to_markdown, "--csv": to_csv, "--json": to_json}[form](
            table
        )
        sys.stdout.write(encodable(text, sys.stdout))
    return 0


def compare_command(argv: Sequence[str]) -> int:
    """Run ``fsdptoys compare``; return 0 if the runs are the same, 1 if they differ or are
    incomplete."""
    options = parse("compare", argv)
    paths = options.arguments
    _check_names(paths)
    check_count("compare", paths, 2, "two runs", "RUN_A RUN_B")
    first, second = paths
    from fsdptoys.report.compare import compare_runs, open_run
    from fsdptoys.report.compare_text import print_comparison

    try:
        comparison = compare_runs(
            open_run(Path(first)), open_run(Path(second)), options.tolerance
        )
        print_comparison(comparison, (first, second), _console())
    except (ConfigError, BrokenPipeError):
        raise
    except Exception as mistake:
        # A traceback would exit with status 1, which means that the runs differ.
        reason = one_line(f"{type(mistake).__name__}: {mistake}")
        raise ConfigError(
            f"{first} and {second} cannot be compared ({reason}); check the files of both"
        ) from mistake
    return 0 if comparison.same else 1


def _check_names(paths: Sequence[str]) -> None:
    """Reject names that the system cannot look up; missing files are reported later."""
    for path in paths:
        try:
            Path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as mistake:
            raise ConfigError(
                f"{one_line(path)} cannot be read ({one_line(mistake)}); name a run"
            ) from mistake


def _console() -> Console:
    """Return a console as wide as the terminal or ``COLUMNS``; without either, lines are not
    wrapped."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console(width=shutil.get_terminal_size().columns)
    return Console(width=WIDEST, soft_wrap=True)
