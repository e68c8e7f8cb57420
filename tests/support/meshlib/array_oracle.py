"""What each collective of the public interface must give, from its definition.

A ``Spec`` says what is called with which values. ``perform`` makes the call on one rank with
arrays of ``Spec.value``; ``expect`` says what every rank must get, computed from those values
with NumPy alone: reductions go over a stacked axis, in integers or in extended precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import ml_dtypes
import numpy as np

import meshlib as dist

Array = np.ndarray[Any, Any]

INTEGERS = [np.dtype(f"{sign}{n}") for sign in "iu" for n in (1, 2, 4, 8)]
FLOATS = [np.dtype(name) for name in ("f2", "f4", "f8", "g")]
COMPLEX = [np.dtype(name) for name in ("c8", "c16", "G")]
SMALL_FLOATS = [
    np.dtype(getattr(ml_dtypes, name))
    for name in (
        "bfloat16",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
]
DTYPES = [np.dtype("?"), *INTEGERS, *FLOATS, *COMPLEX, *SMALL_FLOATS]
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "coalesced_reduce")
MOVES = (
    "broadcast",
    "all_gather",
    "all_gather_uneven",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_uneven",
    "coalesced_gather",
    "ring",
    "objects",
)
FACTOR = 0.5
FEW_VALUES = 1000  # so few are kept


def applies(op: str, dtype: np.dtype[Any]) -> bool:
    """True if the specification defines ``op`` on ``dtype``."""
    if op in {"BAND", "BOR", "BXOR"}:
        return dtype.kind in "biu"
    if op in {"AVG", "PREMUL_SUM"}:
        return dtype.kind not in "biu"
    return op not in {"MIN", "MAX"} or dtype.kind != "c"


@dataclass(frozen=True)
class Spec:
    """One call, the same on every member. ``root`` is taken modulo the group's size.

    ``layout`` is how arrays lie in memory: "C", "strided" or "transposed".
    """

    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    op: str = "SUM"
    root: int = 0
    layout: str = "C"
    seed: int = 0

    def value(self, *place: int, shape: tuple[int, ...] | None = None) -> Array:
        """The values that belong to ``place`` (ranks and parts): the same whoever asks."""
        shape = self.shape if shape is None else shape
        draw = _drawn if np.prod(shape) < FEW_VALUES else _drawn.__wrapped__
        return draw(self, place, shape).copy()

    def draw(self, place: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        rng = np.random.default_rng([self.seed, *place])
        dtype = self.dtype
        if dtype.kind == "b":
            return np.asarray(rng.integers(0, 2, shape)).astype(dtype)
        if dtype.kind in "iu":
            # The whole range: sums and products wrap around, as NumPy's do.
            info = np.iinfo(dtype)
            return np.asarray(rng.integers(info.min, info.max, shape, dtype, endpoint=True))
        # Numbers whose sums and products are exact in any order, before the one rounding.
        if dtype.name == "float8_e8m0fnu":
            return np.asarray(2.0 ** rng.integers(0, 3, shape)).astype(dtype)
        numbers = np.asarray(rng.integers(-2, 3, shape)).astype(np.float64)
        if dtype.kind == "c":
            numbers = numbers + 1j * rng.integers(-2, 3, shape)
        return np.asarray(numbers).astype(dtype)

    def lay_out(self, values: Array) -> Array:
        """A copy of ``values`` with the memory layout that is asked for."""
        if self.layout == "C" or values.ndim == 0:
            return values.copy()
        if self.layout == "transposed":
            return values.T.copy().T
        wide = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
        wide[..., ::2] = values
        return wide[..., ::2]

    def room(self, shape: tuple[int, ...]) -> Array:
        """An array to put results into, filled with something else."""
        return self.lay_out(np.ones(shape, self.dtype))

    @property
    def reduce_op(self) -> dist.ReduceOp:
        """The op as the interface wants it."""
        return (
            dist.premul_sum(FACTOR) if self.op == "PREMUL_SUM" else getattr(dist.ReduceOp, self.op)
        )


@lru_cache(maxsize=1 << 16)  # every group and every transport asks for the same ones
def _drawn(spec: Spec, place: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    return spec.draw(place, shape)


def reduced(values: Sequence[Array], op: str) -> Array:
    """The reduction of ``values`` with one rounding at the end, in float32 first for small ones."""
    dtype = values[0].dtype
    if dtype.kind in "biu":
        stacked = np.stack(values)
        ufunc = {
            "SUM": np.add,
            "PRODUCT": np.multiply,
            "MIN": np.minimum,
            "MAX": np.maximum,
            "BAND": np.bitwise_and,
            "BOR": np.bitwise_or,
            "BXOR": np.bitwise_xor,
        }[op]
        return np.asarray(ufunc.reduce(stacked, axis=0, dtype=dtype))
    wide = np.stack([v.astype("G" if dtype.kind == "c" else "g") for v in values])
    small = dtype.itemsize <= 2
    if op == "PREMUL_SUM":
        total = (wide * FACTOR).sum(axis=0)
    elif op in {"SUM", "AVG"}:
        total = wide.sum(axis=0)
    else:
        total = {"PRODUCT": np.prod, "MIN": np.min, "MAX": np.max}[op](wide, axis=0)
    total = np.asarray(total).astype(np.float32 if small else dtype)
    if op == "AVG":
        parts = total.reshape(-1).view(total.real.dtype)
        total = (parts / parts.dtype.type(len(values))).view(total.dtype).reshape(total.shape)
    return np.asarray(total).astype(dtype)


def _uneven(shape: tuple[int, ...], i: int, size: int) -> tuple[int, ...]:
    """A shape whose first dim depends on ``i``; some are empty."""
    return ((shape[0] if shape else 1) + (3 * i) % (size + 2), *shape[1:])


def _rows(spec: Spec, src: int, dst: int) -> tuple[int, ...]:
    """What ``src`` sends to ``dst`` when both ends' sizes differ."""
    return ((2 * src + 3 * dst) % 4, *spec.shape[1:])


