"""A pseudo-random permutation computed by position, without memory.

A Feistel network over two digits, l in base a and r in base b, with a·b just above the number of
positions n: each round adds a hash of one digit to the other, modulo its base, which is invertible
(Black and Rogaway, "Ciphers with arbitrary finite domains", 2002, method 3). Results from n to a·b
are permuted again until one is below n (cycle walking, method 2). The hash is the 64-bit finalizer
of MurmurHash3 with a key for each round: integers only, so that the order is the same on every
machine.

With eight rounds no test in ``tests/data/test_permutation.py`` distinguishes it from a random
permutation. It is not a cipher, and for a dozen positions or fewer not all orders are equally
frequent.
"""

import hashlib
import math

ORDER = "feistel-8"  # name of the order; a checkpoint of another order cannot resume

ROUNDS = 8
WORD = 2**64 - 1


class Shuffle:
    """A pseudo-random permutation of ``range(count)`` (at least one), selected by the key."""

    def __init__(self, count: int, *key: object) -> None:
        assert count > 0
        self.count = count
        self._a = math.isqrt(count - 1) + 1
        self._b = -(-count // self._a)
        digest = hashlib.blake2b(
            repr((ORDER, count, *key)).encode(), digest_size=8 * ROUNDS
        ).digest()
        integers = [
            int.from_bytes(digest[start : start + 8], "little")
            for start in range(0, len(digest), 8)
        ]
        self._keys = list(zip(integers[::2], integers[1::2], strict=True))

    def __getitem__(self, position: int) -> int:
        assert 0 <= position < self.count
        a = self._a
        b = self._b
        while True:
            left, right = divmod(position, b)
            for left_key, right_key in self._keys:
                left = (left + _hash(right ^ left_key)) % a
                right = (right + _hash(left ^ right_key)) % b
            position = left * b + right
            if position < self.count:
                return position


class EndlessShuffle:
    """Endless positions: one permutation of ``range(count)`` for each epoch, selected by the
    key."""

    def __init__(self, count: int, *key: object) -> None:
        self.count = count
        self.key = key
        self._epoch = -1
        self._shuffle = Shuffle(1)

    def __getitem__(self, position: int) -> int:
        epoch, position = divmod(position, self.count)
        if epoch != self._epoch:
            self._shuffle = Shuffle(self.count, *self.key, epoch)
            self._epoch = epoch
        return self._shuffle[position]


def _hash(word: int) -> int:
    word = (word ^ (word >> 33)) * 0xFF51AFD7ED558CCD & WORD
    word = (word ^ (word >> 33)) * 0xC4CEB9FE1A85EC53 & WORD
    return word ^ (word >> 33)
