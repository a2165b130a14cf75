"""Tables of runs. Each row is a test; rows on as many ranks share one group of processes."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from fsdptoys.parallel import ParallelConfig, SingleConfig
from fsdptoys.parallel.fsdp import TORCH
from tests.harness.coverage import without_coverage
from tests.harness.levels import by_level, extended
from tests.harness.outcomes import train_all
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config, supported

Run = tuple[int, Any]
"""Ranks, and what a function trains on them: a configuration, or a tuple with one."""
Pair = tuple[Run, Run]
"""A run, and the one that it is compared with."""
Train = Callable[[list[Any]], Any]
Pairs = dict[str, tuple[Any, Any]]
"""Row → its result, and the one that it is compared with."""


def levels(rows: Iterable[str], short: Collection[str]) -> list[Any]:
    """Return all rows as parameters; those not in ``short`` become extended tests."""
    rows = list(rows)
    unknown = supported(dict.fromkeys(short)).keys() - set(rows)
    assert not unknown or TORCH < (2, 8), unknown  # an older torch lacks more rows
    return by_level(rows, short)


def selected(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """Return the values of a parameter among the tests of the module that this session runs."""
    specs = [
        item.callspec
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return list(
        dict.fromkeys(
            spec.params[argument] for spec in specs if argument in spec.params
        )
    )


def train_runs(runs: Iterable[Run], train: Train = train_all) -> list[Any]:
    """Return the results of rank 0 in order; runs on as many ranks share a group, and equal runs
    train once."""
    runs = list(runs)
    unique = {(ranks, repr(config)): config for ranks, config in runs}
    results: dict[tuple[int, str], Any] = {}
    with without_coverage():
        for world_size in sorted({ranks for ranks, _ in runs}):
            group = {
                key: config for key, config in unique.items() if key[0] == world_size
            }
            group_results = run_ranks(world_size, train, list(group.values()))[0]
            results |= zip(group, group_results, strict=True)
    return [results[ranks, repr(config)] for ranks, config in runs]


@dataclass
class Row:
    """A run that is compared with one process."""

    parallel: ParallelConfig
    ranks: int = 2
    layout: dict[str, Any] = field(default_factory=dict)
    """Settings that the one process does not have."""
    options: dict[str, Any] = field(default_factory=dict)
    alone: dict[str, Any] | None = None
    """Settings of an ordinary process; None for one that runs the micro-batches of all ranks in
    turn."""

    def pair(self) -> Pair:
        """Return the run and that of one process."""
        simulated = self.ranks
        for axis in ("cp_size", "tp_size", "pp_size"):
            simulated //= self.layout.get(axis, 1)
        alone = self.alone
        if alone is None:
            # A simulated rank evaluates no batches of its own.
            alone = (
                {"eval_batches": n * simulated}
                if (n := self.options.get("eval_batches"))
                else {}
            )
        else:
            simulated = 1
        single = SingleConfig(
            simulated_ranks=simulated, param_dtype=self.parallel.param_dtype
        )
        config = make_config(
            self.parallel, self.ranks, **{**self.options, **self.layout}
        )
        return (self.ranks, config), (
            1,
            make_config(single, 1, **{**self.options, **alone}),
        )


def trained_rows(
    rows: Mapping[str, Row | Pair],
    train: Train = train_all,
    oracle: Train | None = None,
    argument: str = "row",
) -> Any:
    """Return a fixture: results of the selected rows, and of their oracles, which ``oracle`` may
    train otherwise."""

    @pytest.fixture(scope="module")
    def trained(request: pytest.FixtureRequest) -> Pairs:
        names = selected(request, argument)
        pairs = [
            row.pair() if isinstance(row := rows[name], Row) else row for name in names
        ]
        runs = [run for run, _ in pairs]
        oracles = [run for _, run in pairs]
        if oracle is None:
            results = train_runs(runs + oracles, train)
        else:
            results = train_runs(runs, train) + train_runs(oracles, oracle)
        return dict(
            zip(
                names,
                zip(results[: len(names)], results[len(names) :], strict=True),
                strict=True,
            )
        )

    return trained


def one_in(share: int, names: Iterable[str]) -> list[Any]:
    """Return all names as parameters; the short level runs one in ``share``."""
    return [
        extended(name) if index % share else name for index, name in enumerate(names)
    ]
