"""Softmax attention of one block of queries over one block of keys, and its derivative.

The forward pass keeps the result and the logarithm of each softmax's denominator. The derivative
computes the softmax again (Dao et al., "FlashAttention", arXiv:2205.14135, sections 3.1 and B.2).
``merge`` joins results over parts of the keys by these logarithms.

Queries are (batch, length, heads, head_dim), keys and values (batch, length, kv_heads, head_dim):
each of them serves ``heads / kv_heads`` neighbouring heads of queries (Ainslie et al., "GQA",
arXiv:2305.13245). The logarithms are (batch, kv_heads, heads / kv_heads, length, 1). ``xp`` is the
arrays' library, with NumPy's interface; JAX's arrays stay as they are, others are written to.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallel._arrays import Array, Namespace, added_at

ROWS = 128
"""The number of queries computed at a time: scores take this many rows, not the sequence's."""


def attend(
    xp: Namespace, q: Array, k: Array, v: Array, *, causal: bool, rows: int = ROWS
) -> tuple[Array, Array]:
    """Return softmax(q @ k.T / sqrt(head_dim)) @ v, of the shape of ``q``, and the logarithms.

    With ``causal``, query i attends to the keys up to i. Results for 16-bit floats, and their
    logarithms, are float32. ``rows`` queries are computed at a time.
    """
    outs: list[Array] = []
    logs: list[Array] = []
    for queries, keys in _tiles(q.shape[1], k.shape[1], causal, rows):
        weights = _scores(xp, q[:, queries], k[:, keys], queries.start if causal else None)
        largest = weights.max(axis=-1, keepdims=True)
        weights -= largest
        weights = _exp(xp, weights)
        total = weights.sum(axis=-1, keepdims=True)
        out = weights @ _by_group(v[:, keys])
        out /= total
        outs.append(out.transpose(0, 3, 1, 2, 4))
        logs.append(largest + xp.log(total))
    return xp.concatenate(outs, axis=1).reshape(q.shape), xp.concatenate(logs, axis=-2)


def attend_backward(
    xp: Namespace,
    q: Array,
    k: Array,
    v: Array,
    grad: Array,
    along: Array,
    logs: Array,
    *,
    causal: bool,
    rows: int = ROWS,
) -> tuple[Array, Array, Array]:
    """Return the gradients of ``q``, ``k`` and ``v``, of the dtype of the logarithms.

    ``grad`` is that of the result over all keys, ``logs`` its logarithms and ``along`` what
    ``component_along`` returned: ``k`` may be a part of the keys only.
    """
    groups = q.shape[2] // k.shape[2]
    q_grads: list[Array] = []
    k_grad, v_grad = (xp.zeros(x.shape, dtype=logs.dtype) for x in (k, v))
    for queries, keys in _tiles(q.shape[1], k.shape[1], causal, rows):
        of_rows, of_keys = q[:, queries], k[:, keys]
        weights = _scores(xp, of_rows, of_keys, queries.start if causal else None)
        weights -= logs[..., queries, :]
        weights = _exp(xp, weights)
        of_out = _by_head(grad[:, queries], groups).astype(weights.dtype)
        # The heads that share a key add up: their rows, one below the other, are one matrix.
        of_values = _transposed(_joined(weights)) @ _joined(of_out)
        v_grad = added_at(v_grad, (slice(None), keys), of_values.transpose(0, 2, 1, 3))
        of_scores = of_out @ _transposed(_by_group(v[:, keys]))
        of_scores -= along[..., queries, :]
        of_scores *= weights
        of_scores *= q.shape[-1] ** -0.5
        added = _transposed(_joined(of_scores)) @ _joined(_by_head(of_rows, groups))
        k_grad = added_at(k_grad, (slice(None), keys), added.transpose(0, 2, 1, 3))
        q_grads.append((of_scores @ _by_group(of_keys)).transpose(0, 3, 1, 2, 4))
    return xp.concatenate(q_grads, axis=1).reshape(q.shape), k_grad, v_grad


def component_along(out: Array, grad: Array, kv_heads: int) -> Array:
    """Return the product of result and gradient, summed for each query, shaped as logarithms."""
    product = (out * grad).sum(axis=-1, keepdims=True)
    return _by_head(product, out.shape[2] // kv_heads)


def merge(
    xp: Namespace, out: Array, logs: Array, part: Array, part_logs: Array
) -> tuple[Array, Array]:
    """Return the result over all keys of results over two parts of them, and its logarithms."""
    together = xp.logaddexp(logs, part_logs)
    # The weight of each part, (batch, length, heads, 1).
    first, second = (_from_heads(xp.exp(one - together)) for one in (logs, part_logs))
    return out * first + part * second, together


def _tiles(queries: int, keys: int, causal: bool, rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield which queries are computed at a time, and which keys they see at most."""
    for begin in range(0, queries, rows):
        end = min(begin + rows, queries)
        yield slice(begin, end), slice(end if causal else keys)


def _scores(xp: Namespace, q: Array, k: Array, first: int | None) -> Array:
    """Return q @ k.T / sqrt(head_dim), (batch, kv_heads, heads / kv_heads, queries, keys).

    A new array, float32 or wider. ``first``: the place of the first query, which sees keys up to
    its own; None: all see all.
    """
    dtype = "float32" if q.dtype.itemsize < 4 else q.dtype
    queries, keys = _by_head(q, q.shape[2] // k.shape[2]), _transposed(_by_group(k))
    scores = queries.astype(dtype) @ keys.astype(dtype)
    scores *= q.shape[-1] ** -0.5
    if first is not None:
        rows, columns = xp.arange(scores.shape[-2]), xp.arange(scores.shape[-1])
        scores += xp.where(columns > rows[:, None] + first, -xp.inf, 0).astype(scores.dtype)
    return scores


def _exp(xp: Namespace, x: Array) -> Array:
    return xp.exp(x) if hasattr(x, "at") else xp.exp(x, out=x)


def _by_head(x: Array, groups: int) -> Array:
    """Return (batch, length, heads, n) as (batch, heads / groups, groups, length, n)."""
    batch, length, heads, last = x.shape
    return x.reshape(batch, length, heads // groups, groups, last).transpose(0, 2, 3, 1, 4)


def _by_group(x: Array) -> Array:
    """Return (batch, length, kv_heads, n) as (batch, kv_heads, 1, length, n)."""
    return x.transpose(0, 2, 1, 3)[:, :, None]


def _from_heads(x: Array) -> Array:
    """Return (batch, kv_heads, groups, length, n) as (batch, length, heads, n)."""
    batch, kv_heads, groups, length, last = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * groups, last)


def _joined(x: Array) -> Array:
    """Return (batch, kv_heads, groups, length, n) as (batch, kv_heads, groups * length, n)."""
    batch, kv_heads, groups, length, last = x.shape
    return x.reshape(batch, kv_heads, groups * length, last)


def _transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2)
