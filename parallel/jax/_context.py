"""Attention over a sequence that is split over ranks, inside ``jax.jit``.

Arrays are (batch, length, heads, head_dim); keys and values may have fewer heads. Each rank
computes the loss of its own positions: average gradients over ``mesh`` as in data parallelism.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from meshlib import DeviceMesh, ProcessGroup, get_world_size, jit
from meshlib.extend import to_whole_number
from parallel._groups import resolve
from parallel.jax._ring import Ring, attend

Group = ProcessGroup | DeviceMesh | None


def sequence_positions(
    length: int, mesh: Group = None, *, zigzag: bool = True
) -> npt.NDArray[np.int64]:
    """Return the sequence positions of this rank's ``length`` entries, shape (length,).

    The zigzag order cuts the sequence into 2n chunks for n ranks, and rank r has chunks r and
    2n - 1 - r. Few keys precede the early chunk and many precede the late one, so causal attention
    costs the same on all ranks. Without zigzag, rank r has the r-th of n chunks.

    Args:
        length: The number of positions on each rank. Must be even with ``zigzag``.
        mesh: The ranks: ``mesh["cp"]``, a process group, or None for the default group.
        zigzag: Use the zigzag order instead of consecutive positions.

    Returns:
        Integers in [0, length * n), ascending.

    Raises:
        ValueError: For an odd length with ``zigzag``.
        TypeError: If ``length`` is not an integer, or ``mesh`` not a set of ranks.
    """
    length, group = to_whole_number(length, "length"), resolve(mesh, "mesh")
    rank, size = group.rank(), group.size()
    if not zigzag:
        return np.arange(rank * length, (rank + 1) * length)
    _check_even(length, size)
    half = length // 2
    late = (2 * size - 1 - rank) * half
    return np.concatenate([np.arange(rank * half, (rank + 1) * half), np.arange(late, late + half)])


def split_sequence(x: Any, mesh: Group = None, *, dim: int = 1, zigzag: bool = True) -> Any:
    """Return this rank's positions of whole sequences, without communication.

    Args:
        x: A NumPy or JAX array, the same on all ranks, such as tokens (batch, length).
        mesh: The ranks: ``mesh["cp"]``, a process group, or None for the default group.
        dim: The dim of the sequence.
        zigzag: The order, which must be that of the attention; see ``sequence_positions``.

    Returns:
        A copy with 1/n of the positions.

    Raises:
        ValueError: For a length that is not divisible by the number of ranks (with ``zigzag``, by
            twice the number), or a dim that does not exist.
        TypeError: If ``mesh`` is not a set of ranks.
    """
    group = resolve(mesh, "mesh")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"x of shape {list(x.shape)} has no dim {dim}")
    length, rest = divmod(x.shape[dim], group.size() * (2 if zigzag else 1))
    if rest:
        chunks = f"{2 * group.size()} zigzag chunks of " if zigzag else ""
        raise ValueError(
            f"dim {dim} of x has length {x.shape[dim]}, which is not divisible by the {chunks}"
            f"{group.size()} ranks"
        )
    positions = sequence_positions(length * (2 if zigzag else 1), group, zigzag=zigzag)
    return x.take(positions, axis=dim)


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mesh: Group,
    *,
    causal: bool = True,
    zigzag: bool = True,
) -> jax.Array:
    """Return this rank's positions of softmax(q @ k.T / sqrt(head_dim)) @ v over whole sequences.

    ``k`` and ``v`` circulate around the ranks of ``mesh`` in n - 1 messages; the derivative
    circulates them again, with their gradients. No rank ever holds all keys. With ``causal``, query
    i attends to the keys up to i. With ``zigzag``, the sequence has 2n chunks, and rank r holds
    chunks r and 2n - 1 - r; otherwise each rank holds consecutive positions. Liu et al., "Ring
    Attention", arXiv:2310.01889. Supports first-order reverse-mode derivatives only.

    Raises ValueError, at trace time, for shapes that do not fit together, or an odd length with
    ``zigzag``.
    """
    _check(q, k, v)
    if zigzag:
        _check_even(q.shape[1], get_world_size(mesh))
    return _ring(q, k, v, Ring(mesh, causal, zigzag))


def ulysses_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mesh: Group, *, causal: bool = True
) -> jax.Array:
    """Return this rank's positions of softmax(q @ k.T / sqrt(head_dim)) @ v over whole sequences.

    An all-to-all over ``mesh`` sends each rank the whole sequence for 1/n of the heads; a second
    one returns the results. ``q``, ``k`` and ``v`` hold this rank's consecutive positions of the
    sequence. With ``causal``, query i attends to the keys up to i. Jacobs et al., "DeepSpeed
    Ulysses", arXiv:2309.14509.

    Raises ValueError, at trace time, for shapes that do not fit together, or a number of heads
    that is not divisible by the number of ranks.
    """
    _check(q, k, v)
    size = get_world_size(mesh)
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] % size:
            raise ValueError(
                f"{name} has {x.shape[2]} heads, which are not divisible by the {size} ranks of"
                f" {mesh}; expected the same number of whole heads for each rank"
            )

    def cross(x: jax.Array, split: int, concat: int) -> jax.Array:
        return jit.all_to_all(x, mesh, split_axis=split, concat_axis=concat, tiled=True)

    # JAX's own attention computes its softmax in float32, for any input dtype.
    out, _ = attend(*(cross(x, 2, 1) for x in (q, k, v)), causal=causal)
    return cross(out.astype(q.dtype), 1, 2)


def _check_even(length: int, size: int) -> None:
    if length % 2:
        raise ValueError(
            f"each of {size} ranks has {length} positions of a sequence of {length * size}, which"
            f" is not divisible by the {2 * size} zigzag chunks, two for each rank"
        )


def _check(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    fits = (
        q.ndim == k.ndim == 4
        and k.shape == v.shape
        and q.shape[:2] == k.shape[:2]
        and q.shape[3] == k.shape[3]
        and q.shape[2] % max(k.shape[2], 1) == 0
    )
    if not fits:
        raise ValueError(
            f"q, k and v have shapes {q.shape}, {k.shape}, {v.shape}; expected (batch, length,"
            " heads, head_dim), with k and v alike and the heads of q a multiple of those of k"
        )


def _ring_of(q: jax.Array, k: jax.Array, v: jax.Array, ring: Ring) -> jax.Array:
    return _ring_forward(q, k, v, ring)[0]


_rule: Any = jax.custom_vjp(_ring_of, nondiff_argnums=(3,))
_ring: jax.custom_vjp[jax.Array] = _rule


def _ring_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, ring: Ring
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, logs = ring.forward(q, k, v)
    return out.astype(q.dtype), (q, k, v, out, logs)


def _ring_backward(
    ring: Ring, saved: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[jax.Array, ...]:
    q, k, v, out, logs = saved
    grads = ring.backward(q, k, v, out, logs, grad)
    return tuple(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))


_ring.defvjp(_ring_forward, _ring_backward)
