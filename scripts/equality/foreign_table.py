"""Measure families of transformers under each layout, and write the table of ``docs/models.md``.

    python scripts/equality/foreign_table.py [--columns NAME,...] [FAMILY ...]

A cell is the largest relative difference of losses and gradient norms over five steps to a plain
loop over transformers' own classes in one process (``tests/harness/foreign_runs.py``), or the
reason of a refusal. Cells that are not measured anew keep their text.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import TransformersConfig
from fsdptoys.parallel import STRATEGIES, SingleConfig
from tests.harness.foreign_families import SETTINGS
from tests.harness.foreign_runs import (
    Curve,
    curves,
    foreign_config,
    plain_curves,
    tiny_model,
)
from tests.harness.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
START = "<!-- families of transformers: python scripts/equality/foreign_table.py -->\n"
END = "<!-- end of families of transformers -->\n"
BOUND = 1e-5
MISSING = "–"


@dataclass(frozen=True)
class Column:
    """A layout."""

    parallel: str
    ranks: int
    memory: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, model: TransformersConfig) -> Config:
        """The run of a model."""
        parallel = (
            SingleConfig(simulated_ranks=2)
            if self.parallel == "single"
            else STRATEGIES[self.parallel]()
        )
        memory = MemoryConfig(**self.memory)
        return foreign_config(model, parallel, self.ranks, memory, **self.options)


COLUMNS: dict[str, Column] = {
    "single": Column("single", 1),
    "ddp": Column("ddp", 2),
    "fsdp1": Column("fsdp1", 2),
    "fsdp2": Column("fsdp2", 2),
    "hsdp": Column("fsdp2", 4, options={"fsdp_size": 2}),
    "checkpointing": Column(
        "fsdp2", 2, {"gradient_checkpointing": GradientCheckpointing.full}
    ),
    "chunked loss": Column("fsdp2", 2, {"chunk_loss": True, "chunk_tokens": "8"}),
    "compile": Column("fsdp2", 2, options={"compile": True}),
}
"""Heading → layout. ``hsdp`` runs four ranks, and is compared with one process of four."""


def measure(family: str, names: list[str]) -> dict[str, str]:
    """Cells of a family."""
    cells: dict[str, str] = {}
    configs: dict[str, Config] = {}
    model = tiny_model(family)
    for name in names:
        try:
            configs[name] = COLUMNS[name].config(model)
        except ConfigError as refusal:
            cells[name] = f"refused: {_reason(str(refusal))}"
    expected = _plain(model, {COLUMNS[name].ranks for name in configs})
    for ranks in sorted({COLUMNS[name].ranks for name in configs}):
        group = [name for name in configs if COLUMNS[name].ranks == ranks]
        results = _run(ranks, curves, [configs[name] for name in group])
        for name, result in zip(group, results, strict=True):
            cells[name] = _cell(result, expected[max(2, ranks)])
    return cells


def _plain(model: TransformersConfig, ranks: set[int]) -> dict[int, Curve | str]:
    batches = sorted({max(2, count) for count in ranks})
    configs = [
        foreign_config(model, SingleConfig(simulated_ranks=count), 1)
        for count in batches
    ]
    return dict(zip(batches, _run(1, plain_curves, configs), strict=True))


def _run(ranks: int, train: Callable[..., Any], configs: list[Config]) -> list[Any]:
    try:
        results: list[Any] = run_ranks(ranks, train, configs)[0]
    except RuntimeError as error:
        return [str(error).splitlines()[-1]] * len(configs)
    return results


def _cell(result: Curve | str, expected: Curve | str) -> str:
    if isinstance(result, str) or isinstance(expected, str):
        return f"failed: {result if isinstance(result, str) else expected}"[:80]
    error = result.error(expected)
    return f"{error:.0e}" if error < BOUND else f"**{error:.0e}**"


def _reason(sentence: str) -> str:
    if "waits for the gradient" in sentence:
        return "parameters without gradients"
    if "has none" in sentence:
        return "no initial values without `init_from`"
    return sentence.partition(";")[0]


def read_table(text: str) -> dict[str, dict[str, str]]:
    """Family → heading → cell, of the table in the page."""
    part = text.partition(START)[2].partition(END)[0]
    lines = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in part.splitlines()
        if line.startswith("|")
    ]
    if not lines:
        return {}
    headings = lines[0]
    return {
        row[0].strip("`"): dict(zip(headings[1:], row[1:], strict=True))
        for row in lines[2:]
    }


def write_table(cells: Mapping[str, Mapping[str, str]]) -> None:
    """Replace the table of the page; columns that this script does not measure stay."""
    headings = list(
        dict.fromkeys([*COLUMNS, *(name for row in cells.values() for name in row)])
    )
    lines = [
        f"| family | {' | '.join(headings)} |",
        f"|---|{'---|' * len(headings)}",
    ]
    for family in SETTINGS:
        row = cells.get(family, {})
        texts = [row.get(name, MISSING) for name in headings]
        lines.append(f"| `{family}` | {' | '.join(texts)} |")
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.escape(START) + ".*" + re.escape(END)
    table = START + "\n".join(lines) + "\n" + END
    PAGE.write_text(
        re.sub(pattern, lambda _: table, text, flags=re.DOTALL), encoding="utf-8"
    )


def main() -> None:
    """Measure families, and write each one's cells as soon as they are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(SETTINGS))
    parser.add_argument("--columns", default=",".join(COLUMNS))
    options = parser.parse_args()
    for family in options.families:
        measured = measure(family, options.columns.split(","))
        cells = read_table(PAGE.read_text(encoding="utf-8"))
        cells[family] = {**cells.get(family, {}), **measured}
        write_table(cells)
        print(family, measured, flush=True)


if __name__ == "__main__":
    main()
