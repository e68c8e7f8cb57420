"""The notations of a sharding: JAX's ``P("dp", None)``, torch's ``[Shard(0), Replicate()]``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from meshlib._mesh.names import DimKey
from transport._checks import to_whole_number
from transport._operands.reduce_op import RedOpType, ReduceOp

REDUCTIONS: dict[str, ReduceOp] = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
}
"""The reductions of partial values, by torch's names."""

Entry = DimKey | tuple[DimKey, ...] | None


class P(tuple[Entry, ...]):
    """The mesh dims that split each array dim, like ``jax.sharding.PartitionSpec``.

    An entry is a mesh dim (name or number), a tuple of mesh dims, the outermost first, or None for
    a dim that is not split. Array dims without an entry are not split. ``("dp",)`` is stored as
    ``"dp"``, ``()`` as None. Raises TypeError for other entries.
    """

    __slots__ = ()

    def __new__(cls, *entries: Entry | list[DimKey]) -> Self:
        """Make a spec of ``entries``, one for each array dim."""
        return super().__new__(cls, (_entry(entry, entries) for entry in entries))

    def __getnewargs__(self) -> tuple[Entry, ...]:
        """Return the arguments for pickle."""
        return tuple(self)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


def _entry(entry: Any, entries: Any) -> Entry:
    if entry is None:
        return None
    keys = tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)
    for key in keys:
        if not isinstance(key, str) and (isinstance(key, bool) or not hasattr(key, "__index__")):
            raise TypeError(
                f"spec {tuple(entries)!r} has {entry!r}; expected a mesh dim's name or number,"
                " a tuple of them, or None"
            )
    keys = tuple(key if isinstance(key, str) else int(key) for key in keys)
    return None if not keys else keys[0] if len(keys) == 1 else keys


@dataclass(frozen=True, slots=True)
class Shard:
    """Array dim ``dim`` is split along the mesh dim at this placement's position in the list."""

    dim: int

    def __post_init__(self) -> None:
        if to_whole_number(self.dim, "dim") < 0:
            raise ValueError(f"Shard({self.dim}): count array dims from the first, which is 0")


@dataclass(frozen=True, slots=True)
class Replicate:
    """All ranks along the mesh dim at this placement's position have the same values."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction by ``reduce_op`` along the mesh dim at this placement's position.

    ``reduce_op`` is "sum", "avg", "product", "min" or "max". Raises ValueError for another op.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        object.__setattr__(self, "reduce_op", reduction_name(self.reduce_op))


Placement = Shard | Replicate | Partial


def reduction_name(op: object) -> str:
    """Return the name in ``REDUCTIONS`` of a name or ReduceOp; raise ValueError if it has none."""
    kind = op.kind if isinstance(op, ReduceOp) else op
    name = kind.name.lower() if isinstance(kind, RedOpType) else kind
    if isinstance(name, str) and name in REDUCTIONS:
        return name
    raise ValueError(f"partial op {op!r}; expected one of {', '.join(REDUCTIONS)}")


def read_spec(spec: Any, mesh_ndim: int) -> tuple[P, dict[DimKey, str]]:
    """Return a spec in JAX's or torch's notation as a ``P``, and the partial mesh dims with ops.

    A list that contains a placement is torch's: it has one placement for each mesh dim. If two mesh
    dims split an array dim, the first is the outer one. Raises TypeError or ValueError for an
    invalid spec.
    """
    if spec is None:
        return P(), {}
    if isinstance(spec, P):
        return spec, {}
    # jax.sharding.PartitionSpec lists the dims of pending sums separately.
    unreduced: dict[DimKey, str] = dict.fromkeys(getattr(spec, "unreduced", ()), "sum")
    spec = getattr(spec, "partitions", spec)
    if isinstance(spec, (str, int)) or not isinstance(spec, Iterable):
        raise TypeError(
            f"spec is {spec!r}; expected P(...), such as P('dp', None), or a list of placements"
        )
    entries = tuple(spec)
    placed = [isinstance(entry, Placement) for entry in entries]
    if not any(placed):
        return P(*entries), unreduced
    if not all(placed) or len(entries) != mesh_ndim:
        raise ValueError(
            f"spec {list(entries)!r}; expected one placement for each of the mesh's {mesh_ndim}"
            " dims: Shard, Replicate or Partial"
        )
    split: dict[int, list[DimKey]] = {}
    partial: dict[DimKey, str] = {}
    for position, entry in enumerate(entries):
        if isinstance(entry, Shard):
            split.setdefault(entry.dim, []).append(position)
        elif isinstance(entry, Partial):
            partial[position] = entry.reduce_op
    return P(*(split.get(i, []) for i in range(max(split, default=-1) + 1))), partial


def parse_spec(text: str) -> tuple[P, dict[DimKey, str]]:
    """Parse ``"dp, None, (dp2, tp); sum: cp"``: return a ``P`` and the partial dims.

    An enclosing ``P(...)`` and quotes are allowed. Raises ValueError for anything else.
    """
    dims, *rest = (
        re.sub(r"^\s*P\((.*)\)\s*$", r"\1", text).replace("'", "").replace('"', "").split(";")
    )
    entries: list[Entry] = []
    if dims.strip():
        for part in re.split(r",(?![^()]*\))", dims.strip().removesuffix(",")):
            inside = re.fullmatch(r"\s*\((.*)\)\s*", part)
            words = [_word(word, text) for word in (inside[1] if inside else part).split(",")]
            if inside and None in words:
                raise _no_spec(text)
            entries.append(tuple(word for word in words if word is not None))
    partial: dict[DimKey, str] = {}
    for part in rest:
        op, _, names = part.partition(":")
        for name in names.split(","):
            word = _word(name, text)
            if word is None:
                raise _no_spec(text)
            partial[word] = reduction_name(op.strip())
    return P(*entries), partial


def _word(word: str, text: str) -> DimKey | None:
    word = word.strip()
    if word == "None":
        return None
    if word.isdecimal():
        return int(word)
    if not word.isidentifier():
        raise _no_spec(text)
    return word


def _no_spec(text: str) -> ValueError:
    return ValueError(
        f"spec {text!r} is invalid; expected a mesh dim, None or several mesh dims for each array"
        " dim, and '; sum: tp' for sums that are partial along tp: 'dp, None, (dp2, ep); sum: tp'"
    )
