"""Alignment of the operands of an operation, which all rules use.

Each dim of each operand has a label. Dims with the same label correspond: they broadcast against
each other, or have the same letter in ``einsum``. A label is split in the same way in all operands.
If an operand's dim is not split, it is split locally, without a message. Anything else is an error
that names the operand to redistribute.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlib._mesh.device_mesh import DeviceMesh
from meshlib.sharding._global_array import GlobalArray, ShardingError
from meshlib.sharding._local import Array, relative
from meshlib.sharding._sharding import Sharding
from meshlib.sharding._sharding_value import LINEAR, dim_key

Label = Hashable
Split = tuple[int, ...]
PartialPairs = tuple[tuple[int, str], ...]


@dataclass(slots=True)
class Aligned:
    """Aligned operands: this rank's part of each, and the split of each label."""

    mesh: DeviceMesh
    locals: list[Array]
    splits: dict[Label, Split]

    def sharding(
        self, labels: Sequence[Label], partial: Sequence[tuple[int, str]] = ()
    ) -> Sharding:
        """Return the sharding of a result whose dims have ``labels``."""
        dims = [self.splits.get(label, ()) for label in labels]
        return Sharding.of_positions(self.mesh, dims, partial)


def align(name: str, operands: Sequence[GlobalArray], labels: Sequence[Sequence[Label]]) -> Aligned:
    """Align ``operands`` without a message.

    Raises ShardingError, naming the operation ``name``, if that is not possible.
    """
    mesh = one_mesh(name, operands)
    lengths: dict[Label, int] = {}
    splits: dict[Label, Split] = {}
    for x, own in zip(operands, labels, strict=True):
        for d, label in enumerate(own):
            lengths[label] = x.shape[d] if lengths.get(label, 1) == 1 else lengths[label]
    for number, (x, own) in enumerate(zip(operands, labels, strict=True)):
        for d, label in enumerate(own):
            split, known = x.sharding.split_of(d), splits.get(label, ())
            if split and x.shape[d] != lengths[label]:
                raise _misfit(name, number, x, f"dim {d}, which is repeated, is split", {d: ()})
            longer, shorter = (split, known) if len(split) > len(known) else (known, split)
            if longer[: len(shorter)] != shorter:
                wanted = {k: splits.get(one, ()) for k, one in enumerate(own)}
                why = f"dim {d} is split by {_names(mesh, split)}, elsewhere by"
                raise _misfit(name, number, x, f"{why} {_names(mesh, known)}", wanted)
            splits[label] = longer
    _check_each_once(name, mesh, operands, labels, splits)
    locals_: list[Array] = []
    for number, (x, own) in enumerate(zip(operands, labels, strict=True)):
        fits = [x.shape[d] == lengths[label] for d, label in enumerate(own)]
        dims = [splits[label] if fit else () for label, fit in zip(own, fits, strict=True)]
        added = {i for dim in dims for i in dim} - {i for dim in x.sharding.dims for i in dim}
        partial = {i for i, _ in x.sharding.partial_dims}
        if added & partial:
            why = "it is partial where others are split"
            raise _misfit(name, number, x, why, dict(enumerate(dims)))
        target = Sharding.of_positions(mesh, dims, x.sharding.partial_dims)
        local = x.local
        if target != x.sharding:
            local = local[relative(target.slices(x.shape), x.sharding.slices(x.shape))]
        locals_.append(local)
    return Aligned(mesh, locals_, splits)


def one_mesh(name: str, operands: Sequence[GlobalArray]) -> DeviceMesh:
    """Return the mesh that all ``operands`` are on; raise ShardingError if they differ."""
    mesh = operands[0].mesh
    for number, x in enumerate(operands[1:], 1):
        if x.mesh != mesh:
            raise ShardingError(
                f"{name}: operand 0 is on {mesh} and operand {number} on {x.mesh};"
                " redistribute one of them to a Sharding on the other's mesh"
            )
    return mesh


