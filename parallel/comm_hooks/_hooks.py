"""Communication hooks for 16-bit gradients, post-local SGD and PowerSGD.

With 16-bit gradients, each rank rounds its gradients once; their average is computed in float32 and
rounded again. Post-local SGD (Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local
SGD", arXiv:1808.07217) averages gradients only in small groups after a warm-up. Every few steps,
``parallel.averaging`` averages parameters over all groups.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", arXiv:1905.13727, algorithm 1 (compression by one step of a warm-started power
iteration) and algorithm 2 (error feedback). A gradient of n × m is sent as (n + m) · r numbers.

For each gradient M (viewed as a matrix, plus the error of earlier steps), with Q of m × r:

    P = average over the ranks of M Q;   P = an orthonormal basis of its columns
    Q = average over the ranks of Mᵀ P;  the result is P Qᵀ; its error is added to the next M

The second average needs the result of the first, for which the backward pass must not wait. So the
completion of the first average starts the second, on a separate group. The first averages complete
in the same order on all ranks, so the second averages start in the same order.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import meshlib as dist
from meshlib import Future, ProcessGroup
from meshlib.extend import derived_group
from parallel._arrays import Array, namespace, pieces
from parallel._checks import (
    check_callable,
    check_instance,
    check_number,
    check_state_dict,
    to_count,
)
from parallel._core.comm_hooks import (
    CommHook,
    GradBucket,
    allreduce_hook,
    compress_wrapper,
    noop_hook,
)
from parallel._groups import GroupLike, resolve


def fp16_compress_hook(process_group: GroupLike | None, bucket: GradBucket) -> Future[Any]:
    """Average the bucket in float16: 11 bits of precision, a maximum of 65504.

    ``process_group`` is ``mesh["dp"]``, a group, or None for the wrapper's own.
    """
    return compress_wrapper(allreduce_hook, np.float16)(process_group, bucket)


def bf16_compress_hook(process_group: GroupLike | None, bucket: GradBucket) -> Future[Any]:
    """Average the bucket in bfloat16: 8 bits of precision, the range of float32.

    ``process_group`` is ``mesh["dp"]``, a group, or None for the wrapper's own. Raises ImportError
    without the package ml_dtypes.
    """
    return compress_wrapper(allreduce_hook, _bfloat16())(process_group, bucket)


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that runs ``hook``, such as ``powerSGD_hook``, on the bucket in float16.

    Raises TypeError if ``hook`` is not callable.
    """
    check_callable(hook, "hook")
    return compress_wrapper(hook, np.float16)


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that runs ``hook`` on the bucket in bfloat16.

    Raises TypeError if ``hook`` is not callable, ImportError without the package ml_dtypes.
    """
    check_callable(hook, "hook")
    return compress_wrapper(hook, _bfloat16())


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError("bfloat16 needs the package ml_dtypes; install it") from error
    return np.dtype(ml_dtypes.bfloat16)


class PostLocalSGDState:
    """Options of ``post_localSGD_hook``.

    Args:
        process_group: All replicas, for the first steps; None: the default group.
        subgroup: The replicas over which gradients are averaged later, such as
            ``mesh["dp_shard"]``, the ranks of one host.
        start_localSGD_iter: The number of initial steps that average over all replicas.
        post_local_gradient_allreduce: After these steps, average gradients over the subgroup
            (True) or do not average (False).

    Raises ValueError for a negative ``start_localSGD_iter``, TypeError for arguments of another
    type.
    """

    def __init__(
        self,
        process_group: GroupLike | None,
        subgroup: GroupLike | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.start_localSGD_iter: int = to_count(start_localSGD_iter, "start_localSGD_iter", 0)
        self.process_group: ProcessGroup = resolve(process_group, "process_group")
        self.subgroup: ProcessGroup = resolve(subgroup, "subgroup")
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iteration = 0


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[Any]:
    """Average the bucket over all replicas at first, later over the subgroup.

    Raises TypeError for a ``state`` that is not a ``PostLocalSGDState``.
    """
    check_instance(state, PostLocalSGDState, "the state of post_localSGD_hook")
    warming_up = state.iteration < state.start_localSGD_iter
    if bucket.is_last():
        state.iteration += 1
    if warming_up:
        return allreduce_hook(state.process_group, bucket)
    if not state.post_local_gradient_allreduce or state.subgroup.size() == 1:
        return noop_hook(None, bucket)
    bucket.set_group(state.subgroup)
    return allreduce_hook(state.subgroup, bucket)


class PowerSGDState:
    """Options of ``powerSGD_hook``, and its state between steps.

    Args:
        process_group: The replicas: ``mesh["dp"]``, a group, or None for the default group.
        matrix_approximation_rank: The rank r of the approximation. 1 to 4 are common; a larger r
            is closer to the average.
        start_powerSGD_iter: The number of initial steps without compression, which harms early
            gradients most.
        min_compression_rate: Compress a gradient only if this makes it smaller by this factor.
        use_error_feedback: Add the error of earlier steps to each gradient. Needs an array of the
            parameter's size. Without it, training may not converge.
        warm_start: Start with the previous step's Q instead of a random Q.
        random_seed: The seed of random Qs; equal on all ranks.

    For an exact resume, each rank saves and loads its own ``state_dict``.

    ``bytes_before`` and ``bytes_sent`` are the sums over all steps of the gradients' sizes and of
    the sizes averaged in their place.

    Raises ValueError for a rank below 1, a negative number of steps or seed, or a rate that is not
    positive, TypeError for arguments of another type.
    """

    def __init__(
        self,
        process_group: GroupLike | None = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000,
        min_compression_rate: float = 2.0,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        random_seed: int = 0,
    ) -> None:
        self.matrix_approximation_rank: int = to_count(
            matrix_approximation_rank, "matrix_approximation_rank"
        )
        self.start_powerSGD_iter: int = to_count(start_powerSGD_iter, "start_powerSGD_iter", 0)
        self.random_seed: int = to_count(random_seed, "random_seed", 0)
        check_number(min_compression_rate, "min_compression_rate")
        if not min_compression_rate > 0:
            raise ValueError(f"min_compression_rate must be positive, got {min_compression_rate}")
        self.process_group: ProcessGroup = resolve(process_group, "process_group")
        self.second_group: ProcessGroup = derived_group(
            self.process_group,
            "powersgd",
            f"PowerSGD on {self.process_group.group_desc or self.process_group.id}",
        )
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.iteration = 0
        self.bytes_before: int = 0
        self.bytes_sent: int = 0
        self._errors: dict[str, Array] = {}
        self._factors: dict[str, Array] = {}

    def rank_for(self, shape: Sequence[int]) -> int:
        """Return r for a gradient of ``shape``, or 0 if it is not compressed."""
        if len(shape) < 2:
            return 0
        n, m = shape[0], math.prod(shape[1:])
        r = min(n, m, self.matrix_approximation_rank)
        return r if r * (n + m) * self.min_compression_rate < n * m else 0

    def factor(self, path: str, matrix: Array, r: int, iteration: int) -> Array:
        """Return the initial Q (m × r) of the parameter ``path`` in step ``iteration``.

        It is equal on all ranks. Raises ValueError when the stored Q has another shape.
        """
        shape = (matrix.shape[1], r)
        stored = self._factors.get(path) if self.warm_start else None
        if stored is not None:
            _check_shape(stored, shape, f"Q of {path}")
            return namespace(matrix).asarray(stored)
        # The seed must not depend on the order of buckets, nor on whether the run was resumed.
        rng = np.random.default_rng([self.random_seed, iteration, zlib.crc32(path.encode())])
        return namespace(matrix).asarray(rng.standard_normal(shape), dtype=matrix.dtype)

    def add_error(self, path: str, matrix: Array) -> None:
        """Add the error of earlier steps for this parameter to ``matrix``."""
        error = self._errors.get(path)
        if error is not None:
            _check_shape(error, matrix.shape, f"the error of {path}")
            matrix += namespace(matrix).asarray(error)

    def keep(self, path: str, factor: Array, error: Array) -> None:
        """Store the factor and the error for the next step."""
        if self.warm_start:
            self._factors[path] = factor
        if self.use_error_feedback:
            self._errors[path] = error

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for a checkpoint with those of the model and the optimizer.

        ``"errors"`` (of this rank only) and ``"factors"`` (Q, equal on all ranks) map parameters'
        paths to arrays. With another number of ranks, load rank 0's state without its errors. This
        loses the error feedback of earlier steps.
        """
        return {
            "iteration": self.iteration,
            "bytes_before": self.bytes_before,
            "bytes_sent": self.bytes_sent,
            "random_seed": self.random_seed,
            "matrix_approximation_rank": self.matrix_approximation_rank,
            "errors": dict(self._errors),
            "factors": dict(self._factors),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the ``state_dict`` of this rank, in this process or another.

        Raises ValueError, naming both values, when the seed or the rank of the approximation
        differs. Raises TypeError unless ``state`` is a state dict, KeyError if it lacks an entry.
        """
        check_state_dict(state, *self.state_dict())
        for name in ("random_seed", "matrix_approximation_rank"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"cannot resume: {name} was {state[name]} and is now {getattr(self, name)}"
                )
        self.iteration: int = int(state["iteration"])
        self.bytes_before, self.bytes_sent = int(state["bytes_before"]), int(state["bytes_sent"])
        self._errors, self._factors = dict(state["errors"]), dict(state["factors"])


@dataclass
class _Compressed:
    """One gradient during the exchange: ``matrix`` is M; ``left`` and ``right`` are sent."""

    path: str
    gradient: Array
    matrix: Array
    left: Array  # P, n × r
    right: Array  # Q, m × r


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Any]:
    """Average the bucket approximately by low-rank compression; see the module.

    Raises TypeError for a ``state`` that is not a ``PowerSGDState``.
    """
    check_instance(state, PowerSGDState, "the state of powerSGD_hook")
    buffer = bucket.buffer()
    state.bytes_before += buffer.nbytes
    iteration = state.iteration
    warming_up = iteration < state.start_powerSGD_iter
    if bucket.is_last():
        state.iteration += 1
    compresses = any(state.rank_for(gradient.shape) for gradient in bucket.gradients())
    if warming_up or not compresses:
        state.bytes_sent += buffer.nbytes
        return allreduce_hook(state.process_group, bucket)
    return _PowerSgdExchange(state, bucket, iteration).start()


class _PowerSgdExchange:
    """The exchange of one bucket by PowerSGD."""

    def __init__(self, state: PowerSGDState, bucket: GradBucket, iteration: int) -> None:
        self._state = state
        self._buffer = buffer = bucket.buffer()
        self._xp = xp = namespace(buffer)
        # Products are computed in at least 32 bits; P and Q are sent in the bucket's dtype.
        self._compute = np.dtype(np.float32) if buffer.dtype.itemsize < 4 else buffer.dtype
        pairs = list(zip(bucket.paths(), bucket.gradients(), strict=True))
        ranks = [state.rank_for(gradient.shape) for _, gradient in pairs]
        self._plain = [g for (_, g), r in zip(pairs, ranks, strict=True) if not r]
        chosen = [(p, g, r) for (p, g), r in zip(pairs, ranks, strict=True) if r]
        self._lefts, lefts = self._message([(g.shape[0], r) for _, g, r in chosen])
        self._rights, rights = self._message([(g.size // g.shape[0], r) for _, g, r in chosen])
        self._compressed = [
            _Compressed(p, g, self._matrix(p, g), left, right)
            for (p, g, _), left, right in zip(chosen, lefts, rights, strict=True)
        ]
        for item, (_, _, r) in zip(self._compressed, chosen, strict=True):
            item.left[...] = item.matrix @ state.factor(item.path, item.matrix, r, iteration)
        self._rest = (
            xp.concatenate([gradient.reshape(-1) for gradient in self._plain])
            if self._plain
            else xp.empty(0, dtype=buffer.dtype)
        )
        state.bytes_sent += self._rest.nbytes + self._lefts.nbytes + self._rights.nbytes

    def start(self) -> Future[Any]:
        """Start the first averages; return the future of the averaged bucket."""
        group = self._state.process_group
        rest = _average(self._rest, group)
        lefts = _average(self._lefts, group)

        def second(future: Future[Any]) -> Future[Any]:
            future.value()
            for item in self._compressed:
                # Householder's QR gives an orthonormal basis even if P is rank-deficient, or zero.
                item.left = self._xp.linalg.qr(item.left.astype(self._compute))[0]
                item.right[...] = item.matrix.T @ item.left
            return _average(self._rights, self._state.second_group)

        def last(future: Future[Any]) -> Array:
            future.value()
            parts = pieces(rest.value(), (gradient.shape for gradient in self._plain))
            for gradient, part in zip(self._plain, parts, strict=True):
                gradient[...] = part
            for item in self._compressed:
                right = item.right.astype(self._compute)
                approximation = item.left @ right.T
                item.matrix -= approximation
                self._state.keep(item.path, right, item.matrix)
                item.gradient[...] = approximation.reshape(item.gradient.shape)
            return self._buffer

        return _then_wait_for(lefts, second).then(last)

    def _message(self, shapes: Sequence[tuple[int, int]]) -> tuple[Array, list[Array]]:
        """Return a flat array for matrices of ``shapes``, and the matrices as its views."""
        flat = self._xp.empty(sum(map(math.prod, shapes)), dtype=self._buffer.dtype)
        return flat, pieces(flat, shapes)

    def _matrix(self, path: str, gradient: Array) -> Array:
        # Copied because it becomes the error, and the bucket may change before the next step.
        matrix = gradient.reshape(gradient.shape[0], -1).astype(self._compute, copy=True)
        self._state.add_error(path, matrix)
        return matrix


def _check_shape(stored: Array, shape: tuple[int, ...], what: str) -> None:
    if stored.shape != shape:
        raise ValueError(
            f"PowerSGD's state: {what} has shape {list(stored.shape)}; expected {list(shape)}. Is "
            "it the state of another model?"
        )


def _average(flat: Array, group: ProcessGroup) -> Future[Any]:
    if not flat.size:
        future = Future()
        future.set_result(flat)
        return future
    return group.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True).get_future()


def _then_wait_for(
    future: Future[Any], callback: Callable[[Future[Any]], Future[Any]]
) -> Future[Any]:
    """Return a future with the result of the future that ``callback(future)`` returns."""
    result = Future()

    def settle(inner: Future[Any]) -> None:
        error = inner.exception()
        if error is None:
            result.set_result(inner.value())
        else:
            result.set_exception(error)

    def begin(done: Future[Any]) -> None:
        try:
            callback(done).add_done_callback(settle)
        except Exception as error:  # noqa: BLE001 (it becomes the result)
            result.set_exception(error)

    future.add_done_callback(begin)
    return result
