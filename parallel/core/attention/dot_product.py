"""Softmax attention of one block of queries over one block of keys, and its derivative.

What is kept between the two is the result and the logarithm of each softmax's denominator; the
softmax itself is computed again (Dao et al., "FlashAttention", arXiv:2205.14135, sections 3.1 and
B.2). Results over parts of the keys are merged by these logarithms: ``merge``.

Queries are (batch, length, heads, head_dim), keys and values (batch, length, kv_heads, head_dim):
each of them serves ``heads / kv_heads`` neighbouring heads of queries (Ainslie et al., "GQA",
arXiv:2305.13245). The logarithms are (batch, kv_heads, heads / kv_heads, length, 1).
"""

from __future__ import annotations

from collections.abc import Iterator

from parallel.arrays import Array, namespace

ROWS = 128
"""How many queries are computed at a time: scores take this many rows, not the sequence's."""


def attend(q: Array, k: Array, v: Array, scale: float, causal: bool) -> tuple[Array, Array]:
    """Return softmax(scale * q @ k.T) @ v, of the shape of ``q``, and the logarithms.

    With ``causal``, query i attends to the keys up to i. Results for 16-bit floats, and their
    logarithms, are float32.
    """
    xp = namespace(q)
    batch, length, heads, last = q.shape
    kv_heads = k.shape[2]
    dtype = "float32" if q.dtype.itemsize < 4 else q.dtype
    out = xp.empty((batch, length, kv_heads, heads // kv_heads, last), dtype=dtype)
    logs = xp.empty((batch, kv_heads, heads // kv_heads, length, 1), dtype=dtype)
    for rows, keys in _tiles(length, k.shape[1], causal):
        weights = _scores(q[:, rows], k[:, keys], scale, rows.start if causal else None)
        largest = weights.max(axis=-1, keepdims=True)
        weights -= largest
        weights = xp.exp(weights, out=weights)
        total = weights.sum(axis=-1, keepdims=True)
        part = weights @ _by_group(v[:, keys])
        part /= total
        out[:, rows] = part.transpose(0, 3, 1, 2, 4)
        logs[..., rows, :] = largest + xp.log(total)
    return out.reshape(q.shape), logs


def attend_backward(
    q: Array, k: Array, v: Array, grad: Array, along: Array, logs: Array, scale: float, causal: bool
) -> tuple[Array, Array, Array]:
    """Return the gradients of ``q``, ``k`` and ``v``, of the dtype of the logarithms.

    ``grad`` is that of the result over all keys, ``logs`` its logarithms and ``along`` what
    ``component_along`` returned: ``k`` may be a part of the keys only.
    """
    xp = namespace(q)
    groups = q.shape[2] // k.shape[2]
    q_grad = xp.empty(q.shape, dtype=logs.dtype)
    k_grad, v_grad = (xp.zeros(x.shape, dtype=logs.dtype) for x in (k, v))
    for rows, keys in _tiles(q.shape[1], k.shape[1], causal):
        of_rows, of_keys = q[:, rows], k[:, keys]
        weights = _scores(of_rows, of_keys, scale, rows.start if causal else None)
        weights -= logs[..., rows, :]
        weights = xp.exp(weights, out=weights)
        of_out = _by_head(grad[:, rows], groups).astype(weights.dtype, copy=False)
        # The heads that share a key add up: their rows, one below the other, are one matrix.
        added = _transposed(_joined(weights)) @ _joined(of_out)
        v_grad[:, keys] += added.transpose(0, 2, 1, 3)
        of_scores = of_out @ _transposed(_by_group(v[:, keys]))
        of_scores -= along[..., rows, :]
        of_scores *= weights
        of_scores *= scale
        added = _transposed(_joined(of_scores)) @ _joined(_by_head(of_rows, groups))
        k_grad[:, keys] += added.transpose(0, 2, 1, 3)
        q_grad[:, rows] = _from_heads(of_scores @ _by_group(of_keys))
    return q_grad, k_grad, v_grad


def component_along(out: Array, grad: Array, kv_heads: int) -> Array:
    """Return the product of result and gradient, summed for each query, shaped as logarithms."""
    product = (out * grad).sum(axis=-1, keepdims=True)
    return _by_head(product, out.shape[2] // kv_heads)


def merge(out: Array, logs: Array, part: Array, part_logs: Array) -> tuple[Array, Array]:
    """Return the result over all keys of results over two parts of them, and its logarithms."""
    xp = namespace(out)
    together = xp.logaddexp(logs, part_logs)
    # What each part counts, (batch, length, heads, 1).
    first, second = (_from_heads(xp.exp(one - together)) for one in (logs, part_logs))
    return out * first + part * second, together


def _tiles(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield which queries are computed at a time, and which keys they see at most."""
    for begin in range(0, queries, ROWS):
        end = min(begin + ROWS, queries)
        yield slice(begin, end), slice(end if causal else keys)


def _scores(q: Array, k: Array, scale: float, first: int | None) -> Array:
    """Return scale * q @ k.T, (batch, kv_heads, heads / kv_heads, queries, keys), a new array.

    ``first``: the place of the first query, which sees keys up to its own; None: all see all.
    """
    scores = _by_head(q, q.shape[2] // k.shape[2]) @ _transposed(_by_group(k))
    if scores.dtype.itemsize < 4:
        scores = scores.astype("float32")
    scores *= scale
    if first is not None:
        xp = namespace(q)
        rows, columns = xp.arange(scores.shape[-2]), xp.arange(scores.shape[-1])
        xp.copyto(scores, -xp.inf, where=columns > rows[:, None] + first)
    return scores


def _by_head(x: Array, groups: int) -> Array:
    """Return (batch, length, heads, n) as (batch, heads / groups, groups, length, n)."""
    batch, length, heads, last = x.shape
    return x.reshape(batch, length, heads // groups, groups, last).transpose(0, 2, 3, 1, 4)


def _by_group(x: Array) -> Array:
    """Return (batch, length, kv_heads, n) as (batch, kv_heads, 1, length, n)."""
    return x.transpose(0, 2, 1, 3)[:, :, None]


def _from_heads(x: Array) -> Array:
    """Return (batch, kv_heads, groups, length, n) as (batch, length, heads, n), contiguous."""
    batch, kv_heads, groups, length, last = x.shape
    # Or who takes the heads together makes a copy, and both are kept for backward.
    x = namespace(x).ascontiguousarray(x.transpose(0, 3, 1, 2, 4))
    return x.reshape(batch, length, kv_heads * groups, last)


def _joined(x: Array) -> Array:
    """Return (batch, kv_heads, groups, length, n) as (batch, kv_heads, groups * length, n)."""
    batch, kv_heads, groups, length, last = x.shape
    return x.reshape(batch, kv_heads, groups * length, last)


def _transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2)
