"""Orders and shares: which sample stands at which place of an epoch, and whose the place is.

``Permutation(n, key)`` is a bijection of range(n), so a billion samples are shuffled in no memory,
and any place of the order can be asked for: this is what lets a sampler resume, on any number of
replicas, by a single number.

It is the generalised Feistel cipher of Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
(CT-RSA 2002), method 3, on a domain of a·b >= n points with a ≈ b ≈ sqrt(n); points outside
range(n) are sent through again ("cycle walking"), which a·b - n < a + b makes rare. The round
function is SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014). Nothing here depends on a
library's random streams: an order never changes with a version of NumPy.

An epoch is a sequence of places 0 … size-1; the order says which sample stands at each. Replica r
of R takes places start + r, start + r + R, …: replicas that advance together have, after k samples
each, used exactly the places before ``start + k R``. One number, this *cursor*, is the whole state
of a distributed epoch, and an epoch can go on from it with another R.
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
    """What happens to the last places when replicas do not divide what is left."""

    PAD = "pad"  # every replica gets equally many; places past the end begin again at place 0
    DROP = "drop"  # every replica gets equally many; the last places are left out
    UNEVEN = "uneven"  # every place exactly once; some replicas get one sample less


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of replica ``rank`` of ``replicas`` in the places from ``start`` to ``size``."""

    size: int
    replicas: int
    rank: int
    tail: Tail
    start: int = 0

    @property
    def longest(self) -> int:
        """How many samples the replica with the most takes: the steps of the whole group."""
        left = self.size - self.start
        return left // self.replicas if self.tail is Tail.DROP else -(-left // self.replicas)

    @property
    def count(self) -> int:
        """How many samples this replica takes, padding included."""
        return self.valid if self.tail is Tail.UNEVEN else self.longest

    @property
    def valid(self) -> int:
        """How many of them are no padding: the last ``count - valid`` repeat earlier places."""
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
        """Return the epoch's cursor after ``consumed`` steps of every replica, at most longest.

        After the last step it is ``size``, also where the tail was dropped: the epoch is over.
        """
        if consumed >= self.longest:
            return self.size
        return self.start + consumed * self.replicas


Positions = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 12  # Patarin's bounds ask for few; small domains need more to come out uniform.
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(words: _Words) -> _Words:
    """Return SplitMix64's finaliser of each word: a bijection of 64 bits that looks random."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def uniform(key: int, positions: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each of ``positions`` (integers >= 0), chosen by ``key``."""
    words = mix(mix(positions.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key & _MASK)))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive(*numbers: int) -> int:
    """Return one 64-bit key for several integers (of any size and sign, taken modulo 2^64)."""
    key = 0
    for number in numbers:
        word = np.array([(key + _GOLDEN + number) & _MASK], np.uint64)
        key = int(mix(word)[0])
    return key


class Permutation:
    """A pseudorandom bijection of range(size), chosen by ``key`` (an integer, modulo 2^64).

    Raises ValueError for a size below 1, TypeError for what is no whole number.
    """

    def __init__(self, size: int, key: int) -> None:
        size, key = to_count(size, "size"), to_whole_number(key, "key")
        self.size = size
        # Two factors near sqrt(size), at least 2 so that every round can move something.
        self._a = max(math.isqrt(size - 1) + 1, 2)
        self._b = max(-(-size // self._a), 2)
        # What derive(key, i) is for each round i, all at once.
        first = np.uint64((derive(key) + _GOLDEN) & _MASK)
        self._keys = list(mix(first + np.arange(_ROUNDS, dtype=np.uint64)))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> int:
        """Return where ``position`` goes. Raises IndexError for one outside [0, size)."""
        position = to_whole_number(position, "position")
        if not 0 <= position < self.size:
            raise IndexError(f"position must lie in [0, {self.size}), got {position}")
        return int(self.apply(np.array([position], np.int64))[0])

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return where each of ``positions`` (integers in [0, size)) goes, as int64."""
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
        # After an even number of rounds left is again the part modulo a.
        return left + a * right


class Order(Protocol):
    """A function from places to samples."""

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return the sample at each of ``positions`` (places of the epoch), as int64."""
        ...


class Sequence:
    """Each sample at the place of its own number."""

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return the places themselves."""
        return positions.astype(np.int64, copy=False)


@dataclass(frozen=True, eq=False)
class WeightedDraws:
    """At each place an independent draw, with replacement, of sample i with share weights[i].

    ``cumulative`` are the weights' running sums. The draw at a place inverts them at a number that
    ``key`` and the place determine.
    """

    cumulative: npt.NDArray[np.float64]
    key: int

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return the sample drawn at each place."""
        total = self.cumulative[-1]
        points = uniform(self.key, positions) * total
        # "right" skips samples of weight 0, whose running sum equals their predecessor's.
        found = np.searchsorted(self.cumulative, points, side="right")
        # The product may round up to the total: the last sample with weight takes it.
        last = np.searchsorted(self.cumulative, total, side="left")
        return np.minimum(found, last).astype(np.int64)


@dataclass(frozen=True, eq=False)
class LengthGrouped:
    """A permutation in which neighbours have similar lengths.

    ``permuted`` is cut into windows of ``window`` places; within each, samples are sorted by
    length, longest first, so that batches cut from it need little padding, and a batch that does
    not fit in memory shows at once. Which samples share a window is still random.
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
            # ~ turns the order of integers around, of all: -0 is no larger than -1 if unsigned.
            falling = ~lengths if lengths.dtype.kind in "biu" else -lengths
            samples = samples[np.argsort(falling, kind="stable")]
            inside = windows == window
            result[inside] = samples[positions[inside] - begin]
        return result