def expect(spec: Spec, size: int) -> list[Any]:
    """What each member ends up with, by group rank."""
    root = spec.root % size
    ranks = range(size)
    value = spec.value
    match spec.kind:
        case "all_reduce":
            return [reduced([value(r) for r in ranks], spec.op)] * size
        case "reduce":
            total = reduced([value(r) for r in ranks], spec.op)
            return [total if r == root else value(r) for r in ranks]
        case "reduce_scatter" | "reduce_scatter_tensor":
            return [reduced([value(r, part) for r in ranks], spec.op) for part in ranks]
        case "coalesced_reduce":
            return [[reduced([value(r, i) for r in ranks], spec.op) for i in range(3)]] * size
        case "broadcast":
            return [value(root)] * size
        case "all_gather":
            return [[value(r) for r in ranks]] * size
        case "all_gather_uneven":
            return [[value(r, shape=_uneven(spec.shape, r, size)) for r in ranks]] * size
        case "all_gather_into_tensor":
            return [np.stack([value(r) for r in ranks])] * size
        case "gather":
            return [[value(r) for r in ranks] if r == root else None for r in ranks]
        case "scatter":
            return [value(root, part) for part in ranks]
        case "all_to_all":
            return [[value(src, dst) for src in ranks] for dst in ranks]
        case "all_to_all_single":
            return [np.stack([value(src, dst) for src in ranks]) for dst in ranks]
        case "all_to_all_uneven":
            return [
                np.concatenate([value(src, dst, shape=_rows(spec, src, dst)) for src in ranks])
                for dst in ranks
            ]
        case "coalesced_gather":
            return [[[value(r, 0), value(r, 1, shape=(r,))] for r in ranks]] * size
        case "ring":
            return [value((r - 1) % size) for r in ranks]
        case "objects":
            return [[value(r).tolist() for r in ranks]] * size
        case _:
            raise AssertionError(spec.kind)


