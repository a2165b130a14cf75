"""``fsdptoys verify``: train a model in a plain loop and under every layout, and compare.

fsdptoys verify qwen3_moe_debug
fsdptoys verify llama3_8b --rows fsdp2,tp,cp-ring --out verify.md
fsdptoys verify my_model --import ./my_model.py --ranks 8 --json
"""

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import check_output, write_atomically
from fsdptoys.utils.text import encodable, print_status

from .commands import parse

if TYPE_CHECKING:
    from fsdptoys.verify.verify import Report, Request

REFUSED = ("tune", "train.float8", "launch.nnodes", "launch.nproc_per_node")
"""Keys, or beginnings of keys, that the plain loop or the rows cannot have."""


def verify_command(argv: Sequence[str]) -> int:
    """Run ``fsdptoys verify``; return 1 if a row differs or fails."""
    # Ranks are forked from this process, in which torch must not have started threads.
    os.environ["OMP_NUM_THREADS"] = "1"
    options = parse("verify", argv)
    out = None if options.out is None else Path(os.path.expanduser(options.out))
    if out is not None:
        check_output(out, "--out", "verify.md", (".md", ".html", ".htm"))
    from fsdptoys.imports import import_options
    from fsdptoys.verify.text import print_report, to_html, to_json, to_markdown
    from fsdptoys.verify.verify import verify

    with tempfile.TemporaryDirectory() as scratch:
        request = read_request(
            options.arguments,
            options.rows,
            options.ranks,
            Path(scratch),
            full=options.full,
        )
        report: Report = verify(request)
    command = shlex.join(["fsdptoys", "verify", *import_options(), *argv])
    if options.json:
        print(to_json(report, command))
    else:
        print_report(report, Console())
    if out is not None:
        export = to_markdown if out.suffix.lower() == ".md" else to_html
        try:
            write_atomically(out, export(report, command))
        except OSError as problem:
            raise ConfigError(
                f"--out {out} cannot be written ({problem.strerror or problem}); write --out "
                "verify.md"
            ) from problem
        print_status(f"the page is in {encodable(str(out), sys.stderr)}")
    return report.status


def read_request(
    arguments: Sequence[str],
    rows: str,
    ranks: int | None,
    scratch: Path,
    *,
    full: bool,
) -> "Request":
    """Read the model, and settings for every row.

    Args:
        arguments: without dashes.
        rows: names of rows.
        ranks: most that a row may have; None for the usual number.
        scratch: empty folder that stays until the end.
        full: keep the model's size.

    Raises:
        ConfigError: naming key, value and fix.
    """
    from fsdptoys.device import available_device_type, device_count, missing_device
    from fsdptoys.verify.choose_model import choose_model
    from fsdptoys.verify.rows import MOST_RANKS, USUAL_RANKS, select_rows
    from fsdptoys.verify.verify import Request

    names = [word for word in arguments if "=" not in word]
    overrides = [word for word in arguments if "=" in word]
    if len(names) > 1:
        raise ConfigError(
            f"fsdptoys verify takes one model, not {' and '.join(names)}; run it for each"
        )
    for word in overrides:
        key = word.partition("=")[0].lstrip("+")
        if any(key == refused or key.startswith(f"{refused}.") for refused in REFUSED):
            raise ConfigError(
                f"{word} has no form in a plain loop on the ranks of fsdptoys verify; leave it out"
            )
    values = dict(word.partition("=")[::2] for word in overrides)
    device = values.get("launch.device", "cpu")
    if device == "auto":
        device = available_device_type()
    overrides = [word for word in overrides if not word.startswith("launch.device=")]
    if ranks is not None and ranks > MOST_RANKS:
        raise ConfigError(
            f"--ranks {ranks} is over {MOST_RANKS}, the most of a row; write --ranks {MOST_RANKS}"
        )
    if device != "cpu":
        if device_count(device) == 0:
            raise missing_device(device)
        ranks = min(ranks or MOST_RANKS, device_count(device))
    selection = select_rows(rows, ranks or USUAL_RANKS, overrides)
    model = choose_model(names, overrides, scratch, full=full)
    return Request(model.title, model.overrides, selection, device, model.notes)
