"""A permutation of any number of places that is computed place by place, and so takes no memory.

It is a Feistel network over two digits, l in base a and r in base b, with a·b just over the number of places n: each
round adds a hash of one digit to the other, modulo its base, which can be undone, so the rounds are a permutation of
a·b numbers (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, method 3). Numbers from n to a·b, at
most about √n of them, are walked on from until one is below n, which leaves a permutation of n (cycle walking, method
2 there). The hash is the finalizer of MurmurHash3 on 64 bits with a key for each round, out of BLAKE2b of the words
that name the permutation: integers alone, so that the order is the same on every machine and for every version of a
library.

What the randomness is worth: eight rounds are enough that no test in ``tests/data/test_permutation.py`` tells it from a
random one (where a place goes, distances of neighbours, one epoch or seed against another). It is no cipher. It
reaches few of the n! orders: at most 2^512, as any that starts from a key does, and for a dozen places or less not all
of them equally often.
"""

import hashlib
import math

ORDER = "feistel-8"
"""Name of the order; a checkpoint of another must not go on in this one."""

ROUNDS = 8
WORD = 2**64 - 1


class Shuffle:
    """A pseudo-random permutation of ``range(count)``.

    Args:
        count: places, at least one.
        key: what the permutation is a function of.
    """

    def __init__(self, count: int, *key: object) -> None:
        assert count > 0
        self.count = count
        self._a = math.isqrt(count - 1) + 1
        self._b = -(-count // self._a)
        digest = hashlib.blake2b(repr((ORDER, count, *key)).encode(), digest_size=8 * ROUNDS).digest()
        words = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, len(digest), 8)]
        self._keys = list(zip(words[::2], words[1::2], strict=True))

    def __getitem__(self, place: int) -> int:
        assert 0 <= place < self.count
        a, b = self._a, self._b
        while True:
            left, right = divmod(place, b)
            for left_key, right_key in self._keys:
                left = (left + _hash(right ^ left_key)) % a
                right = (right + _hash(left ^ right_key)) % b
            place = left * b + right
            if place < self.count:
                return place


class EndlessShuffle:
    """Places without end: one permutation after the other, each epoch's own.

    Args:
        count: places of an epoch.
        key: what all of them are a function of.
    """

    def __init__(self, count: int, *key: object) -> None:
        self.count = count
        self.key = key
        self._epoch = -1
        self._shuffle = Shuffle(1)

    def __getitem__(self, place: int) -> int:
        epoch, place = divmod(place, self.count)
        if epoch != self._epoch:
            self._shuffle, self._epoch = Shuffle(self.count, *self.key, epoch), epoch
        return self._shuffle[place]


def _hash(word: int) -> int:
    word = (word ^ (word >> 33)) * 0xFF51AFD7ED558CCD & WORD
    word = (word ^ (word >> 33)) * 0xC4CEB9FE1A85EC53 & WORD
    return word ^ (word >> 33)
