"""Attention over a sequence that is split over ranks: by a ring, or by an all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt

from meshlib import ProcessGroup
from parallel._arrays import Array, namespace
from parallel._checks import check_instance
from parallel._core.attention.ring import MessageRotator, RingAlgorithm, half_of, positions_of
from parallel._groups import GroupLike, resolve
from parallel.nn._layers.attention import DotProductAttention, MultiHeadAttention
from parallel.nn._module import Module


class RingAttention(DotProductAttention):
    """``DotProductAttention`` over the ranks of ``mesh``, each with a part of the sequence.

    Keys and values go round the ranks, and round again, with their gradients, in backward. See
    ``parallel._core.attention.ring``.

    Args:
        mesh: The ranks: ``mesh["cp"]``, a process group, or None for the default group.
        causal: Query i attends to the keys up to i of the whole sequence, and to no later one.
        zigzag: Use the zig-zag order, not consecutive places; see ``sequence_positions``. All ranks
            have equally many places, an even number for a zig-zag.

    Raises:
        TypeError: For a value that is not a set of ranks.
        ValueError: For ranks without this one.
    """

    def __init__(
        self, mesh: GroupLike | None = None, causal: bool = True, *, zigzag: bool = True
    ) -> None:
        super().__init__(causal)
        self.spread(resolve(mesh, "mesh"), zigzag)

    def spread(self, group: ProcessGroup, zigzag: bool) -> None:
        """Compute over ``group`` from now on, in the order that ``zigzag`` says."""
        self.group: ProcessGroup = group
        self.zigzag: bool = bool(zigzag)

    def positions(self, length: int) -> npt.NDArray[np.int64]:
        return positions_of(length, self.group, self.zigzag)

    def check(self, q: Array, k: Array, v: Array) -> None:
        super().check(q, k, v)
        if k.dtype != v.dtype:
            raise TypeError(f"v must have the dtype of k, {k.dtype.name}, got {v.dtype.name}")
        if self.zigzag:
            half_of(q.shape[1], self.group.size())

    def compute(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        ring = self._ring(q)
        return ring.forward(MessageRotator(self.group, ring.xp), q, k, v)

    def derivative(
        self, q: Array, k: Array, v: Array, out: Array, logs: Array, grad: Array
    ) -> tuple[Array, Array, Array]:
        ring = self._ring(q)
        return ring.backward(MessageRotator(self.group, ring.xp), q, k, v, out, logs, grad)

    def _ring(self, q: Array) -> RingAlgorithm:
        group = self.group
        return RingAlgorithm(namespace(q), group.rank(), group.size(), self.causal, self.zigzag)


class UlyssesAttention(DotProductAttention):
    """``DotProductAttention`` over the ranks of ``mesh``, each with a part of the sequence.

    An all-to-all gives each rank the whole sequence of 1/n of the heads, another one takes the
    results back: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509. Rank r has the r-th of n
    equal parts of the sequence.

    Args:
        mesh: The ranks: ``mesh["cp"]``, a process group, or None for the default group. The heads
            here, of queries and of keys, must divide by their number.
        causal: Query i attends to the keys up to i of the whole sequence, and to no later one.

    Raises:
        TypeError: For a value that is not a set of ranks.
        ValueError: For ranks without this one.
    """

    def __init__(self, mesh: GroupLike | None = None, causal: bool = True) -> None:
        super().__init__(causal)
        self.spread(resolve(mesh, "mesh"))

    def spread(self, group: ProcessGroup) -> None:
        """Compute over ``group`` from now on."""
        self.group: ProcessGroup = group

    def positions(self, length: int) -> npt.NDArray[np.int64]:
        return positions_of(length, self.group, zigzag=False)

    def check(self, q: Array, k: Array, v: Array) -> None:
        super().check(q, k, v)
        for name, x in (("k", k), ("v", v)):
            if x.dtype != q.dtype:
                raise TypeError(
                    f"{name} must have the dtype of q, {q.dtype.name}, got {x.dtype.name}"
                )
        check_heads(q.shape[2], k.shape[2], self.group)

    def forward(self, q: Array, k: Array, v: Array) -> Array:
        """Map q, this rank's places (batch, length, heads, head_dim), to the same shape.

        k and v are (batch, length, kv_heads, head_dim); heads divides by kv_heads, both divide by
        the number of ranks. All ranks have equally many places.

        Raises ValueError for other shapes, TypeError for a value that is not an array.
        """
        self.check(q, k, v)
        out = self.attend(*self._to_heads([q, k, v]))
        return self._to_places([out])[0]

    def backward(self, grad: Array) -> tuple[Array, Array, Array]:
        grads = super().backward(*self._to_heads([grad]))
        q_grad, k_grad, v_grad = self._to_places(grads)
        return q_grad, k_grad, v_grad

    def _to_heads(self, arrays: Sequence[Array]) -> list[Array]:
        """Return (batch, length, heads, d) as (batch, n * length, heads / n, d): one all-to-all."""
        xp, size = namespace(arrays[0]), self.group.size()
        rows = [xp.moveaxis(x.reshape(*x.shape[:2], size, -1, x.shape[3]), 2, 0) for x in arrays]
        came = xp.moveaxis(self._exchanged(rows), 0, 1)
        return [x.reshape(x.shape[0], -1, *x.shape[3:]) for x in _parts(came, rows)]

    def _to_places(self, arrays: Sequence[Array]) -> list[Array]:
        """Return (batch, n * length, heads / n, d) as (batch, length, heads, d): one all-to-all."""
        xp, size = namespace(arrays[0]), self.group.size()
        rows = [xp.moveaxis(x.reshape(x.shape[0], size, -1, *x.shape[2:]), 1, 0) for x in arrays]
        came = xp.moveaxis(self._exchanged(rows), 0, 2)
        return [x.reshape(*x.shape[:2], -1, x.shape[4]) for x in _parts(came, rows)]

    def _exchanged(self, rows: Sequence[Array]) -> Array:
        """Send row i of each of ``rows``, (n, batch, length, heads, d), to rank i, heads joined."""
        xp = namespace(rows[0])
        sent = xp.ascontiguousarray(xp.concatenate(rows, axis=3))
        if self.group.size() == 1:
            return sent
        return self.group.all_to_all_single(xp.empty_like(sent), sent)


def _parts(joined: Array, rows: Sequence[Array]) -> list[Array]:
    """Take ``joined`` apart again along the heads, its last dim but one, as ``rows`` have them."""
    ends = np.cumsum([x.shape[3] for x in rows]).tolist()
    return namespace(joined).split(joined, ends[:-1], axis=-2)


def check_heads(heads: int, kv_heads: int, group: ProcessGroup, where: str = " here") -> None:
    """Raise ValueError unless both numbers of heads divide by the ranks of ``group``."""
    for name, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count % group.size():
            raise ValueError(
                f"there are {count} {name}{where}, which do not divide by the {group.size()} ranks"
                f" of {group}: an all-to-all gives each rank whole heads; expected a multiple, or"
                " method='ring'"
            )


_M = TypeVar("_M", bound=Module)
Method = Literal["ring", "all_to_all"]


def context_parallel(
    module: _M,
    mesh: GroupLike | None = None,
    *,
    method: Method = "ring",
    zigzag: bool | None = None,
) -> _M:
    """Let all attention in ``module`` compute over sequences that are split over ``mesh``.

    Each ``DotProductAttention`` becomes, in place, a ``RingAttention`` or a ``UlyssesAttention``;
    nothing else changes, for all other layers compute place by place. Each rank passes its places
    of the sequences through the model, ``split_sequence(tokens, mesh["cp"])``, and of the targets;
    gradients are to be averaged over ``mesh`` as over data-parallel ranks.

    Args:
        module: A ``parallel.nn.Module``.
        mesh: The ranks: ``mesh["cp"]``, a process group, or None for the default group.
        method: "ring": keys and values go round; "all_to_all": each rank gets whole heads.
        zigzag: For the ring, which places each rank has, see ``sequence_positions``: a zig-zag, or
            a row. None: a zig-zag for causal attention. An all-to-all has a row.

    Returns:
        The ``module``.

    Raises:
        ValueError: For a module without attention, heads that do not divide by the ranks and an
            all-to-all, a zig-zag and an all-to-all, another method. Nothing was changed then.
        TypeError: For a value that is not a module or a set of ranks, and attention that is spread
            already.
    """
    check_instance(module, Module, "module")
    group = resolve(mesh, "mesh")
    if method not in get_args(Method):
        raise ValueError(f"method must be 'ring' or 'all_to_all', got {method!r}")
    if zigzag and method == "all_to_all":
        raise ValueError("zigzag is for method='ring'; with 'all_to_all' sequences lie in a row")
    found = {
        path: one for path, one in module.named_modules() if isinstance(one, DotProductAttention)
    }
    if not found:
        raise ValueError(
            f"module {type(module).__name__} has no attention to be spread over {group}: no"
            " DotProductAttention is in it"
        )
    for path, one in found.items():
        if type(one) is not DotProductAttention:
            raise TypeError(
                f"{path!r} must be a DotProductAttention, is a {type(one).__name__}: it is spread"
                " over ranks already, or has an attention of its own"
            )
    if method == "all_to_all":
        for path, one in module.named_modules():
            if isinstance(one, MultiHeadAttention):
                # Those that tensor parallel, if any, has left here.
                heads, kv_heads = (x.out_features // one.head_dim for x in (one.query, one.key))
                check_heads(heads, kv_heads, group, f" in {path!r}")
    for one in found.values():
        if method == "ring":
            one.__class__ = RingAttention
            cast(RingAttention, one).spread(group, one.causal if zigzag is None else zigzag)
        else:
            one.__class__ = UlyssesAttention
            cast(UlyssesAttention, one).spread(group)
    return module
