"""Any optax transformation with its states sharded over the replicas, for pytrees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshlib import ProcessGroup
from parallel._arrays import pieces
from parallel._groups import GroupLike, resolve
from parallel.optim._optax import (
    PATH_OF_LEAF,
    check_transformation,
    generic,
    map_by_path,
    same_shared,
    take_apart,
)
from parallel.zero._shards import assign_owners, check_group_rank, collected

if TYPE_CHECKING:
    import jax

Tree = Any


class ZeroRedundancyOptax:
    """An optax transformation that keeps 1/N of the states of another one. Needs optax.

        adam = ZeroRedundancyOptax(optax.adamw(1e-3), mesh["dp"])
        tx = optax.chain(optax.clip_by_global_norm(1.0), adam)
        state = tx.init(params)
        updates, state = tx.update(grads, state, params)      # also inside jax.jit

    One rank owns each leaf of the parameters: it keeps the leaf's state and computes its update.
    Then the ranks exchange updates, by one all-gather for each dtype. ``transformation`` must treat
    each leaf by itself. Put a transformation of all gradients, such as clipping by the global norm,
    before it in the chain, as above. All ranks call ``update`` together, with equal trees.

    Args:
        transformation: An ``optax.GradientTransformation``.
        process_group: The replicas: ``mesh["dp"]``, a group, or None for the default group.

    Raises TypeError for an argument that is not a transformation, or not a set of ranks.
    """

    def __init__(self, transformation: Any, process_group: GroupLike | None = None) -> None:
        check_transformation(transformation)
        self._transformation = transformation
        self._group = resolve(process_group, "process_group")

    def init(self, params: Tree) -> Any:
        """Return the state for the leaves of ``params`` that this rank owns."""
        return self._transformation.init(_LeafOwners(params, self._group).own(params))

    def update(
        self, updates: Tree, state: Any, params: Tree | None = None, **extra: Any
    ) -> tuple[Tree, Any]:
        """Return the updates of all leaves, and this rank's new state."""
        shares = _LeafOwners(updates, self._group)
        own_params = None if params is None else shares.own(params)
        own, state = self._transformation.update(shares.own(updates), state, own_params, **extra)
        return shares.exchange(own), state

    def consolidate(self, state: Any, params: Tree, to: int | None = None) -> Any:
        """Return the whole state, as if ``transformation`` had run on one process.

        A collective. Leaves are NumPy arrays. Group rank ``to`` gets the state, the others get
        None; by default all get it. Not inside ``jax.jit``. Raises ValueError for a rank that is
        not in the group, and TypeError unless it is an integer. On the ranks that get the state,
        raises ValueError if the transformation depends on several leaves at once: the ranks'
        states differ then.
        """
        import jax

        check_group_rank(to, self._group)
        shares = _LeafOwners(params, self._group)
        mine = jax.tree_util.tree_map(np.asarray, take_apart(state, shares.own_names))
        parts = collected(mine, self._group, to)
        if parts is None:
            return None
        whole = same_shared({n: shared for n, (own, shared) in enumerate(parts) if own})
        for per_leaf, _ in parts:
            for name, leaves in per_leaf.items():
                for path, value in leaves.items():
                    whole[shares.full_path(name, path)] = value
        template = jax.eval_shape(self._transformation.init, params)
        return map_by_path(template, lambda path: whole[jax.tree_util.keystr(path)])

    def shard(self, state: Any, params: Tree) -> Any:
        """Return this rank's part of a whole state: the inverse of ``consolidate``.

        ``state`` may come from any number of ranks, or from ``transformation`` alone. Raises
        KeyError when it is the state of another transformation.
        """
        import jax

        shares = _LeafOwners(params, self._group)
        whole = {
            jax.tree_util.keystr(path): value
            for path, value in jax.tree_util.tree_flatten_with_path(state)[0]
        }
        template = jax.eval_shape(self._transformation.init, shares.own(params))

        def find(path: tuple[Any, ...]) -> Any:
            name, text = generic(path, shares.own_names)
            full = text if name is None else shares.full_path(name, text)
            if full not in whole:
                raise KeyError(
                    f"the state lacks {full}; is it the state of another transformation?"
                )
            return jax.numpy.array(whole[full])

        return map_by_path(template, find)


class _LeafOwners:
    """The owners of a tree's leaves."""

    def __init__(self, tree: Tree, group: ProcessGroup) -> None:
        import jax

        leaves, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._group = group
        self._paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        self._specs = [
            jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)) for _, x in leaves
        ]
        self._names = [f"leaf {number:06}" for number in range(len(leaves))]
        sizes = [int(spec.size) * spec.dtype.itemsize for spec in self._specs]
        self._owners = assign_owners(sizes, [0] * group.size())

    def _of(self, rank: int) -> list[int]:
        return [number for number, owner in enumerate(self._owners) if owner == rank]

    @property
    def own_names(self) -> list[str]:
        return [self._names[number] for number in self._of(self._group.rank())]

    def full_path(self, name: str, path: str) -> str:
        """Return where in a whole state the leaf is that a shard has at ``path`` for ``name``."""
        return path.replace(PATH_OF_LEAF, self._paths[self._names.index(name)])

    def own(self, tree: Tree) -> dict[str, Any]:
        """Return this rank's leaves of ``tree`` by name."""
        leaves = self._structure.flatten_up_to(tree)
        return {self._names[n]: leaves[n] for n in self._of(self._group.rank())}

    def exchange(self, own: dict[str, jax.Array]) -> Tree:
        """Return the tree of all ranks' leaves."""
        if self._group.size() == 1:
            return self._structure.unflatten([own[name] for name in self._names])
        dtypes = dict.fromkeys(spec.dtype for spec in self._specs)
        leaves: dict[int, jax.Array] = {}
        for dtype in dtypes:
            leaves.update(self._exchange_one(dtype, own))
        return self._structure.unflatten([leaves[n] for n in range(len(self._specs))])

    def _exchange_one(self, dtype: Any, own: dict[str, jax.Array]) -> dict[int, jax.Array]:
        import jax.numpy as jnp

        from meshlib import jit

        by_rank = [
            [n for n in self._of(rank) if self._specs[n].dtype == dtype]
            for rank in range(self._group.size())
        ]
        sizes = [sum(int(self._specs[n].size) for n in numbers) for numbers in by_rank]
        parts = [own[self._names[n]].astype(dtype).reshape(-1) for n in by_rank[self._group.rank()]]
        flat = jnp.concatenate([*parts, jnp.zeros(0, dtype)])
        whole = jit.all_gather(flat, self._group, tiled=True, sizes=sizes)
        numbers = [n for of_rank in by_rank for n in of_rank]
        leaves = pieces(whole, (self._specs[n].shape for n in numbers))
        return dict(zip(numbers, leaves, strict=True))
