"""Mix samples of several sources in fixed proportions; the order is a function of the seed and the
position.

Weights become whole numbers of positions in a block: weights 3 and 1 make blocks of four samples,
other shares are rounded to 1/10,000. Every block has exactly these counts, spread evenly, and
starts at its own rotation of the pattern, so that no rank always meets the same source. Each source
goes through its own epochs. Held-out parts are read in the same proportions, in a fixed order,
until the first of them ends.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError

from .dataset import Samples, Tokens
from .permutation import EndlessShuffle, Shuffle

BLOCK = 10_000  # largest block
ENDLESS = 2**62  # more samples than any run takes


def spread(weights: Sequence[float]) -> NDArray[Any]:
    """The source of each position of a block, spread evenly by weights above 0."""
    counts = _places(weights)
    owners = np.repeat(np.arange(len(counts)), counts)
    # The best place for the j-th of n positions of a source is (j + 1/2) / n of the block.
    best = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return owners[np.argsort(best, kind="stable")]


class MixedSamples(Samples):
    """Endless samples of several sources, at least one each, with weights above 0; the seed decides
    the order."""

    endless = True

    def __init__(
        self, sources: Sequence[Samples], weights: Sequence[float], seed: int
    ) -> None:
        self.sources = sources
        self.owners = spread(weights)
        self.counts: list[int] = np.bincount(self.owners).tolist()
        self._seed = seed
        self._block = -1
        self._order = self.owners  # of the block
        self._own = [
            EndlessShuffle(len(source), "source", seed, number)
            for number, source in enumerate(sources)
        ]

    def __len__(self) -> int:
        return ENDLESS

    def locate(self, position: int) -> tuple[int, int]:
        """Source of a position, and the number of its sample there."""
        block, spot = divmod(position, len(self.owners))
        if block != self._block:
            first = Shuffle(len(self.owners), "mixture", self._seed, block)[0]
            self._order = np.roll(self.owners, -first)
            self._block = block
        owner, earlier = _owner_at(self._order, spot)
        return owner, self._own[owner][block * self.counts[owner] + earlier]

    def read(self, index: int) -> tuple[Tokens, Tokens]:
        """See ``Samples``."""
        owner, sample = self.locate(index)
        return self.sources[owner][sample]


class MixedHeldOut(Samples):
    """Held-out samples of several sources, at least one each, with weights above 0, up to the end
    of the first."""

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float]) -> None:
        self.sources = sources
        self.owners = spread(weights)
        self.counts: list[int] = np.bincount(self.owners).tolist()
        ends = []
        for number, source in enumerate(sources):
            blocks, more = divmod(len(source), self.counts[number])
            spots = np.flatnonzero(self.owners == number)
            ends.append(blocks * len(self.owners) + int(spots[more]))
        self.length = min(ends)

    def __len__(self) -> int:
        return self.length

    def read(self, index: int) -> tuple[Tokens, Tokens]:
        """See ``Samples``."""
        block, spot = divmod(index, len(self.owners))
        owner, earlier = _owner_at(self.owners, spot)
        return self.sources[owner][block * self.counts[owner] + earlier]


def _owner_at(owners: NDArray[Any], spot: int) -> tuple[int, int]:
    """The source of a position, and the number of its earlier positions."""
    owner = int(owners[spot])
    return owner, int(np.count_nonzero(owners[:spot] == owner))


def _places(weights: Sequence[float]) -> list[int]:
    """Positions of each source in the smallest block with the proportions, to within half a
    position in ``BLOCK``."""
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    exact = (
        size
        for size in range(1, BLOCK + 1)
        if all(
            abs(share * size - round(share * size)) < 1e-9 * size for share in shares
        )
    )
    for size in (next(exact, BLOCK), BLOCK):
        # Integers that add up to ``size``, by the largest remainder.
        counts = [math.floor(share * size + 1e-9 * size) for share in shares]
        excess = [
            count - share * size for count, share in zip(counts, shares, strict=True)
        ]
        for number in sorted(range(len(shares)), key=excess.__getitem__)[
            : size - sum(counts)
        ]:
            counts[number] += 1
        if all(counts):
            return counts
    smallest = min(range(len(shares)), key=shares.__getitem__)
    raise ConfigError(
        f"data.weights gives source {smallest + 1} a share of {shares[smallest]:.2g}, less than "
        f"one sample in {BLOCK}; give it more, or leave it out"
    )
