"""Ring attention: keys and values circulate around the ranks; partial results are merged.

Liu et al., "Ring Attention", arXiv:2310.01889. On idle ranks in causal attention over consecutive
positions: Brandon et al., "Striped Attention", arXiv:2311.09431. In each of n steps a rank computes
with its current keys and values and meanwhile sends them to the next rank. In backward they
circulate again, followed by their gradients.

Forward saves the result and the logarithm of each softmax's denominator; backward recomputes the
softmax (Dao et al., "FlashAttention", arXiv:2205.14135, sections 3.1 and B.2). Queries are
(batch, length, heads, head_dim), keys and values (batch, length, kv_heads, head_dim). Each key and
value head serves ``heads / kv_heads`` adjacent query heads (Ainslie et al., "GQA",
arXiv:2305.13245). Logarithms are (batch, length, heads).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshlib import DeviceMesh, ProcessGroup, get_rank, get_world_size, jit

KEYS, GRADIENTS = 0, 1
"""Tags of the two kinds of messages."""


class VisibleBlock(NamedTuple):
    """The block of this rank's queries that attend to received keys, causally or to all."""

    queries: slice
    keys: slice
    causal: bool


def visible_block(
    rank: int, source: int, half: int, *, causal: bool, zigzag: bool
) -> VisibleBlock | None:
    """Return the block of ``rank`` with the keys of ``source``; None if no query sees them.

    ``half`` is the length of one of a rank's two zigzag chunks. All queries see the early chunk of
    a lower rank, and none its late chunk. Only the late queries see the keys of a higher rank, and
    they see all of them. So each step but the first computes half of a block.
    """
    everything = slice(None)
    if not causal or rank == source:
        return VisibleBlock(everything, everything, causal)
    if zigzag:
        if source < rank:
            return VisibleBlock(everything, slice(None, half), causal=False)
        return VisibleBlock(slice(half, None), everything, causal=False)
    return VisibleBlock(everything, everything, causal=False) if source < rank else None


class Ring(NamedTuple):
    """Attention over the ranks of ``mesh``, with the order of their positions."""

    mesh: ProcessGroup | DeviceMesh | None
    causal: bool
    zigzag: bool

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the result at this rank's positions, and the logarithms, in float32 or wider."""
        held, out, logs, size = jnp.stack([k, v]), q, q, get_world_size(self.mesh)
        for step in range(size):
            passing = self._pass_on(held, KEYS) if step + 1 < size else None
            if passing is not None:
                held = passing.x
            block = self._block(step, q.shape[1])
            if block is not None:
                own, keys = (slice(None), block.queries), held[:, :, block.keys]
                part = attend(q[own], keys[0], keys[1], causal=block.causal)
                if step == 0:
                    out, logs = part
                else:
                    merged = merge(out[own], logs[own], *part)
                    out, logs = out.at[own].set(merged[0]), logs.at[own].set(merged[1])
            if passing is not None:
                held = jit.permute_done(passing, (out, logs))
        return out, logs

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        out: jax.Array,
        logs: jax.Array,
        grad: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the gradients of this rank's q, k and v, float32 or wider.

        ``out`` and ``logs`` are the results of ``forward``, ``grad`` is the gradient of ``out``.
        """
        along, size = (out * grad).sum(axis=-1), get_world_size(self.mesh)
        held, travelling, q_grad = jnp.stack([k, v]), k, jnp.zeros(q.shape, logs.dtype)
        own_keys, part = k, k  # set in the first step, which is causal or sees everything
        keys_passing = gradients_passing = None
        for step in range(size):
            if keys_passing is not None:
                held = jit.permute_done(keys_passing, (q_grad, part))
            keys_passing = self._pass_on(held, KEYS) if step + 1 < size else None
            if keys_passing is not None:
                held = keys_passing.x
            block = self._block(step, q.shape[1])
            if block is not None:
                own, keys = (slice(None), block.queries), held[:, :, block.keys]
                of_queries, part = attend_backward(
                    q[own],
                    keys[0],
                    keys[1],
                    grad[own],
                    along[own],
                    logs[own],
                    causal=block.causal,
                )
                q_grad = q_grad.at[own].add(of_queries)
            if step == 0:
                own_keys = part
                # The last step brings other ranks' contributions to the gradients of these keys.
                travelling = jnp.zeros_like(own_keys)
                continue
            if gradients_passing is not None:
                # The previous rank has already added its contribution.
                travelling = jit.permute_done(gradients_passing, (q_grad, part))
            if block is not None:
                travelling = travelling.at[:, :, block.keys].add(part)
            gradients_passing = self._pass_on(travelling, GRADIENTS)
        if gradients_passing is not None:
            own_keys = own_keys + jit.permute_done(gradients_passing, own_keys)
        return q_grad, own_keys[0], own_keys[1]

    def _block(self, step: int, length: int) -> VisibleBlock | None:
        rank, size = get_rank(self.mesh), get_world_size(self.mesh)
        source = (rank - step) % size
        return visible_block(rank, source, length // 2, causal=self.causal, zigzag=self.zigzag)

    def _pass_on(self, x: jax.Array, tag: int) -> jit.PendingPermute:
        """Start sending ``x`` to the next rank and receiving the previous rank's."""
        size = get_world_size(self.mesh)
        perm = [(rank, (rank + 1) % size) for rank in range(size)]
        return jit.permute_start(x, perm, self.mesh, tag=tag)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool
) -> tuple[jax.Array, jax.Array]:
    """Return softmax(q @ k.T / sqrt(head_dim)) @ v, with the shape of ``q``, and the logarithms.

    With ``causal``, query i attends to the keys up to i. Results for 16-bit floats are float32.
    """
    scores = _scores(q, k, causal)
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum("bgnlm,bmgd->blgnd", weights / total, v)
    logs = (largest + jnp.log(total))[..., 0].transpose(0, 3, 1, 2)
    return out.reshape(q.shape), logs.reshape(q.shape[:3])


