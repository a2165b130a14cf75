"""Mix samples of several sources in fixed proportions; the order is a function of the seed and the
position.

Weights become whole numbers of positions in a block: weights 3 and 1 make blocks of four samples,
other shares are rounded to 1/10,000. Every block has exactly these counts, spread evenly, and
starts at its own rotation of the pattern, so that no rank always meets the same source. Each source
goes through its own epochs. Held-out parts are read in the same proportions, in a fixed order,
until the first of them ends.
"""

import bisect
import math
from collections.abc import Sequence

import numpy as np

from fsdptoys.errors import ConfigError

from .dataset import Samples, Tokens
from .permutation import EndlessShuffle, Shuffle

BLOCK = 10_000  # largest block
ENDLESS = 2**62  # more samples than any run takes


class Pattern:
    """Order of the sources in a block, spread evenly by their weights, all above 0."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = _places(weights)  # positions of each source in a block
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        # The best place for the j-th of n positions of a source is (j + 1/2) / n of the block.
        best = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        order = np.argsort(best, kind="stable")
        self.owners: list[int] = owners[order].tolist()
        self.ranks: list[int] = np.concatenate([np.arange(count) for count in self.counts])[
            order
        ].tolist()
        """Of each position: the number of earlier ones of the same source."""

        self.spots: list[list[int]] = [[] for _ in self.counts]  # positions of each source
        for spot, owner in enumerate(self.owners):
            self.spots[owner].append(spot)

    def __len__(self) -> int:
        return len(self.owners)

    def rotated(self, first: int, place: int) -> tuple[int, int]:
        """Source of a place in a block rotated to start at ``first``, and the number of its own
        earlier places."""
        spot = (first + place) % len(self)
        owner = self.owners[spot]
        skipped = bisect.bisect_left(self.spots[owner], first)
        return owner, (self.ranks[spot] - skipped) % self.counts[owner]


class MixedSamples:
    """Endless samples of several sources, at least one each, with weights above 0; the seed decides
    the order."""

    endless = True

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float], seed: int) -> None:
        self.sources = sources
        self.pattern = Pattern(weights)
        self._seed = seed
        self._block = -1
        self._first = 0
        self._own = [
            EndlessShuffle(len(source), "source", seed, number)
            for number, source in enumerate(sources)
        ]

    def __len__(self) -> int:
        return ENDLESS

    def locate(self, place: int) -> tuple[int, int]:
        """Source of a place, and the number of its sample there."""
        block, place = divmod(place, len(self.pattern))
        if block != self._block:
            self._first, self._block = (
                Shuffle(len(self.pattern), "mixture", self._seed, block)[0],
                block,
            )
        owner, rank = self.pattern.rotated(self._first, place)
        return owner, self._own[owner][block * self.pattern.counts[owner] + rank]

    def __getitem__(self, index: int) -> tuple[Tokens, Tokens]:
        owner, sample = self.locate(index)
        return self.sources[owner][sample]


class MixedHeldOut:
    """Held-out samples of several sources, at least one each, with weights above 0, up to the end
    of the first."""

    endless = False

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float]) -> None:
        self.sources = sources
        self.pattern = Pattern(weights)
        ends = []
        for source, own in zip(sources, self.pattern.spots, strict=True):
            blocks, more = divmod(len(source), len(own))
            ends.append(blocks * len(self.pattern) + own[more])
        self.length = min(ends)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tokens, Tokens]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        block, spot = divmod(index, len(self.pattern))
        owner, rank = self.pattern.rotated(0, spot)
        return self.sources[owner][block * self.pattern.counts[owner] + rank]


def _places(weights: Sequence[float]) -> list[int]:
    """Positions of each source in the smallest block with the proportions, to within half a
    position in ``BLOCK``."""
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    exact = (
        size
        for size in range(1, BLOCK + 1)
        if all(abs(share * size - round(share * size)) < 1e-9 * size for share in shares)
    )
    for size in (next(exact, BLOCK), BLOCK):
        # Integers that add up to ``size``, by the largest remainder.
        counts = [math.floor(share * size + 1e-9 * size) for share in shares]
        excess = [count - share * size for count, share in zip(counts, shares, strict=True)]
        for number in sorted(range(len(shares)), key=excess.__getitem__)[: size - sum(counts)]:
            counts[number] += 1
        if all(counts):
            return counts
    smallest = min(range(len(shares)), key=shares.__getitem__)
    raise ConfigError(
        f"data.weights gives source {smallest + 1} a share of {shares[smallest]:.2g}, less than "
        f"one sample in {BLOCK}; give it more, or leave it out"
    )
