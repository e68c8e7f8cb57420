"""Sharding of an optax transformation's states over replicas, for pytrees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshlib import ProcessGroup
from parallel._arrays import pieces
from parallel._checks import check_transformation
from parallel._groups import GroupLike, resolve
from parallel.zero._shards import assign_owners, check_group_rank, collected

if TYPE_CHECKING:
    import jax

Tree = Any


class ZeroRedundancyOptax:
    """An optax transformation that stores 1/N of another one's states on each rank. Needs optax.

        adam = ZeroRedundancyOptax(optax.adamw(1e-3), mesh["dp"])
        tx = optax.chain(optax.clip_by_global_norm(1.0), adam)
        state = tx.init(params)
        updates, state = tx.update(grads, state, params)      # also inside jax.jit

    Each leaf of the parameters has one owner, a rank that stores the leaf's state and computes its
    update. Then the ranks exchange updates, by one all-gather for each dtype. ``transformation``
    must treat each leaf independently. Put a transformation of all gradients, such as clipping by
    the global norm, before it in the chain, as above. All ranks must call ``update`` together, with
    equal trees.

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

        A collective, not for use inside ``jax.jit``. Group rank ``to`` gets the state, with NumPy
        arrays, and other ranks get None; by default all ranks get the state. Raises ValueError if
        ``to`` is not in the group, and TypeError unless it is an integer. Ranks that get the state
        raise ValueError if the ranks' states differ because the transformation depends on several
        leaves at once.
        """
        import jax

        check_group_rank(to, self._group)
        shares = _LeafOwners(params, self._group)
        own = {
            shares.path_in_whole(path): np.asarray(value)
            for path, value in jax.tree_util.tree_flatten_with_path(state)[0]
        }
        parts = collected(own, self._group, to)
        if parts is None:
            return None
        whole: dict[str, Any] = {}
        first, *others = sorted(set(shares.owners))
        for rank in (first, *others):
            for path, value in parts[rank].items():
                # Values that do not belong to a leaf, such as a step count, are on several ranks.
                if path in whole and not np.array_equal(whole[path], value):
                    raise ValueError(
                        f"the optimizer's {path} is {whole[path]} on rank {first} and {value} on"
                        f" rank {rank}, which own different leaves: the transformation depends on"
                        " several leaves at once, so its state cannot be sharded"
                    )
                whole[path] = value
        template = jax.eval_shape(self._transformation.init, params)

        def value_at(path: Any, _: Any) -> Any:
            return whole[jax.tree_util.keystr(path)]

        return jax.tree_util.tree_map_with_path(value_at, template)

    def shard(self, state: Any, params: Tree) -> Any:
        """Return this rank's part of a whole state: the inverse of ``consolidate``.

        ``state`` may be from any number of ranks, or from ``transformation`` itself. Raises
        KeyError if it is the state of another transformation.
        """
        import jax

        shares = _LeafOwners(params, self._group)
        whole = {
            jax.tree_util.keystr(path): value
            for path, value in jax.tree_util.tree_flatten_with_path(state)[0]
        }

        def own(path: Any, _: Any) -> jax.Array:
            full = shares.path_in_whole(path)
            if full not in whole:
                raise KeyError(
                    f"the state lacks {full}; is it the state of another transformation?"
                )
            return jax.numpy.array(whole[full])

        template = jax.eval_shape(self._transformation.init, shares.own(params))
        return jax.tree_util.tree_map_with_path(own, template)


class _LeafOwners:
    """The owners of a tree's leaves.

    The transformation gets a rank's own leaves as a dict by their paths in the tree. So a rank's
    state has this dict in each place where the whole state has a copy of the tree.
    """

    def __init__(self, tree: Tree, group: ProcessGroup) -> None:
        import jax

        leaves, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._group = group
        self._paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        self._specs = [
            jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)) for _, x in leaves
        ]
        sizes = [int(spec.size) * spec.dtype.itemsize for spec in self._specs]
        self.owners: list[int] = assign_owners(sizes, [0] * group.size())
        """The group rank that owns each leaf."""

    def _of(self, rank: int) -> list[int]:
        return [number for number, owner in enumerate(self.owners) if owner == rank]

    def own(self, tree: Tree) -> dict[str, Any]:
        """Return this rank's leaves of ``tree`` by path."""
        leaves = self._structure.flatten_up_to(tree)
        return {self._paths[n]: leaves[n] for n in self._of(self._group.rank())}

    def path_in_whole(self, path: Any) -> str:
        """Convert a path in this rank's state to the path in the whole state."""
        from jax.tree_util import DictKey, keystr

        return "".join(
            key.key if isinstance(key, DictKey) and key.key in self._paths else keystr((key,))
            for key in path
        )

    def exchange(self, own: dict[str, jax.Array]) -> Tree:
        """Exchange the ranks' own leaves, and return the tree of all leaves."""
        if self._group.size() == 1:
            return self._structure.unflatten([own[name] for name in self._paths])
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
        parts = [own[self._paths[n]].astype(dtype).reshape(-1) for n in by_rank[self._group.rank()]]
        flat = jnp.concatenate([*parts, jnp.zeros(0, dtype)])
        whole = jit.all_gather(flat, self._group, tiled=True, sizes=sizes)
        numbers = [n for of_rank in by_rank for n in of_rank]
        leaves = pieces(whole, (self._specs[n].shape for n in numbers))
        return dict(zip(numbers, leaves, strict=True))
