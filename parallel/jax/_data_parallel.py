"""``DistributedDataParallel`` for a pytree of JAX arrays, inside the user's ``jax.jit``."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from meshlib import DeviceMesh, ProcessGroup
from meshlib.extend import Job
from meshlib.extend.jit import HostFunction, host_call, untransformed
from parallel._core.assignment import FIRST_BUCKET_BYTES, cap_in_bytes
from parallel._core.buckets import ReducerOptions
from parallel._core.comm_hooks import CommHook
from parallel._core.passes import PassStatistics
from parallel._core.replicas import raise_on_all_ranks
from parallel._groups import GroupLike, resolve, same_dims
from parallel.jax._gradients import GradientExchange
from parallel.jax._on_gpu import average_in_program, is_on_gpu
from parallel.jax._trees import TreeOfParameters, check_same_tree, copies_of_rank_0

Tree = Any

_TICKET = jax.ShapeDtypeStruct((), np.float32)


class DistributedDataParallel:
    """Data parallelism for a pytree: averages gradients over replicas during the backward pass.

        ddp = DistributedDataParallel(params, mesh["dp"])
        params = ddp.params

        @jax.jit
        def step(params, batch):
            loss, grads = ddp.value_and_grad(loss_fn)(params, batch)
            ...

    Construction compares the trees over the ranks (paths, shapes, dtypes) and copies group rank 0's
    values into ``params`` of every rank. In the backward pass each bucket's all-reduce starts as
    soon as XLA has computed the bucket's last gradient, in the same order on every rank.

    Leaves that are not floating-point arrays, such as a step counter or a function in an equinox
    module, are passed to the loss unchanged, and their gradient is None.

    Args:
        params: the pytree; its structure, shapes and dtypes must not change afterwards.
        process_group: the replicas: ``mesh["dp"]``, any other mesh or group, or None for the
            default group. A mesh of several dims averages over all of them.
        bucket_cap_mb: the maximum size of a shared bucket, in MiB. Gradients smaller than 1 MiB (or
            than this, if it is less) share buckets. Each larger gradient has its own bucket.
        init_sync: compare the ranks' trees and copy rank 0's values. If False, the caller
            guarantees equal replicas.

    Raises:
        ValueError: when the ranks' trees differ (naming the first leaf that does), for a tree
            without floating-point arrays, or a bucket size that is not positive.
        TypeError: for a bucket size that is not a number.
    """

    params: Tree
    """Group rank 0's values of the parameters, as JAX arrays."""

    def __init__(
        self,
        params: Tree,
        process_group: GroupLike | None = None,
        *,
        bucket_cap_mb: float = 25.0,
        init_sync: bool = True,
    ) -> None:
        group = resolve(process_group, "process_group")
        with raise_on_all_ranks(group if init_sync else None):
            cap = self._cap = cap_in_bytes(bucket_cap_mb)
            self._tree = TreeOfParameters.of(params)
            named = list(self._tree.trained().items())
            if not named:
                raise ValueError(
                    "params has no leaf that is a floating-point array; expected a pytree of"
                    f" parameters (or a Module), got {type(params).__qualname__}"
                )
        if init_sync:
            check_same_tree(self._tree, group, bucket_cap_mb=float(bucket_cap_mb))
        self._specs = [spec for _, spec in named]
        self.process_group: ProcessGroup = _own_group(group)
        self._ranks = process_group
        self._moves = self._traced_alone = False
        trained, others = self._tree.split(params)
        if init_sync:
            trained = copies_of_rank_0(trained, self.process_group)
        self.params = self._tree.join(trained, others)
        self._on_gpu = is_on_gpu([leaf for leaf in trained if isinstance(leaf, jax.Array)])
        first = min(FIRST_BUCKET_BYTES, cap)
        options = ReducerOptions(first_bytes=first, cap_bytes=cap, alone_bytes=first)
        on_host = [] if self._on_gpu else named  # a program for a GPU averages by itself
        self._exchange = GradientExchange(on_host, self.process_group, options)
        self._arrivals = [self._exchange.arrival(number) for number in range(len(on_host))]
        self._sync = True
        self._custom_hook = False

    # ------------------------------------------------------------------ gradients

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        *,
        has_aux: bool = False,
        accumulated: Tree | None = None,
    ) -> Callable[..., tuple[Any, Tree]]:
        """Return ``f(params, *args)``, which returns ``(fun(params, *args), gradients)``.

        ``fun`` returns this rank's loss, a scalar (with ``has_aux``: a pair of it and any tree), as
        for ``jax.value_and_grad``; this value is not averaged. The gradients, with respect to the
        first argument, are averages over the ranks. Use it inside ``jit``, with the same calls on
        every rank. ``scan``, ``checkpoint``, ``vmap``, ``grad`` and ``jit`` may be used inside
        ``fun``. Around the call, ``vmap`` and derivatives raise NotImplementedError before anything
        runs, unless inside ``no_sync``.

        ``accumulated`` are gradients of calls inside ``no_sync``, added before averaging. Raises
        ValueError for a tree that differs from the one at construction.
        """
        extra = None if accumulated is None else self._tree.leaves_of(accumulated, "accumulated")

        def value_and_grad(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
            self._tree.check(params, "params")
            synchronise, given = self._sync and self._has_replicas(), extra
            if synchronise:
                params, args, kwargs, given = untransformed(
                    (params, args, kwargs, extra), "DistributedDataParallel.value_and_grad"
                )
            trained, others = self._tree.split(params)
            with self._pass(synchronise and not self._on_gpu) as ticket:

                def loss(trained: list[jax.Array]) -> Any:
                    return fun(self._tree.join(trained, others), *args, **kwargs)

                def announced(ticket: jax.Array) -> Any:
                    more = given or [None] * len(trained)
                    return loss(
                        [*map(self._announce, self._arrivals, trained, more, repeat(ticket))]
                    )

                if ticket is not None:
                    value, done = jax.value_and_grad(announced, has_aux=has_aux)(ticket)
                    grads = self._averages(done, given or [])
                else:
                    value, grads = jax.value_and_grad(loss, has_aux=has_aux)(trained)
                    if given is not None:
                        grads = [grad + more for grad, more in zip(grads, given, strict=True)]
                if synchronise and self._on_gpu:
                    grads = average_in_program(grads, self.process_group, self._cap)
                return value, self._tree.join(grads)

        return value_and_grad

    def average(self, grads: Tree) -> Tree:
        """Return the average over the ranks of gradients that were computed in another way.

        ``grads`` has the structure of ``params`` (None for leaves that are not trained). Use it
        inside ``jit``. The communication does not overlap with the backward pass.
        """
        leaves = [jnp.asarray(leaf) for leaf in self._tree.leaves_of(grads, "grads")]
        if self._has_replicas():
            leaves = untransformed(leaves, "DistributedDataParallel.average")
            with self._pass(not self._on_gpu) as ticket:
                if ticket is None:
                    leaves = average_in_program(leaves, self.process_group, self._cap)
                else:
                    leaves = self._averages(ticket, leaves)
        return self._tree.join(leaves)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Return a context in which ``value_and_grad`` returns this rank's own gradients.

        It has its effect while the function is traced. Use it inside the jitted function, for the
        microbatches whose gradients become ``accumulated`` of the last one.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # ------------------------------------------------------------------ other replicas

    def move_to(self, mesh: DeviceMesh) -> None:
        """Continue with the replicas of ``mesh`` along the same dims as before.

        All these ranks must call, between two passes. Compiled programs remain valid.

        Raises:
            ValueError: when the wrapper was not made over a slice of a mesh with names.
            RuntimeError: for parameters on a GPU. Also if a program was traced while this rank was
                the only replica and had never moved, because that program does not average.
        """
        ranks = same_dims(self._ranks, mesh, "DistributedDataParallel")
        if self._on_gpu:
            raise RuntimeError(
                "the parameters are on a GPU, where compiled programs cannot change their replicas;"
                " expected parameters on the CPU"
            )
        if self._traced_alone and ranks.size() > 1:
            raise RuntimeError(
                "a program with this wrapper was traced while this rank was the only replica, and"
                " does not average gradients; expected move_to before the first step"
            )
        self._ranks, self._moves = ranks, True
        self.process_group = _own_group(resolve(ranks, "mesh"))
        self._exchange.move_to(self.process_group)

    def _has_replicas(self) -> bool:
        alone = self.process_group.size() == 1 and not self._moves
        self._traced_alone = self._traced_alone or alone
        return not alone

    # ------------------------------------------------------------------ settings and statistics

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce each bucket with ``hook(state, bucket)`` instead of the plain average.

        The hook runs on the host, inside the step. The buffer of its ``GradBucket`` is a NumPy
        array, which it must not keep. See ``parallel.DistributedDataParallel.register_comm_hook``.
        Raises TypeError when ``hook`` is not callable, RuntimeError for parameters on a GPU.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {type(hook).__qualname__}")
        if self._on_gpu:
            raise RuntimeError(
                "the parameters are on a GPU, where programs average gradients themselves;"
                " expected parameters on the CPU, or your own average with meshlib.jit"
            )
        if self._custom_hook:
            raise RuntimeError("a communication hook is registered already; expected only one")
        self._custom_hook = True
        self._exchange.reducer.hook = state, hook

    @property
    def buckets(self) -> list[list[str]]:
        """The paths of the leaves in each bucket, in the order of reduction.

        After the first step the buckets are rebuilt in the order in which XLA computed gradients.
        """
        return self._exchange.reducer.buckets

    @property
    def statistics(self) -> PassStatistics | None:
        """The times of the last synchronised pass; None before the first.

        Forward and backward are one program: ``backward`` counts both, ``forward`` is 0.
        """
        return self._exchange.statistics

    # ------------------------------------------------------------------ calls into the host

    @contextmanager
    def _pass(self, begin: bool) -> Generator[jax.Array | None]:
        """Begin a pass if ``begin``, and yield the ticket on which all arrivals depend.

        Outside of ``jit`` the pass begins at once; an error inside the context then cancels it.
        """
        if not begin:
            yield None
            return
        begin_pass, group = self._exchange.begin, self.process_group
        (ticket,) = host_call(begin_pass, [_TICKET], ordered=True, group=group)
        try:
            yield ticket
        except BaseException as error:
            if not isinstance(ticket, jax.core.Tracer):
                self._exchange.cancel(error)
            raise

    def _announce(
        self, arrival: HostFunction, leaf: jax.Array, extra: jax.Array | None, ticket: jax.Array
    ) -> jax.Array:
        """Return ``leaf``, whose gradient is passed to the host as soon as it is computed.

        The derivative with respect to ``ticket`` is a number that becomes available once the host
        has the gradient.
        """

        @jax.custom_vjp
        def announced(leaf: jax.Array, ticket: jax.Array, extra: Any) -> jax.Array:
            return leaf

        def forward(leaf: jax.Array, ticket: jax.Array, extra: Any) -> Any:
            return leaf, (ticket, extra)

        def backward(saved: Any, grad: jax.Array) -> Any:
            ticket, extra = saved
            if extra is not None:
                grad = grad + extra
            (done,) = host_call(arrival, [_TICKET], grad, ticket, ordered=False)
            return None, done, None

        announced.defvjp(forward, backward)
        return announced(leaf, ticket, extra)

    def _averages(self, done: jax.Array, others: list[jax.Array]) -> list[jax.Array]:
        """Return the averages after ``done`` is available, which depends on all arrivals.

        ``others`` are gradients by number, for those without an arrival; if empty, these are zero.
        """
        host_call(self._exchange.seal, [], done, *others, ordered=True)
        averages: dict[int, jax.Array] = {}
        portions = self._exchange.portions()
        for numbers in portions:
            collection = self._exchange.collection(numbers, last=numbers is portions[-1])
            specs = [self._specs[number] for number in numbers]
            averages |= zip(numbers, host_call(collection, specs, ordered=True), strict=True)
        return [averages[number] for number in sorted(averages)]


def _own_group(group: ProcessGroup) -> ProcessGroup:
    """Return a separate group of the same ranks for one wrapper's calls.

    XLA's threads issue these calls, in no fixed order relative to those of the main thread.
    """
    return Job().new_group(
        group.ranks,
        backend=group.backend,
        timeout=group.timeout,
        desc=f"ddp on {group.group_desc or group.id}",
        compression=group.compression,
    )