def perform(spec: Spec, group: dist.ProcessGroup, async_op: bool) -> Any:
    """Make the call on this rank; return what it gives, a Work if ``async_op``."""
    me, size = group.rank(), group.size()
    root = spec.root % size
    lay, room, value, shape = spec.lay_out, spec.room, spec.value, spec.shape
    call = {"group": group, "async_op": async_op}
    at_root = me == root
    match spec.kind:
        case "all_reduce":
            return dist.all_reduce(lay(value(me)), spec.reduce_op, **call)
        case "reduce":
            return dist.reduce(lay(value(me)), op=spec.reduce_op, group_dst=root, **call)
        case "reduce_scatter":
            parts = [lay(value(me, part)) for part in range(size)]
            return dist.reduce_scatter(room(shape), parts, spec.reduce_op, **call)
        case "reduce_scatter_tensor":
            joined = lay(np.stack([value(me, part) for part in range(size)]))
            return dist.reduce_scatter_tensor(room(shape), joined, spec.reduce_op, **call)
        case "coalesced_reduce":
            xs = [lay(value(me, i)) for i in range(3)]
            return dist.all_reduce_coalesced(xs, spec.reduce_op, **call)
        case "broadcast":
            return dist.broadcast(lay(value(me)), group_src=root, **call)
        case "all_gather":
            return dist.all_gather([room(shape) for _ in range(size)], lay(value(me)), **call)
        case "all_gather_uneven":
            outs = [room(_uneven(shape, r, size)) for r in range(size)]
            mine = value(me, shape=_uneven(shape, me, size))
            return dist.all_gather(outs, lay(mine), **call)
        case "all_gather_into_tensor":
            return dist.all_gather_into_tensor(room((size, *shape)), lay(value(me)), **call)
        case "gather":
            outs = [room(shape) for _ in range(size)] if at_root else None
            return dist.gather(lay(value(me)), outs, group_dst=root, **call)
        case "scatter":
            parts = [lay(value(me, part)) for part in range(size)] if at_root else None
            return dist.scatter(room(shape), parts, group_src=root, **call)
        case "all_to_all":
            parts = [lay(value(me, dst)) for dst in range(size)]
            return dist.all_to_all([room(shape) for _ in range(size)], parts, **call)
        case "all_to_all_single":
            joined = lay(np.stack([value(me, dst) for dst in range(size)]))
            return dist.all_to_all_single(room((size, *shape)), joined, **call)
        case "all_to_all_uneven":
            sent = [_rows(spec, me, dst) for dst in range(size)]
            due = [_rows(spec, src, me)[0] for src in range(size)]
            joined = np.concatenate([value(me, dst, shape=s) for dst, s in enumerate(sent)])
            out = room((sum(due), *shape[1:]))
            return dist.all_to_all_single(out, lay(joined), due, [s[0] for s in sent], **call)
        case "coalesced_gather":
            outs = [[room(shape), room((r,))] for r in range(size)]
            mine = [lay(value(me, 0)), lay(value(me, 1, shape=(me,)))]
            return dist.all_gather_coalesced(outs, mine, **call)
        case "ring":
            send = partial(dist.P2POp, dist.isend, lay(value(me)), group=group)
            receive = partial(dist.P2POp, dist.irecv, room(shape), group=group)
            ops = [send(group_peer=(me + 1) % size), receive(group_peer=(me - 1) % size)]
            works = dist.batch_isend_irecv(ops)
            return works[1] if async_op else works[1].result()
        case "objects":
            box: list[Any] = [None] * size
            dist.all_gather_object(box, value(me).tolist(), group=group)
            return box
        case _:
            raise AssertionError(spec.kind)


def same(got: Any, wanted: Any) -> bool:
    """True if ``got`` is what the oracle wants: shapes, dtypes and values."""
    if isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    if isinstance(wanted, np.ndarray):
        return (
            got.dtype == wanted.dtype
            and got.shape == wanted.shape
            and bool(np.all((got == wanted) | ((got != got) & (wanted != wanted))))
        )
    return type(got) is type(wanted) and got == wanted
