"""Orders (the sample at each place of an epoch) and shards (the places of each replica).

``Permutation(n, key)`` is a bijection of range(n) that can be computed at any place. So shuffling
a billion samples needs no memory, and a sampler resumes from a single number.

It is the generalised Feistel cipher of Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
(CT-RSA 2002), method 3. The domain has a·b >= n points with a ≈ b ≈ sqrt(n). Points outside
range(n) are enciphered again ("cycle walking"), which is rare because a·b - n < a + b. The round
function is SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014). Orders do not depend on
NumPy's random streams, which may change between versions.

An epoch is a sequence of places 0 … size-1; the order maps each place to a sample. Replica r of R
gets places start + r, start + r + R, …. After k samples each, the replicas have used exactly the
places before ``start + k R``. This number, the *cursor*, is the whole state of a distributed epoch,
which can resume from it with another R.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshlib.extend import to_whole_number
from parallel._checks import to_count


class Tail(enum.Enum):
    """The treatment of the last places if the size is not divisible by the number of replicas."""

    PAD = "pad"  # equal shares: places past the end wrap around to place 0
    DROP = "drop"  # equal shares: the last places are omitted
    UNEVEN = "uneven"  # every place exactly once: some replicas get one sample fewer


@dataclass(frozen=True, slots=True)
class ReplicaShard:
    """The share of replica ``rank`` of ``replicas`` in the places from ``start`` to ``size``."""

    size: int
    replicas: int
    rank: int
    tail: Tail
    start: int = 0

    @property
    def longest(self) -> int:
        """The maximum number of samples of a replica, which is the number of steps of all."""
        left = self.size - self.start
        return left // self.replicas if self.tail is Tail.DROP else -(-left // self.replicas)

    @property
    def count(self) -> int:
        """The number of samples of this replica, including padding."""
        return self.valid if self.tail is Tail.UNEVEN else self.longest

    @property
    def valid(self) -> int:
        """The number of samples of this replica, without padding at the end."""
        left = self.size - self.start
        whole = left // self.replicas
        if self.tail is Tail.DROP:
            return whole
        return whole + (self.rank < left % self.replicas)

    def places(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return the places of this replica's samples number ``begin`` to ``end`` (exclusive)."""
        steps = np.arange(begin, end, dtype=np.int64)
        return (self.start + self.rank + steps * self.replicas) % self.size

    def cursor(self, consumed: int) -> int:
        """Return the epoch's cursor after ``consumed`` steps of every replica.

        After the last step it is ``size``, the end of the epoch, even if the tail was dropped.
        """
        if consumed >= self.longest:
            return self.size
        return self.start + consumed * self.replicas


Positions = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 12  # more than Patarin's bounds require, for uniformity on small domains
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(words: _Words) -> _Words:
    """Return SplitMix64's finaliser of each word, a pseudorandom bijection of 64 bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def uniform(key: int, positions: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return pseudorandom numbers in [0, 1) for ``positions`` (integers >= 0) and ``key``."""
    words = mix(mix(positions.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key & _MASK)))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive(*numbers: int) -> int:
    """Return a 64-bit key for several integers (of any size and sign, modulo 2^64)."""
    key = 0
    for number in numbers:
        word = np.array([(key + _GOLDEN + number) & _MASK], np.uint64)
        key = int(mix(word)[0])
    return key


class Permutation:
    """A pseudorandom bijection of range(size), determined by ``key`` (an integer, modulo 2^64).

    Raises ValueError for a size below 1, TypeError unless both are integers.
    """

    def __init__(self, size: int, key: int) -> None:
        size, key = to_count(size, "size"), to_whole_number(key, "key")
        self.size = size
        # Two factors near sqrt(size), at least 2 so that every round permutes points.
        self._a = max(math.isqrt(size - 1) + 1, 2)
        self._b = max(-(-size // self._a), 2)
        # derive(key, i) for each round i, vectorised.
        first = np.uint64((derive(key) + _GOLDEN) & _MASK)
        self._keys = list(mix(first + np.arange(_ROUNDS, dtype=np.uint64)))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> int:
        """Return the image of ``position``. Raises IndexError outside [0, size)."""
        position = to_whole_number(position, "position")
        if not 0 <= position < self.size:
            raise IndexError(f"position must be in [0, {self.size}), got {position}")
        return int(self.apply(np.array([position], np.int64))[0])

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return the images of ``positions`` (integers in [0, size)), as int64."""
        result = self._encipher(positions.astype(np.uint64))
        outside = np.flatnonzero(result >= self.size)
        while outside.size:
            result[outside] = self._encipher(result[outside])
            outside = outside[result[outside] >= self.size]
        return result.astype(np.int64)

    def _encipher(self, points: _Words) -> _Words:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = points % a, points // a
        for i, key in enumerate(self._keys):
            modulus = b if i % 2 else a
            noise = mix(right * np.uint64(_GOLDEN) + key) % modulus
            left, right = right, (left + noise) % modulus
        # After an even number of rounds, ``left`` is again the part modulo a.
        return left + a * right


class Order(Protocol):
    """A function from places to samples."""

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return the sample at each of ``positions`` (places of the epoch), as int64."""
        ...


class Sequence:
    """The identity order: sample i is at place i."""

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return the places themselves."""
        return positions.astype(np.int64, copy=False)


@dataclass(frozen=True, eq=False)
class WeightedDraws:
    """Independent draws with replacement: sample i with probability weights[i] / sum(weights).

    ``cumulative`` has the running sums of the weights. ``key`` and the place determine a number
    between 0 and the total; the draw is the first sample whose running sum exceeds it.
    """

    cumulative: npt.NDArray[np.float64]
    key: int

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return the sample drawn at each place."""
        total = self.cumulative[-1]
        points = uniform(self.key, positions) * total
        # "right" skips samples of weight 0, whose running sums equal their predecessors'.
        found = np.searchsorted(self.cumulative, points, side="right")
        # The product may round up to the total, which belongs to the last sample with weight.
        last = np.searchsorted(self.cumulative, total, side="left")
        return np.minimum(found, last).astype(np.int64)


@dataclass(frozen=True, eq=False)
class LengthGrouped:
    """A permutation in which adjacent samples have similar lengths.

    ``permuted`` is cut into windows of ``window`` places, each sorted by length, longest first. So
    a batch from one window needs little padding, and a batch that is too large for the memory
    fails early. The samples in a window are still random.
    """

    permuted: Permutation
    lengths: npt.NDArray[Any]
    window: int

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return the sample at each place."""
        result = np.empty(len(positions), np.int64)
        windows = positions // self.window
        for window in np.unique(windows).tolist():
            begin = window * self.window
            places = np.arange(begin, min(begin + self.window, len(self.permuted)))
            samples = self.permuted.apply(places)
            lengths = self.lengths[samples]
            # ~ reverses the order of all integers, unlike negation of unsigned integers.
            descending = ~lengths if lengths.dtype.kind in "biu" else -lengths
            samples = samples[np.argsort(descending, kind="stable")]
            inside = windows == window
            result[inside] = samples[positions[inside] - begin]
        return result
