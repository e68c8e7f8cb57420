"""Reduce operations: the dtypes that they support, and their arithmetic on flat buffers."""

from __future__ import annotations

import enum
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from transport._calls.codes import OP_CODES, dtype_code

Flat = npt.NDArray[Any]
"""A flat typed buffer: a 1-D, C-contiguous, native-endian NumPy array, usually a view."""


class RedOpType(enum.Enum):
    """The kinds of reduction, with c10d's names."""

    SUM = "SUM"
    AVG = "AVG"
    PRODUCT = "PRODUCT"
    MIN = "MIN"
    MAX = "MAX"
    BAND = "BAND"
    BOR = "BOR"
    BXOR = "BXOR"
    PREMUL_SUM = "PREMUL_SUM"


_UFUNCS: dict[RedOpType, np.ufunc] = {
    RedOpType.SUM: np.add,
    RedOpType.AVG: np.add,
    RedOpType.PREMUL_SUM: np.add,
    RedOpType.PRODUCT: np.multiply,
    RedOpType.MIN: np.minimum,
    RedOpType.MAX: np.maximum,
    RedOpType.BAND: np.bitwise_and,
    RedOpType.BOR: np.bitwise_or,
    RedOpType.BXOR: np.bitwise_xor,
}
_BITWISE = frozenset({RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR})
_SCALED = frozenset({RedOpType.AVG, RedOpType.PREMUL_SUM})
_ORDERED = frozenset({RedOpType.MIN, RedOpType.MAX})
# The dtype kinds that each op supports; bfloat16 and ml_dtypes' other floats have the kind V.
_SUPPORTED: dict[RedOpType, str] = (
    dict.fromkeys(RedOpType, "biufcV")
    | dict.fromkeys(_BITWISE, "biu")
    | dict.fromkeys(_ORDERED, "biufV")
    | dict.fromkeys(_SCALED, "fcV")
)


class ReduceOp:
    """A reduction: ``ReduceOp.SUM``, ``AVG``, ``PRODUCT``, ``MIN``, ``MAX``, ``BAND``, ``BOR``,
    ``BXOR``, or the ``PREMUL_SUM`` of ``premul_sum(factor)``. Immutable, equal by value.

    ``residual`` comes from ``error_feedback``. Raises TypeError if ``kind`` is not a RedOpType,
    ValueError for a ``factor`` without PREMUL_SUM or PREMUL_SUM without one.
    """

    __slots__ = ("_supported", "code", "codes", "factor", "kind", "residual", "ufunc")
    RedOpType = RedOpType
    PREMUL_SUM = RedOpType.PREMUL_SUM

    # Set below the class: the ops without parameters, like the values of c10d's enumeration.
    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]

    kind: RedOpType
    factor: Any
    residual: npt.NDArray[np.float32] | None
    """The rounding error of the last call, flat. The next call adds it and stores its own."""
    ufunc: np.ufunc
    """The function that combines two contributions, for direct use in inner loops."""
    code: int
    """The op's wire code."""
    codes: dict[np.dtype[np.generic], int]
    """The wire codes of the dtypes that were already checked; see ``code_of``."""
    _supported: str

    def __init__(
        self,
        kind: RedOpType,
        factor: Any = None,
        residual: npt.NDArray[np.float32] | None = None,
    ) -> None:
        if not isinstance(kind, RedOpType):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"kind must be a RedOpType, got {kind!r}; use an op such as ReduceOp.SUM,"
                " or premul_sum(factor)"
            )
        if kind is RedOpType.PREMUL_SUM and factor is None:
            raise ValueError("PREMUL_SUM needs a factor; use premul_sum(factor)")
        if kind is not RedOpType.PREMUL_SUM and factor is not None:
            raise ValueError(f"only PREMUL_SUM has a factor, got a factor for {kind.name}")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "factor", factor)
        object.__setattr__(self, "residual", residual)
        object.__setattr__(self, "ufunc", _UFUNCS[kind])
        object.__setattr__(self, "code", OP_CODES[kind.name])
        object.__setattr__(self, "codes", {})
        object.__setattr__(self, "_supported", _SUPPORTED[kind])

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("ReduceOp is immutable")

    def __reduce__(self) -> tuple[type[ReduceOp], tuple[RedOpType, Any]]:
        return ReduceOp, (self.kind, self.factor)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RedOpType):
            return self.kind is other
        return (
            isinstance(other, ReduceOp)
            and self.kind is other.kind
            and self.residual is other.residual
            and bool(np.array_equal(self.factor, other.factor))
        )

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        inside = "" if self.factor is None else f"({self.factor!r})"
        return f"ReduceOp.{self.kind.name}{inside}"

    def code_of(self, dtype: np.dtype[np.generic]) -> int:
        """Return the wire code of ``dtype``.

        Raises TypeError if this op, or every collective, does not support ``dtype``.
        """
        code = self.codes.get(dtype)
        if code is None:
            code = dtype_code(dtype)
            self.check(dtype)
            # An op with an array is checked at each call, because the array's size must match.
            if np.ndim(self.factor) == 0 and self.residual is None:
                self.codes[dtype] = code
        return code

    def check(self, dtype: np.dtype[np.generic], count: int | None = None) -> None:
        """Raise TypeError if this op does not support ``dtype``.

        Raises ValueError if the factor or the residual does not match a flat buffer of ``count``
        elements (None: unknown).
        """
        if self.residual is not None and count not in (None, self.residual.size):
            raise ValueError(
                f"the residual of op {self!r} has {self.residual.size} elements; expected {count},"
                " the size of the array"
            )
        if dtype.kind in self._supported:
            if self.factor is not None:
                self._check_factor(dtype, count)
            return
        if self.kind in _BITWISE:
            why = "bitwise operations are defined on integers and bool"
        elif self.kind in _ORDERED:
            why = "complex numbers have no order"
        else:
            why = "scaling an integer would round it"
        raise TypeError(f"op {self!r} does not apply to dtype {dtype.name}: {why}")

    def _check_factor(self, dtype: np.dtype[np.generic], count: int | None) -> None:
        if np.iscomplexobj(self.factor) and dtype.kind != "c":
            raise TypeError(
                f"op {self!r} does not apply to dtype {dtype.name}: its factor is complex"
            )
        shape = np.shape(self.factor)
        if count is not None and shape not in ((), (1,), (count,)):
            raise ValueError(
                f"op {self!r} has a factor of shape {shape}; expected a number, or one for each of"
                f" the {count} elements"
            )

    def combine(self, lower: Flat, upper: Flat, out: Flat) -> None:
        """Write ``lower`` op ``upper`` into ``out``, which may be ``lower`` or ``upper``.

        ``lower`` must be the contribution of the lower ranks. With operands in rank order, every
        rank gets the same NaN payloads and signed zeros.
        """
        self.ufunc(lower, upper, out=out)

    def prepare(self, buffer: Flat) -> None:
        """Apply the first step of a reduction to ``buffer``: PREMUL_SUM scales the input."""
        if self.kind is RedOpType.PREMUL_SUM:
            np.multiply(buffer, self.factor, out=buffer, casting="same_kind")

    def part(self, start: int, stop: int, count: int) -> ReduceOp:
        """Return this op for elements ``start`` to ``stop`` of a flat buffer of ``count``.

        An op with an array (``factor``, ``residual``) gets the matching part of that array.
        """
        if self.residual is not None:
            return ReduceOp(self.kind, None, self.residual[start:stop])
        if self.factor is None or np.ndim(self.factor) == 0:
            return self
        return ReduceOp(self.kind, np.broadcast_to(self.factor, count)[start:stop])

    @property
    def plain(self) -> ReduceOp:
        """The op that combines two operands, between ``prepare`` and ``finish``."""
        if self.residual is not None:
            return ReduceOp(RedOpType.SUM, None, self.residual)
        return ReduceOp.SUM if self.kind in _SCALED else self

    def finish(self, buffer: Flat, size: int) -> None:
        """Apply the last step of a reduction over ``size`` ranks to ``buffer``: AVG divides."""
        if self.kind is RedOpType.AVG:
            if buffer.dtype.kind == "c":  # Complex division rounds more than once.
                buffer = buffer.view(np.real(buffer).dtype)
            np.divide(buffer, size, out=buffer, casting="same_kind")


