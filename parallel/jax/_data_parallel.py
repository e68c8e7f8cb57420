"""``DistributedDataParallel`` for JAX: any pytree of parameters, inside the user's ``jax.jit``."""

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
    """Averages the gradients of a pytree over the replicas while XLA still computes.

        ddp = DistributedDataParallel(params, mesh["dp"])
        params = ddp.params

        @jax.jit
        def step(params, batch):
            loss, grads = ddp.value_and_grad(loss_fn)(params, batch)
            ...

    Construction compares the trees over the ranks (paths, shapes, dtypes) and takes group rank 0's
    values, which ``params`` then holds. In the backward pass each bucket's all-reduce starts as
    soon as XLA has computed its last gradient, in the same order on every rank.

    Some leaves are not arrays of floating point numbers: a step counter, a function in an equinox
    module. The loss gets them as they are, and their gradient is None.

    Args:
        params: the pytree; its structure, shapes and dtypes are fixed from here on.
        process_group: the replicas: ``mesh["dp"]``, any other mesh or group, or None for the
            default group. A mesh of several dims averages over all of them.
        bucket_cap_mb: the largest size of a shared bucket, in MiB. Gradients smaller than 1 MiB (or
            this, if it is less) share buckets. Each larger one has a bucket of its own.
        init_sync: compare the ranks' trees and take rank 0's values. Without it, equal replicas
            are the caller's promise.

    Raises:
        ValueError: when the ranks' trees differ (naming the first leaf that does), for a tree
            without floating point arrays, or a bucket size that is not positive.
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
                    "params has no leaf that is an array of floating point numbers; expected a"
                    f" pytree of parameters (or a Module), got {type(params).__qualname__}"
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
        handed = [] if self._on_gpu else named  # a program for a GPU averages by itself
        self._exchange = GradientExchange(handed, self.process_group, options)
        self._arrivals = [self._exchange.arrival(number) for number in range(len(handed))]
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

        ``fun`` returns this rank's loss, a scalar (with ``has_aux``: and anything else), as for
        ``jax.value_and_grad``; it is returned as it is. The gradients, by the first argument, are
        the average over the ranks. For use inside ``jit``, where every rank takes part in every
        call; ``scan``, ``checkpoint``, ``vmap``, ``grad`` and ``jit`` may be used inside ``fun``
        at will. Around the call, where gradients are averaged, ``vmap`` and derivatives (``grad``
        of it, ``hessian`` …) are refused with NotImplementedError, before anything has run.

        ``accumulated`` are gradients from calls under ``no_sync``, added before the average.
        Raises ValueError for a tree that differs from the one at construction.
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
        """Return the average of ``grads`` over the ranks: for gradients made in another way.

        ``grads`` has the structure of ``params`` (None for leaves that are not trained). For use
        inside ``jit``. Nothing is hidden behind the backward pass.
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
        """Within this context ``value_and_grad`` returns this rank's own gradients.

        It is read while the function is traced: put it inside the jitted function, around the
        microbatches whose gradients go into ``accumulated`` of the last one.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # ------------------------------------------------------------------ other replicas

    def move_to(self, mesh: DeviceMesh) -> None:
        """Go on with other replicas: those of ``mesh``, along the dims that the wrapper has had.

        All of them call, between two passes. Compiled programs go on as they are.

        Raises:
            ValueError: when the wrapper was not made over a slice of a mesh with names.
            RuntimeError: for parameters on a GPU. Also when a program was traced while this rank
                was the only replica and had never moved: that program does not average.
        """
        ranks = same_dims(self._ranks, mesh, "DistributedDataParallel")
        if self._on_gpu:
            raise RuntimeError(
                "the parameters are on a GPU, where compiled programs have their replicas for good;"
                " expected parameters on the CPU"
            )
        if self._traced_alone and ranks.size() > 1:
            raise RuntimeError(
                "a program with this wrapper was traced while this rank was the only replica: it"
                " does not average gradients; expected no call of it before the first step"
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

        The hook runs on the host, inside the step; its ``GradBucket``'s buffer is a NumPy array,
        which it must not keep. See ``parallel.DistributedDataParallel.register_comm_hook``. Raises
        TypeError for what cannot be called, RuntimeError for parameters on a GPU.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {type(hook).__qualname__}")
        if self._on_gpu:
            raise RuntimeError(
                "the parameters are on a GPU, where programs average gradients themselves;"
                " expected parameters on the CPU, or an average of your own by meshlib.jit"
            )
        if self._custom_hook:
            raise RuntimeError("a communication hook was registered already; only one can be")
        self._custom_hook = True
        self._exchange.reducer.hook = state, hook

    @property
    def buckets(self) -> list[list[str]]:
        """The paths of the leaves in each bucket, in the order of reduction.

        After the first step buckets are rebuilt, in the order in which XLA computed gradients.
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
        """Begin a pass, if one is to; what goes wrong while the program is made, ends it.

        Operation by operation, outside of jit, it has begun by then.
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
        """Return ``leaf``, whose gradient is handed to the host as soon as it is there.

        The derivative by ``ticket`` is a number that is there once the host has the gradient.
        """

        @jax.custom_vjp
        def announced(leaf: jax.Array, ticket: jax.Array, extra: Any) -> jax.Array:
            return leaf

        def forward(leaf: jax.Array, ticket: jax.Array, extra: Any) -> Any:
            return leaf, (ticket, extra)

        def backward(kept: Any, grad: jax.Array) -> Any:
            ticket, extra = kept
            if extra is not None:
                grad = grad + extra
            (done,) = host_call(arrival, [_TICKET], grad, ticket, ordered=False)
            return None, done, None

        announced.defvjp(forward, backward)
        return announced(leaf, ticket, extra)

    def _averages(self, done: jax.Array, others: list[jax.Array]) -> list[jax.Array]:
        """Return the averages, once there is ``done``, which depends on all arrivals.

        ``others`` are the gradients for which no arrival has been called; without any they are
        zero.
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
    """Return a group of the same ranks for one wrapper's calls alone.

    They are issued by XLA's threads, at times that have nothing to do with the main thread's.
    """
    return Job().new_group(
        group.ranks,
        backend=group.backend,
        timeout=group.timeout,
        desc=f"ddp on {group.group_desc or group.id}",
        compression=group.compression,
    )
