"""Softmax attention of one block of queries over one block of keys, and its derivative.

What is kept between the two is the result and the logarithm of each softmax's denominator; the
softmax itself is computed again (Dao et al., "FlashAttention", arXiv:2205.14135, sections 3.1 and
B.2). Results over parts of the keys are merged by these logarithms: ``merge``.

Queries are (batch, length, heads, head_dim), keys and values (batch, length, kv_heads, head_dim):
each of them serves ``heads / kv_heads`` neighbouring heads of queries (Ainslie et al., "GQA",
arXiv:2305.13245). The logarithms are (batch, kv_heads, heads / kv_heads, length, 1).
"""

from __future__ import annotations

from parallel.arrays import Array, namespace


def attend(q: Array, k: Array, v: Array, scale: float, causal: bool) -> tuple[Array, Array]:
    """Return softmax(scale * q @ k.T) @ v, of the shape of ``q``, and the logarithms.

    With ``causal``, query i attends to the keys up to i. Results for 16-bit floats, and their
    logarithms, are float32.
    """
    xp = namespace(q)
    scores = _scores(q, k, scale, causal)
    largest = scores.max(axis=-1, keepdims=True)
    weights = xp.exp(scores - largest, out=scores)
    total = weights.sum(axis=-1, keepdims=True)
    out = weights @ _by_group(v)
    out /= total
    return _from_heads(out), largest + xp.log(total)


def attend_backward(
    q: Array, k: Array, v: Array, grad: Array, along: Array, logs: Array, scale: float, causal: bool
) -> tuple[Array, Array, Array]:
    """Return the gradients of ``q``, ``k`` and ``v``.

    ``grad`` is that of the result over all keys, ``logs`` its logarithms and ``along`` what
    ``component_along`` returned: ``k`` may be a part of the keys only.
    """
    xp = namespace(q)
    groups = q.shape[2] // k.shape[2]
    weights = _scores(q, k, scale, causal)
    weights -= logs
    weights = xp.exp(weights, out=weights)
    grad = _by_head(grad, groups).astype(weights.dtype, copy=False)
    # The heads that share a key add up: their rows, one below the other, are one matrix.
    v_grad = _transposed(_joined(weights)) @ _joined(grad)
    scores_grad = grad @ _transposed(_by_group(v))
    scores_grad -= along
    scores_grad *= weights
    scores_grad *= scale
    k_grad = _transposed(_joined(scores_grad)) @ _joined(_by_head(q, groups))
    return (
        _from_heads(scores_grad @ _by_group(k)),
        k_grad.transpose(0, 2, 1, 3),
        v_grad.transpose(0, 2, 1, 3),
    )


def component_along(out: Array, grad: Array, kv_heads: int) -> Array:
    """Return the product of result and gradient, summed for each query, shaped as logarithms."""
    product = (out * grad).sum(axis=-1, keepdims=True)
    return _by_head(product, out.shape[2] // kv_heads)


def merge(out: Array, logs: Array, part: Array, part_logs: Array) -> tuple[Array, Array]:
    """Return the result over all keys of results over two parts of them, and its logarithms."""
    together = namespace(out).logaddexp(logs, part_logs)
    first, second = (_share(one, together) for one in (logs, part_logs))
    return out * first + part * second, together


def _share(logs: Array, together: Array) -> Array:
    """Return what the part with ``logs`` counts, (batch, length, heads, 1)."""
    return _from_heads(namespace(logs).exp(logs - together))


def _scores(q: Array, k: Array, scale: float, causal: bool) -> Array:
    """Return scale * q @ k.T, (batch, kv_heads, heads / kv_heads, queries, keys), a new array."""
    scores = _by_head(q, q.shape[2] // k.shape[2]) @ _transposed(_by_group(k))
    if scores.dtype.itemsize < 4:
        scores = scores.astype("float32")
    scores *= scale
    if causal:
        xp = namespace(q)
        rows, columns = xp.arange(scores.shape[-2]), xp.arange(scores.shape[-1])
        xp.copyto(scores, -xp.inf, where=columns > rows[:, None])
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