for _type in set(RedOpType) - {RedOpType.PREMUL_SUM}:
    setattr(ReduceOp, _type.name, ReduceOp(_type))


def premul_sum(factor: Any) -> ReduceOp:
    """Return the op that multiplies each rank's input by ``factor``, then sums.

    ``factor`` is a number, or a 1-D array with a number for each element of the flattened input. In
    reduce_scatter, the array has the size of the output and multiplies every part of the input.
    Raises TypeError for any other ``factor``. Calls raise ValueError for an array of another size,
    and TypeError for a complex factor with real data.
    """
    if np.asarray(factor).dtype.kind not in "biufcV":
        raise TypeError(f"factor must be a number or an array of numbers, got {factor!r}")
    return ReduceOp(RedOpType.PREMUL_SUM, factor)


def error_feedback(op: ReduceOp, residual: npt.NDArray[np.float32]) -> ReduceOp:
    """Return ``op`` with error feedback, for an all_reduce over a compressed mesh dim.

    A compressed call stores its rounding error in ``residual``, and the next call with the same
    residual adds it. Use one residual, initially zeros, for each array that is reduced repeatedly.
    Uncompressed calls do not change it.

    Args:
        op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``.
        residual: A C-contiguous, writable NumPy array of float32, with the size of the reduced
            array. Calls write to it.

    Returns:
        The op, only for ``all_reduce``.

    Raises:
        ValueError: For another op.
        TypeError: For another residual.
    """
    if not isinstance(op, ReduceOp) or op.kind not in (RedOpType.SUM, RedOpType.AVG):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"op is {op!r}; expected ReduceOp.SUM or ReduceOp.AVG for error feedback")
    fits = isinstance(residual, np.ndarray) and residual.dtype == np.float32  # pyright: ignore[reportUnnecessaryIsInstance]
    if not fits or not residual.flags.c_contiguous or not residual.flags.writeable:
        raise TypeError(
            f"residual is {type(residual).__name__} {getattr(residual, 'dtype', '')}; expected a"
            " writable, C-contiguous NumPy array of float32"
        )
    return ReduceOp(op.kind, None, residual.reshape(-1))


def reduction_dtype(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Return the dtype in which ``dtype`` is reduced: float32 for floats of 8 and 16 bits.

    Results are then rounded once at the end, not after each addition.
    """
    is_small_float = dtype.itemsize <= 2 and dtype.kind in "fV"
    return np.dtype(np.float32) if is_small_float else dtype