def attend_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    along: jax.Array,
    logs: jax.Array,
    *,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of ``q``, and of ``k`` and ``v`` stacked, in the dtype of ``logs``.

    ``k`` may be only a part of the keys. ``grad`` is the gradient of the result over all keys,
    ``logs`` its logarithms, and ``along`` the sum over features of the result times ``grad``.
    """
    groups = k.shape[2]
    grad, of_rows = _grouped(grad, groups).astype(logs.dtype), _grouped(q, groups)
    weights = jnp.exp(_scores(q, k, causal) - _as_scores(logs, groups))
    v_grad = jnp.einsum("bgnlm,blgnd->bmgd", weights, grad)
    of_scores = jnp.einsum("blgnd,bmgd->bgnlm", grad, v) - _as_scores(along, groups)
    of_scores = of_scores * weights * q.shape[-1] ** -0.5
    k_grad = jnp.einsum("bgnlm,blgnd->bmgd", of_scores, of_rows)
    q_grad = jnp.einsum("bgnlm,bmgd->blgnd", of_scores, k)
    return q_grad.reshape(q.shape), jnp.stack([k_grad, v_grad])


def merge(
    out: jax.Array, logs: jax.Array, part: jax.Array, part_logs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merge the results over two disjoint sets of keys; return the result and its logarithms."""
    together = jnp.logaddexp(logs, part_logs)
    first, second = (jnp.exp(part - together)[..., None] for part in (logs, part_logs))
    return out * first + part * second, together


def _scores(q: jax.Array, k: jax.Array, causal: bool) -> jax.Array:
    """Return q @ k.T / sqrt(head_dim), (batch, kv_heads, heads / kv_heads, queries, keys)."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("blgnd,bmgd->bgnlm", _grouped(q, k.shape[2]).astype(dtype), k.astype(dtype))
    scores = scores * q.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    return scores


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """Return (batch, length, heads, d) as (batch, length, groups, heads / groups, d)."""
    return x.reshape(*x.shape[:2], groups, -1, x.shape[3])


def _as_scores(logs: jax.Array, groups: int) -> jax.Array:
    """Return (batch, length, heads) as (batch, groups, heads / groups, length, 1)."""
    batch, length, _ = logs.shape
    return logs.reshape(batch, length, groups, -1).transpose(0, 2, 3, 1)[..., None]