def stays_partial(x: GlobalArray, op: str, dtype: np.dtype[Any]) -> bool:
    """True if ``op`` with result dtype ``dtype`` may work on partial values of ``x`` directly.

    That holds for the same op and dtype. In a wider dtype, integers that wrapped around would
    differ. Sums of bools are not bools, and 16-bit floats may overflow in a part but not in the
    sum.
    """
    ops = LINEAR if op == "sum" else {op}
    wide = dtype.kind in "iu" or (dtype.kind in "fc" and dtype.itemsize >= 4)
    exact = wide or op in ("max", "min")
    return exact and x.dtype == dtype and all(own in ops for _, own in x.sharding.partial_dims)


def match_partial(
    operands: Sequence[GlobalArray], stay: bool
) -> tuple[list[GlobalArray], PartialPairs]:
    """Return the operands with equal partial dims, and these partial dims.

    Partial values stay if ``stay`` and all operands have the same partial dims; otherwise they are
    reduced.
    """
    partial = operands[0].sharding.partial_dims
    if stay and all(x.sharding.partial_dims == partial for x in operands):
        return list(operands), partial
    return [x.reduced() for x in operands], ()


def summed_as(op: str, dtype: np.dtype[Any], split: bool) -> tuple[str, np.dtype[Any]]:
    """Return the op and the dtype of the partial values if ``op`` reduces a ``split`` dim.

    The sum of bools is their "or". Sums of floats of 16 bits or fewer are made in float32 and
    rounded once.
    """
    if dtype == np.bool_:
        return {"sum": "max", "product": "min"}.get(op, op), dtype
    narrow = op in ("sum", "product") and dtype.kind in "fV" and dtype.itemsize < 4
    return op, np.dtype(np.float32) if split and narrow else dtype


def check_plain(name: str, value: Any, mesh: DeviceMesh) -> Any:
    """Return an operand other than a GlobalArray; raise ShardingError unless it is a scalar."""
    if value is None or np.ndim(value) == 0:
        return value
    raise belongs_nowhere(name, value, mesh)


def belongs_nowhere(name: str, value: Any, mesh: DeviceMesh) -> ShardingError:
    """Return the error for an operand that should have been a GlobalArray."""
    return ShardingError(
        f"{name}: an operand is a {type(value).__name__} of shape {np.shape(value)} that belongs to"
        f" no mesh, while another is a DArray on {mesh}; use distribute_array(operand,"
        " Sharding(mesh)), or DArray.from_local if it is a part"
    )


def _check_each_once(
    name: str,
    mesh: DeviceMesh,
    operands: Sequence[GlobalArray],
    labels: Sequence[Sequence[Label]],
    splits: dict[Label, Split],
) -> None:
    """Raise ShardingError if a mesh dim splits two labels, or a label that an operand has twice."""
    seen: dict[int, Label] = {}
    for label, split in splits.items():
        for i in split:
            if i in seen:
                shown = _names(mesh, (i,))
                number = next(
                    k
                    for k in reversed(range(len(operands)))
                    if any(i in dim for dim in operands[k].sharding.dims)
                )
                wanted = {
                    d: tuple(j for j in operands[number].sharding.split_of(d) if j != i)
                    for d in range(operands[number].ndim)
                }
                why = f"mesh dim {shown} splits one of its dims, and another dim of the operation"
                raise _misfit(name, number, operands[number], why, wanted)
            seen[i] = label
    for number, (x, own) in enumerate(zip(operands, labels, strict=True)):
        twice = [d for d, label in enumerate(own) if list(own).count(label) > 1]
        if any(splits[own[d]] for d in twice):
            why = f"dims {twice} have the same label and are split"
            raise _misfit(name, number, x, why, dict.fromkeys(twice, ()))


def _misfit(
    name: str, number: int, x: GlobalArray, why: str, wanted: dict[int, Split]
) -> ShardingError:
    dims = [wanted.get(d, x.sharding.split_of(d)) for d in range(x.ndim)]
    used: set[int] = set()
    kept: list[Split] = []
    for dim in dims:
        kept.append(tuple(i for i in dim if i not in used))
        used.update(dim)
    spec = Sharding.of_positions(x.mesh, kept).spec
    return ShardingError(
        f"{name}: operand {number} ({x!r}): {why}; operands are not redistributed implicitly: call"
        f" redistribute({spec}) on it, or give the others its sharding"
    )


def _names(mesh: DeviceMesh, split: Split) -> str:
    return ", ".join(repr(dim_key(mesh, i)) for i in split) or "nothing"
