"""``FullyShardedDataParallel``: shards a model, and gathers each layer where it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy.typing as npt

from meshlib import DeviceMesh
from parallel.jax import fsdp
from parallel.jax.paths import leaves_below, path_of
from parallel.jax.trees import TreeOfParameters
from parallel.nested import matches

Tree = Any


class FullyShardedDataParallel:
    """Keeps 1/n of each parameter of a model on each of n ranks; gathers layers when called.

        sharded = FullyShardedDataParallel(model, mesh["dp_shard"], layers=["layers.*"])
        model = sharded.params                      # this rank's parts
        state = optimizer.init(model)               # and so 1/n of the optimizer's states

        @jax.jit
        def step(model, state, batch):
            loss, grads = sharded.value_and_grad(loss_fn)(model, batch)
            updates, state = optimizer.update(grads, state, model)
            return optax.apply_updates(model, updates), state, loss

    For models whose layers are nodes of a pytree that are called, such as equinox's. ``loss_fn``
    gets the model as on one process: a call of a layer gathers its parameters, in forward and again
    in backward. Parameters outside of layers are whole for the whole step. For other models, and
    layers that are stacked, use ``parallel.jax.fsdp``, which this class is made of.

    Args:
        params: the model, a pytree, the same on all ranks: each keeps its part of its own values.
        mesh: as for ``fsdp.shard``.
        layers: paths of the layers, such as ``"layers.*"``: ``*`` stands for one name.
        param_dtype: as for ``fsdp.shard``.
        reduce_dtype: as for ``fsdp.shard``.
        init_sync: as for ``fsdp.shard``.

    Raises:
        TypeError: as ``fsdp.shard``; for a layer that cannot be called.
        ValueError: as ``fsdp.shard``; for a path in ``layers`` that the model does not have.
    """

    params: Tree
    """This rank's parts; the layers are ``ShardedLayer``."""

    def __init__(
        self,
        params: Tree,
        mesh: DeviceMesh,
        *,
        layers: Iterable[str] = (),
        param_dtype: npt.DTypeLike | None = None,
        reduce_dtype: npt.DTypeLike | None = None,
        init_sync: bool = True,
    ) -> None:
        parts = fsdp.shard(
            params,
            mesh,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            init_sync=init_sync,
        )
        self.params = _placed(parts, list(layers), f"rank {mesh.get_rank()}")
        self._tree = TreeOfParameters.of(self.params)

    def value_and_grad(
        self, fun: Callable[..., Any], *, has_aux: bool = False
    ) -> Callable[..., tuple[Any, Tree]]:
        """Return a function like ``jax.value_and_grad(fun)``, of parts in place of parameters.

        The value is this rank's; the gradients are this rank's parts of the averages over all
        ranks, None for leaves that are not trained. The function raises ValueError for a tree that
        differs from ``params``, naming the first leaf.
        """

        def value_and_grad(params: Tree, *args: Any, **kwargs: Any) -> tuple[Any, Tree]:
            self._tree.check(params, "params")
            trained, others = self._tree.split(params)

            def loss(trained: list[Any]) -> Any:
                return fun(_gathered(self._tree.join(trained, others)), *args, **kwargs)

            value, grads = jax.value_and_grad(loss, has_aux=has_aux)(trained)
            return value, self._tree.join(grads)

        return value_and_grad


@partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=[])
@dataclass(frozen=True)
class ShardedLayer:
    """A layer of which this rank has ``parts``: a call gathers them, and calls the whole layer."""

    parts: Tree

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return what the layer returns."""
        return fsdp.layer(_call)(self.parts, *inputs, **options)


def _call(layer: Any, *inputs: Any, **options: Any) -> Any:
    return layer(*inputs, **options)


def _is_layer(node: Any) -> bool:
    return isinstance(node, ShardedLayer)


def _gathered(params: Tree) -> Tree:
    """Return ``params`` with whole arrays, but for those of layers."""
    nodes, structure = jax.tree_util.tree_flatten(
        params, is_leaf=lambda node: _is_layer(node) or fsdp.is_part(node)
    )
    wholes = fsdp.gather([None if _is_layer(node) else node for node in nodes])
    pairs = zip(nodes, wholes, strict=True)
    kept = [node if _is_layer(node) else whole for node, whole in pairs]
    return jax.tree_util.tree_unflatten(structure, kept)


def _placed(parts: Tree, layers: list[str], where: str) -> Tree:
    """Return ``parts`` with a ``ShardedLayer`` in place of each node that ``layers`` mean."""
    leaves_below(parts, layers, f"{where}: layers")

    def is_layer(path: Any, _: Any) -> bool:
        return any(matches(path_of(path), pattern) for pattern in layers)

    def place(path: Any, node: Any) -> Any:
        if not is_layer(path, node):
            return node
        if not callable(node):
            raise TypeError(
                f"{where}: layers: {path_of(path)} is a {type(node).__qualname__}, which cannot be"
                " called; expected a module. Elsewhere call parallel.jax.fsdp.gather where the"
                " layer begins"
            )
        return ShardedLayer(node)

    return jax.tree_util.tree_map_with_path(place, parts, is_leaf=is_layer, is_leaf_takes_path=True)
