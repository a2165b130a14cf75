"""Programs that lose their standard streams."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

REASONS = {
    "full": "No space left on device",
    "broken": "Broken pipe",
    "closed": "it is closed",
}
"""Of the ways in which a stream can be lost."""


def run_with(
    stdout: str, stderr: str, argv: list[str], folder: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these streams: "fine", "full", "broken" (a pipe without reader) or
    "closed"."""
    closes = [
        redirection
        for how, redirection in ((stdout, ">&-"), (stderr, "2>&-"))
        if how == "closed"
    ]
    command = [
        "sh",
        "-c",
        f'exec "$@" {" ".join(closes)}',
        "sh",
        sys.executable,
        *argv,
    ]
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full:
        places = {
            "fine": subprocess.PIPE,
            "closed": subprocess.DEVNULL,
            "full": full,
            "broken": writer,
        }
        process = subprocess.run(
            command,
            stdout=places[stdout],
            stderr=places[stderr],
            text=True,
            cwd=folder,
            env=os.environ | environment,
            check=False,
        )
    os.close(writer)
    return process
