"""Search for the fastest combination of switches that fits in memory.

The planner predicts all combinations of strategy, mesh, checkpointing, offload and batch that pass
the configuration's checks; the fastest, those on the frontier and the smallest that do not fit are
then refined. Keys from the command line are fixed, and so are settings that change numerical
results, except the batch of a rank.

Batches are powers of two. They grow until memory exceeds the limit, or until doubling gives less
than ``TIE`` more tokens per second. A step's time is convex in the batch (sums of constants, linear
terms and maxima of them), so larger batches gain even less.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.device.profile import Hardware
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.models import ModelConfig

from .combinations import EVERYTHING, SENSIBLE, Combinations, Space
from .ranking import TIE, Candidate, frontier, rank
from .switches import (
    Changes,
    count_parameters,
    count_switches,
    fixed_keys,
    node_ranks_of,
    overrides_between,
    read,
    validate_switches,
    vary,
)

MOST_SEQUENCES = 2**14  # Largest batch of a rank
REFINED = 4  # Combinations of each kind to refine
ROUNDS = 3  # Number of refinements; each starts from the best of those before
SLOWEST = 0.5  # Share of the fastest speed below which the frontier is not refined

Predict = Callable[[Config, Hardware, int], Prediction]


@dataclass(frozen=True)
class SearchResult:
    """All predicted candidates."""

    hardware: Hardware
    world_size: int
    memory_bytes: float
    candidates: list[Candidate]
    over: list[Candidate]
    # Message of the configuration's checks → number of refused combinations
    refused: dict[str, int]

    @property
    def best(self) -> Candidate:
        """The fastest."""
        return self.candidates[0]

    def leading(self, count: int) -> list[Candidate]:
        """The first candidates, each combination in its best batch, without ties that need more
        memory and switches."""
        firsts: dict[tuple[str, ...], Candidate] = {}
        for one in self.candidates:
            combination = tuple(
                override
                for override in one.overrides
                if not override.startswith("train.batch_size=")
            )
            ties = [tie for tie in firsts.values() if tie.position == one.position]
            if not any(
                tie.reserved_bytes <= one.reserved_bytes
                and tie.switches <= one.switches
                for tie in ties
            ):
                firsts.setdefault(combination, one)
            if len(firsts) == count:
                break
        return list(firsts.values())


def search(
    base: Config,
    overrides: Sequence[str],
    hardware: Hardware,
    world_size: int,
    memory_bytes: float,
    predict: Predict,
    *,
    space: Space = EVERYTHING,
    host_memory_bytes: float | None = None,
) -> SearchResult:
    """Predict all combinations and rank those that fit.

    Args:
        base: as composed from ``overrides``, not validated.
        overrides: of the command line; their keys are fixed.
        memory_bytes: usable memory of a device; ``host_memory_bytes`` is a rank's share of host
            memory, if known.
        predict: predicts a validated configuration as ``fast_estimate`` does.

    Raises:
        ConfigError: if no combination is valid, none fits, or predictions take too long.
    """
    if not base.model.capabilities.fast_estimate:
        name = base.model.name or base.model.family
        raise ConfigError(
            f"a search makes hundreds of predictions, and each of model={name} is a trace that "
            "takes seconds; compare single settings with fsdptoys plan"
        )
    if hardware.device_type == "cpu":  # host memory is where everything is already
        space = dataclasses.replace(
            space, activation_offload=False, optimizer_offload=False, cpu_offload=False
        )
    exploration = _Exploration(
        base, overrides, hardware, world_size, memory_bytes, host_memory_bytes, predict
    )
    exploration.explore(space)
    if not exploration.fitting:
        raise exploration.why_nothing()
    ranked = rank(exploration.fitting)
    refused = dict(exploration.refused.most_common())
    return SearchResult(
        hardware, world_size, memory_bytes, ranked, exploration.over, refused
    )


def largest_preset(
    presets: Sequence[ModelConfig],
    base: Config,
    overrides: Sequence[str],
    hardware: Hardware,
    world_size: int,
    memory_bytes: float,
    predict: Predict,
) -> Candidate:
    """Fastest candidate of the largest preset that fits; arguments and errors as in :func:`search`.

    ``train.seq_len`` is lowered to a preset's maximum.
    """
    failure: ConfigError | None = None
    for preset in sorted(presets, key=count_parameters, reverse=True):
        more = [f"model={preset.name}"]
        train = base.train
        if train.seq_len > preset.max_seq_len:
            more.append(f"train.seq_len={preset.max_seq_len}")
            train = dataclasses.replace(train, seq_len=preset.max_seq_len)
        config = dataclasses.replace(base, model=preset, train=train)
        others = [
            *(
                override
                for override in overrides
                if not override.startswith(("model=", "train.seq_len="))
            ),
            *more,
        ]
        try:
            return search(
                config,
                others,
                hardware,
                world_size,
                memory_bytes,
                predict,
                space=SENSIBLE,
            ).best
        except ConfigError as error:
            failure = error
    assert failure is not None, "there are no presets"
    raise failure


@dataclass
class _Exploration:
    """Predicts combinations and sorts them by whether they fit."""

    base: Config
    overrides: Sequence[str]
    hardware: Hardware
    world_size: int
    memory_bytes: float
    host_memory_bytes: float | None
    quick: Predict

    def __post_init__(self) -> None:
        # A run takes none of the planner's overrides except a custom profile.
        profile = re.compile(r"plan\.hardware=.*\.ya?ml$")
        self.run_overrides = tuple(
            override
            for override in self.overrides
            if not override.startswith("plan.") or profile.match(override)
        )
        self.fixed = fixed_keys(self.overrides)
        self.node_ranks = node_ranks_of(self.base, self.hardware, self.world_size)
        self.fitting: list[Candidate] = []
        self.over: list[Candidate] = []
        self.refused: Counter[str] = Counter()
        self.tried: dict[frozenset[tuple[str, Any]], Candidate | None] = {}
        self.plain = {
            key: read(self.base, key)
            for key in ("parallel.wrap", "parallel.reshard_after_forward")
        }

    def explore(self, space: Space) -> None:
        """Predict every combination in every batch that fits, then the neighbors of the best."""
        devices = round(self.hardware.devices_per_node.value)
        combinations = Combinations(
            self.base, self.fixed, space, self.world_size, devices, self.memory_bytes
        )
        hopeless = []
        for changes in combinations.all():
            if self._overflows(changes):
                hopeless.append(changes)
            else:
                self._grow_batch(changes, 1)
        # Hopeless ones still name the smallest memory.
        for changes in hopeless if not self.fitting else ():
            self._grow_batch(changes, 1)
        for _ in range(ROUNDS):
            by_speed = sorted(
                self.fitting, key=lambda candidate: -candidate.tokens_per_second
            )
            fastest = by_speed[0].tokens_per_second if by_speed else 0.0
            by_size = sorted(self.over, key=lambda candidate: candidate.reserved_bytes)
            promising = [one for one in by_size if one.tokens_per_second > fastest]
            # A limit near the smallest memory makes those that are slow here the fastest.
            useful = [
                one
                for one in frontier(self.fitting)
                if one.tokens_per_second >= SLOWEST * fastest
            ]
            for seeds, faster in (
                (by_speed, True),
                (useful, False),
                (promising, False),
            ):
                for seed in _different(seeds):
                    batch = seed.config.train.batch_size
                    for changes in combinations.neighbors(seed.changes, batch, faster):
                        self._grow_batch(changes, batch)

    def _overflows(self, changes: Changes) -> bool:
        """Whether parameters, gradients and states alone take too much, which no offload of
        activations changes."""
        if not changes.get("memory.activation_offload"):
            return False
        batch = self.base.train.batch_size if "train.batch_size" in self.fixed else 1
        plain = self.tried.get(
            self._key({**changes, "memory.activation_offload": False}, batch)
        )
        return (
            plain is not None and plain.prediction.memory.end_bytes > self.memory_bytes
        )

    def _key(self, changes: Changes, batch: int) -> frozenset[tuple[str, Any]]:
        return frozenset({**self.plain, **changes, "train.batch_size": batch}.items())

    def _grow_batch(self, changes: Changes, start: int) -> None:
        """Predict a combination in the largest fitting batch from ``start`` down, and in larger
        ones."""
        if "train.batch_size" in self.fixed:
            self._try(changes, self.base.train.batch_size)
            return
        batch = start
        candidate = self._try(changes, start)
        while (
            batch > 1 and candidate is not None and not self.fits(candidate.prediction)
        ):
            batch //= 2
            candidate = self._try(changes, batch)
        while (
            candidate is not None
            and self.fits(candidate.prediction)
            and batch < MOST_SEQUENCES
        ):
            before, batch = candidate, 2 * batch
            candidate = self._try(changes, batch)
            if (
                candidate is not None
                and candidate.tokens_per_second < (1 + TIE) * before.tokens_per_second
            ):
                break

    def _try(self, changes: Changes, batch: int) -> Candidate | None:
        """Predict a combination unless done, and sort it; None if it is refused."""
        key = self._key(changes, batch)
        if key not in self.tried:
            self.tried[key] = None
            try:
                candidate = self._candidate(changes, batch)
            except ConfigError as refusal:
                self.refused[str(refusal)] += 1
            else:
                self.tried[key] = candidate
                (self.fitting if self.fits(candidate.prediction) else self.over).append(
                    candidate
                )
        return self.tried[key]

    def _candidate(self, changes: Changes, batch: int) -> Candidate:
        varied = vary(self.base, {**changes, "train.batch_size": batch}, self.fixed)
        overrides = (*self.run_overrides, *overrides_between(self.base, varied))
        validate_switches(
            varied, self.world_size, self.hardware.device_type, self.node_ranks
        )
        prediction = self.quick(varied, self.hardware, self.world_size)
        return Candidate(overrides, varied, prediction, count_switches(varied), changes)

    def fits(self, prediction: Prediction) -> bool:
        """Whether device memory, and host memory if known, suffice."""
        memory = prediction.memory
        host = self.host_memory_bytes
        return memory.reserved_bytes <= self.memory_bytes and (
            host is None or memory.host_bytes <= host
        )

    def why_nothing(self) -> ConfigError:
        if not self.over:
            return ConfigError(self.refused.most_common(1)[0][0])
        least = min(self.over, key=lambda candidate: candidate.reserved_bytes)
        if least.reserved_bytes <= self.memory_bytes:  # so host memory is the limit
            return ConfigError(
                f"plan.world_size={self.world_size} leaves each rank too little host memory for "
                "every combination; set memory.cpu_offload=false and "
                "memory.optimizer_offload=false, or more ranks"
            )
        ranks = self._enough_ranks(least)
        return ConfigError(
            f"plan.memory_gib={self.memory_bytes / GIB:.4g} holds no combination on "
            f"{self.world_size} rank{'s' * (self.world_size != 1)}: the smallest takes "
            f"{least.reserved_bytes / GIB:.2f} GiB with "
            f"{' '.join(least.overrides[len(self.run_overrides) :]) or 'no change'}; set "
            f"{f'plan.world_size={ranks} or ' if ranks else ''}"
            f"plan.memory_gib={-(-least.reserved_bytes // GIB)}"
        )

    def _enough_ranks(self, least: Candidate) -> int | None:
        """Number of ranks at which the smallest combination fits, if a few doublings suffice."""
        changes: dict[str, Any] = {"mesh.fsdp_size": -1}
        if least.config.parallel.capabilities.single_process:
            changes["parallel"] = "fsdp2"
        if self.fixed.isdisjoint(changes):
            with suppress(ConfigError):
                for ranks in (
                    self.world_size << doublings for doublings in range(1, 7)
                ):
                    more = vary(least.config, changes, self.fixed)
                    validate_switches(more, ranks, self.hardware.device_type)
                    if self.fits(self.quick(more, self.hardware, ranks)):
                        return ranks
        return None


def _different(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first few combinations, ignoring their batch."""
    firsts: dict[frozenset[tuple[str, Any]], Candidate] = {}
    for candidate in candidates:
        firsts.setdefault(frozenset(candidate.changes.items()), candidate)
    return list(firsts.values())[:REFINED]
