"""Random chains of NumPy's operations on sharded arrays, each result compared with NumPy's.

A step is an operation (``numpy_operations``) and a number from which its arguments follow: every
rank makes the same calls, and NumPy's beside them. A result has the values, the dtype and the shape
of NumPy's; or there is an error where NumPy raises one of its kind, or a ``ShardingError``.
"""

import random
import warnings
from contextlib import suppress

import numpy as np

from meshlib.sharding import DArray, Sharding, ShardingError, distribute_array
from tests.support.meshlib.sharding_cases import draw_sharding

DTYPES = ["?", "i1", "u1", "i4", "i8", "u8", "f2", "f4", "f8", "F", "D"]
SCALARS = [
    0,
    1,
    2,
    -3,
    0.5,
    -0.0,
    0.0,
    float("inf"),
    float("nan"),
    True,
    1j,
    np.float32(3),
    np.int8(2),
]


class Chain:
    """Global arrays and what they are in NumPy, under operations that ``chance`` picks."""

    def __init__(self, mesh, seed):
        self.mesh, self.compared, self.refused = mesh, 0, 0
        self.chance = random.Random(seed)
        self.pool = [self.drawn() for _ in range(4)]

    def step(self, operation, seed):
        """Do the ``operation`` here and in NumPy, compare, and keep the result."""
        self.chance = random.Random(seed)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            operation(self)

    # ------------------------------------------------------------------ arrays

    def drawn(self, shape=None, dtype=None):
        """Return a random array in a random sharding, here and in NumPy."""
        chance = self.chance
        if shape is None:
            shape = [chance.choice([0, 1, 2, 2, 3, 4, 5, 6]) for _ in range(chance.randrange(4))]
        values = np.random.default_rng(chance.randrange(2**32))
        dtype = np.dtype(dtype or chance.choice(DTYPES))
        whole = values.integers(-3, 4, shape)
        if dtype.kind in "iu" and chance.random() < 0.4:
            whole = values.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype)
        whole = np.asarray(whole).astype(dtype)
        if dtype.kind in "fc":
            odd = np.array([0.5, -0.0, np.inf, -np.inf, np.nan, 1e4, 4e4])
            picked = odd[values.integers(0, len(odd), shape)]
            whole = np.where(values.random(shape) < chance.choice([0, 0, 0.1]), picked, whole)
            whole = np.asarray(whole, dtype)
            if dtype.kind == "c":
                whole = whole + whole.dtype.type(1j) * values.integers(-1, 2, shape)
        return self._laid_out(np.asarray(whole, dtype)), np.asarray(whole, dtype)

    def _laid_out(self, whole):
        x = distribute_array(
            whole, draw_sharding(self.chance, self.mesh, whole.ndim).reduced(), src_data_rank=None
        )
        return self.elsewhere(x)

    def elsewhere(self, x):
        """Return ``x`` in a random sharding, with partial values of any op that its dtype has."""
        sharding = draw_sharding(self.chance, self.mesh, x.ndim)
        op = self.chance.choice(["sum", "sum", "avg", "product", "min", "max"])
        # Complex numbers have no order, and 1 times a complex infinity is not a number.
        if x.dtype.kind in {"avg": "biu", "sum": ""}.get(op, "c"):
            op = "sum"
        partial = [(i, op) for i, _ in sharding.partial_dims]
        return x.redistribute(Sharding.of_positions(self.mesh, sharding.dims, partial))

    def pick(self, ok=lambda whole: True):
        """Return the number of an array for which ``ok``; a new array if there is none."""
        fit = [i for i, (_, whole) in enumerate(self.pool) if ok(whole)]
        if fit and self.chance.random() < 0.9:
            return self.chance.choice(fit)
        self.pool[0] = self.drawn()
        return 0

    def other(self, i):
        """Return a scalar, or an array that mostly has the shape and sharding of array ``i``."""
        chance, (x, whole) = self.chance, self.pool[i]
        kind = chance.random()
        if kind < 0.25:
            value = chance.choice(SCALARS)
            return value, value
        if kind < 0.35:
            return self.pool[self.pick()]
        shape = list(whole.shape)
        if kind < 0.5 and shape:
            d = chance.randrange(len(shape))
            shape[d] = chance.choice([1, shape[d], shape[d] + 1])
            shape = shape[chance.randrange(2) :]
        if kind > 0.9:
            return x, whole
        y, values = self.drawn(shape, chance.choice([whole.dtype, whole.dtype, None]))
        if list(whole.shape) == shape:
            with suppress(TypeError):  # complex numbers have no maximum
                y = y.redistribute(x.sharding if chance.random() < 0.7 else x.sharding.reduced())
        return y, values

    # ------------------------------------------------------------------ comparison

    def check(self, function, *arguments, label=None, exact=True):
        """Compare ``function`` of pairs (a DArray or any value, the same in NumPy).

        ``exact``: of each element alone, so that not even the sign of a zero differs.
        """
        here, there = [a for a, _ in arguments], [b for _, b in arguments]
        text = f"{label or getattr(function, '__name__', function)} of {here}"
        expected, failure = _outcome(function, there)
        result, refusal = _outcome(function, here)
        self.compared += 1
        if refusal is not None:
            self.refused += 1
            kinds = (ShardingError, *((type(failure),) if failure else ()))
            ok = isinstance(refusal, kinds) or (failure and isinstance(refusal, ValueError))
            assert ok, f"{text}: {refusal!r}, but NumPy: {failure!r} {expected!r}"
            return
        assert failure is None, f"{text}: {result}, but NumPy raises {failure!r}"
        results = result if isinstance(result, tuple) else (result,)
        wholes = expected if isinstance(expected, tuple) else (expected,)
        for one, value in zip(results, wholes, strict=True):
            if not isinstance(one, DArray):
                assert one == value or one != one, f"{text}: {one}, but NumPy: {value}"
                continue
            whole = np.asarray(value)
            assert one.shape == whole.shape, f"{text}: {one}, but NumPy: {whole.shape}"
            assert one.dtype == whole.dtype, f"{text}: {one}, but NumPy: {whole.dtype}"
            own = one.full_array()
            assert own.dtype == one.dtype
            assert one.local.shape == one.sharding.local_shape(one.shape)
            same = _alike(own, whole, there, exact)
            assert same.all(), f"{text}: {own.tolist()}, but NumPy: {whole.tolist()} of {there}"
            if is_tame(own) and own.ndim < 5 and own.size < 400:
                self.pool[self.chance.randrange(len(self.pool))] = (one.copy(), own)


