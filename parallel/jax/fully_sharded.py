"""``FullyShardedDataParallel``: any pytree of parameters at 1/n a rank, in one ``jax.jit``."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlib import DeviceMesh, ReduceOp, jit
from meshlib.extend.jit import untransformed
from meshlib.sharding import DArray, Sharding
from parallel.checks import check_instance
from parallel.core.replicas import told_to_all
from parallel.fsdp.layout import rows_of
from parallel.groups import check_shard_mesh
from parallel.jax.program import Program, backward_begins
from parallel.jax.trees import TreeOfParameters, check_same_tree

Tree = Any


class FullyShardedDataParallel:
    """Keeps 1/n of each parameter on each of n ranks; gathers them inside the jitted step.

        fsdp = FullyShardedDataParallel(params, mesh["dp_shard"])
        params = fsdp.params                        # this rank's parts
        state = optimizer.init(params)              # and so 1/n of the optimizer's states

        @jax.jit
        def step(params, state, batch):
            loss, grads = fsdp.value_and_grad(loss_fn)(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

    ``loss_fn`` gets the whole parameters, as on one process. Each is gathered before the first
    operation that uses it in forward, and again in backward, and not kept in between; its gradient
    is reduced and scattered as soon as it has been computed. An operation is what XLA gets as one:
    with ``jax.lax.scan`` over stacked layers all of them are gathered for the whole loop.

    Leaves are split along dim 0, by ceiling division. Those without dims, and those that are no
    arrays of floating point numbers, are on all ranks. An optimizer must treat each element by
    itself; for the global norm see ``global_norm``.

    Rajbhandari et al., "ZeRO", arXiv:1910.02054, stage 3.

    Args:
        params: the pytree, the same on all ranks: each keeps its part of its own values.
        mesh: a slice of one dim, over which to shard; or of two (HSDP): parameters are replicated
            over the first and sharded over the second.
        keep_gathered: gather each parameter once a step, and keep it from forward to backward:
            fewer bytes on the wire, and all of the parameters in memory (about stage 2).
        init_sync: compare the ranks' trees (paths, shapes, dtypes). Without it nothing is raised on
            every rank.

    Raises:
        TypeError: for what is no mesh; on every rank, for a ``keep_gathered`` that is no bool.
        ValueError: for a mesh of more dims or without this rank; on every rank, for a tree without
            floating point arrays, and when the ranks' trees differ, naming the first leaf.
    """

    params: Tree
    """This rank's parts, as JAX arrays."""

    def __init__(
        self,
        params: Tree,
        mesh: DeviceMesh,
        *,
        keep_gathered: bool = False,
        init_sync: bool = True,
    ) -> None:
        where = check_shard_mesh(mesh)
        with told_to_all(mesh.process_group if init_sync else None):
            check_instance(keep_gathered, bool, f"{where}: keep_gathered")
            self._whole = TreeOfParameters.of(params)
            self._specs = list(self._whole.trained().values())
            if not self._specs:
                raise ValueError(
                    f"{where}: params has no array of floating point numbers to train; expected a"
                    f" pytree of parameters, got {type(params).__qualname__}"
                )
        if init_sync:
            check_same_tree(self._whole, mesh.process_group, keep_gathered=keep_gathered)
        self.mesh = mesh
        self.keep_gathered = keep_gathered
        self._sync = True
        self._shards = mesh[mesh.ndim - 1]
        self._size = self._shards.size()
        self._place = self._shards.get_local_rank()
        self.params = self.shard(params)
        self._parts = TreeOfParameters.of(self.params)

    # ------------------------------------------------------------------ parts and wholes

    def shard(self, tree: Tree) -> Tree:
        """Return this rank's parts of a tree of whole parameters, or of others like them."""
        self._whole.check(tree, "tree")
        trained, others = self._whole.split(tree)
        # A copy: a slice of a JAX array on the CPU could keep the whole alive.
        return self._whole.join([jnp.array(self._part(leaf)) for leaf in trained], others)

    def unshard(self, params: Tree) -> Tree:
        """Return the whole parameters of parts: all ranks call, inside ``jit`` or outside."""
        self._parts.check(params, "params")
        trained, others = self._parts.split(params)
        wholes = [self._gather(number, part, None) for number, part in enumerate(trained)]
        return self._whole.join(wholes, others)

    def to_global(self, params: Tree) -> Tree:
        """Return DArrays of NumPy arrays for parts of parameters, or of others like them.

        For checkpoints. Leaves without dims become NumPy arrays. Not inside ``jit``.
        """
        self._parts.check(params, "params")
        trained, others = self._parts.split(params)
        sharding = Sharding.of_positions(self.mesh, [(self.mesh.ndim - 1,)])
        leaves = [
            DArray(np.asarray(part), sharding, spec.shape, part.dtype)
            if spec.shape
            else np.asarray(part)
            for part, spec in zip(trained, self._specs, strict=True)
        ]
        return self._whole.join(leaves, others)

    def from_global(self, tree: Tree) -> Tree:
        """Return the parts of ``to_global``'s result, or of DArrays in any other sharding."""
        leaves, _ = self._whole.split(tree)
        sharding = Sharding.of_positions(self.mesh, [(self.mesh.ndim - 1,)])
        parts = [
            jnp.array(leaf.redistribute(sharding).local if isinstance(leaf, DArray) else leaf)
            for leaf in leaves
        ]
        return self._whole.join(parts, self._whole.split(self.params)[1])

    # ------------------------------------------------------------------ training

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        *,
        has_aux: bool = False,
        accumulated: Tree | None = None,
    ) -> Callable[..., tuple[Any, Tree]]:
        """Return a function like ``jax.value_and_grad(fun)``, of parts in place of parameters.

        ``fun`` takes the whole parameters as its first argument, and returns a scalar, with
        ``has_aux`` and more. The value is this rank's; the gradients are this rank's parts of the
        averages over all ranks. For use inside ``jit``, where every rank takes part in every call.
        Derivatives of it, and ``vmap`` over it, are refused with NotImplementedError.

        ``accumulated`` are whole gradients from calls under ``no_sync``, added before the average.
        (The results of calls without it can be added, too: accumulation in 1/n of the memory, and a
        reduction for each call.) Raises ValueError for a tree that differs from ``params``.
        """
        extra = None if accumulated is None else self._whole.leaves_of(accumulated, "accumulated")

        def value_and_grad(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
            self._parts.check(params, "params")
            params, args, kwargs, more = untransformed(
                (params, args, kwargs, extra), "FullyShardedDataParallel.value_and_grad"
            )
            sync = self._sync
            parts, others = self._parts.split(params)

            def whole(*trained: jax.Array) -> Any:
                def loss(trained: tuple[jax.Array, ...]) -> Any:
                    return fun(self._whole.join(trained, others), *args, **kwargs)

                if has_aux:
                    value, pullback, aux = jax.vjp(loss, trained, has_aux=True)
                    result = value, aux
                else:
                    value, pullback = jax.vjp(loss, trained)
                    result = value
                if jnp.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
                    raise TypeError(
                        "fun must return one floating point number, got "
                        f"{jnp.result_type(value).name}{list(jnp.shape(value))}"
                    )
                (grads,) = pullback(backward_begins(jnp.ones_like(value)))
                return result, list(grads)

            def reduce(number: int, grad: jax.Array) -> jax.Array:
                if more is not None:
                    grad = grad + more[number]
                return self._reduce(number, grad) if sync else grad

            program = Program(whole, self._specs)
            result, grads = program.run(
                lambda number, after: self._gather(number, parts[number], after),
                reduce,
                keep=self.keep_gathered,
            )
            return result, (self._parts if sync else self._whole).join(grads)

        return value_and_grad

    def average(self, grads: Tree) -> Tree:
        """Return this rank's parts of the averages of whole gradients over all ranks.

        ``grads`` are those of calls under ``no_sync``, or were made in another way: None for leaves
        that are not trained. For use inside ``jit``.
        """
        leaves = untransformed(
            [jnp.asarray(leaf) for leaf in self._whole.leaves_of(grads, "grads")],
            "FullyShardedDataParallel.average",
        )
        reduced = [self._reduce(number, leaf) for number, leaf in enumerate(leaves)]
        return self._parts.join(reduced)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Within this context ``value_and_grad`` returns this rank's own whole gradients.

        Parameters are gathered as ever. It is read while the function is traced: put it inside the
        jitted function, around the microbatches whose gradients go into ``accumulated`` of the last
        one. A rank then holds as many bytes as all parameters have, and reduces once.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def global_norm(self, grads: Tree) -> jax.Array:
        """Return the norm of the whole gradients of which ``grads`` are the parts.

        For clipping inside ``jit``: multiply by ``jnp.minimum(1, most / norm)``.
        """
        leaves = self._parts.leaves_of(grads, "grads")
        squares = [jnp.sum(jnp.abs(leaf) ** 2) for leaf in leaves]
        split = same = jnp.zeros((), jnp.result_type(*squares))
        for square, spec in zip(squares, self._specs, strict=True):
            if spec.shape:
                split += square
            else:
                same += square
        return jnp.sqrt(jit.all_reduce(split, group=self._shards) + same)

    # ------------------------------------------------------------------ communication

    def _part(self, leaf: Any) -> Any:
        if not leaf.shape:
            return leaf
        return leaf[rows_of(leaf.shape, self._size, self._place)]

    def _gather(self, number: int, part: jax.Array, after: jax.Array | None) -> jax.Array:
        shape = self._specs[number].shape
        if not shape or self._size == 1:
            return part
        rows = jit.all_gather(self._padded(part, self._chunk(shape)), self._shards, after=after)
        return rows.reshape((-1, *shape[1:]))[: shape[0]]

    def _reduce(self, number: int, grad: jax.Array) -> jax.Array:
        shape = self._specs[number].shape
        if not shape:
            return jit.all_reduce(grad, ReduceOp.AVG, self.mesh)
        if self._size > 1:
            rows = self._padded(grad, self._chunk(shape) * self._size)
            rows = rows.reshape((self._size, -1, *shape[1:]))
            mine = rows_of(shape, self._size, self._place)
            grad = jit.reduce_scatter(rows, ReduceOp.AVG, self._shards)[: mine.stop - mine.start]
        if self.mesh.ndim == 2:
            grad = jit.all_reduce(grad, ReduceOp.AVG, self.mesh[0])
        return grad

    def _chunk(self, shape: tuple[int, ...]) -> int:
        return -(-shape[0] // self._size)

    @staticmethod
    def _padded(x: jax.Array, rows: int) -> jax.Array:
        missing = rows - x.shape[0]
        return jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)]) if missing else x