def _outcome(function, arguments):
    try:
        return function(*arguments), None
    except Exception as error:  # noqa: BLE001 (it is compared)
        return None, error


def _alike(own, whole, operands, exact):
    """Return where ``own`` has the values of ``whole``, up to the rounding of its dtype."""
    if own.dtype.kind not in "fc":
        return own == whole
    if own.dtype.kind == "c":
        both = (
            _alike(own.real, whole.real, operands, False),
            _alike(own.imag, whole.imag, operands, False),
        )
        # Which part of a product is not a number depends on the way it is made.
        return (both[0] & both[1]) | ~(np.isfinite(own) | np.isfinite(whole))
    most = max((_size(x) for x in operands), default=0.0)
    eps = float(np.finfo(own.dtype).eps) * (16 if exact else 256)
    a, b = own.astype(float), whole.astype(float)
    close = np.abs(a - b) <= eps * (np.abs(b) + (0 if exact else most))
    same = close | (a == b) | (np.isnan(a) & np.isnan(b))
    zeros = (a == 0) & (b == 0) & exact
    return same & (~zeros | (np.signbit(a) == np.signbit(b)))


def _size(x):
    """Return the greatest sum of finite squares that may have arrived of an operand, about."""
    x = np.asarray(x)
    if x.dtype.kind not in "fciub" or not x.size:
        return 0.0
    numbers = np.abs(x.astype(complex))
    numbers = numbers[np.isfinite(numbers)]
    return float((numbers.max(initial=0) + numbers.max(initial=0) ** 2) * max(x.size, 1))


def is_tame(x):
    """True if sums and products of the elements neither overflow nor vanish in any order."""
    if x.dtype.kind not in "fc":
        return True
    numbers = np.abs(x[np.isfinite(x) & (x != 0)]).astype(float)
    most = 200 if x.dtype == np.float16 else 1e4
    return not numbers.size or (numbers.max() <= most and numbers.min() >= 1 / most)
