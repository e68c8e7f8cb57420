"""What a training loop keeps from step to step, taken apart into arrays, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from meshlib import DeviceMesh
from meshlib.sharding import DArray, Sharding
from parallel.arrays import namespace
from parallel.checks import check_instance
from parallel.nn.module import Module


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands for an array in a tree whose arrays travel apart from it.

    ``library`` is that of the array; ``sharding`` and ``whole`` are those of the global array that
    it is this rank's part of, if it is.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    library: str
    sharding: Sharding | None = None
    whole: tuple[int, ...] = ()


class ManagedState:
    """The ``state`` of a loop: a dict of models, optimizers, arrays, and trees of those.

    What has ``state_dict`` and ``load_state_dict`` is asked by them. What has ``move_to`` (the
    wrappers of this package) is told when the mesh changes; if that is all, it has no state.
    Anything else is replaced in the dict,
    arrays of NumPy of the same shape and dtype are written in place.
    """

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        check_instance(state, MutableMapping, "state", "{'model': model, 'optimizer': optimizer}")
        self._state = state

    def move_to(self, mesh: DeviceMesh) -> None:
        """Tell the wrappers that ``mesh`` is the one from now on. All its ranks call."""
        for value in self._state.values():
            if hasattr(value, "move_to"):
                value.move_to(mesh)

    def drop_gradients(self) -> None:
        """Forget what a step has left that does not count."""
        for value in self._state.values():
            if isinstance(value, Module):
                value.discard_saved()
            if hasattr(value, "zero_grad"):
                value.zero_grad()

    def take_apart(self) -> tuple[Any, list[Any]]:
        """Return the state with a ``Leaf`` in the place of each array, and the arrays."""
        arrays: list[Any] = []
        told = {
            name: value.state_dict() if _has_state_dict(value) else value
            for name, value in self._state.items()
            if _has_state_dict(value) or not hasattr(value, "move_to")
        }
        return _mapped(told, lambda leaf: _leaf_of(leaf, arrays)), arrays

    def room_for(self, tree: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Return an array of NumPy for each leaf of a ``tree`` that another rank has taken apart.

        Where this rank has an array of the same shape and dtype in its place, it is that one: what
        is written to it is there, and needs no memory of its own.
        """
        own = {
            name: value.state_dict() if _has_state_dict(value) else value
            for name, value in self._state.items()
            if name in tree
        }
        room: list[npt.NDArray[Any]] = []
        _make_room(tree, own, room)
        return room

    def put_together(self, tree: Mapping[str, Any], arrays: list[Any]) -> None:
        """Take over what another rank has taken apart; ``arrays`` are NumPy's."""
        left = iter(arrays)
        told = _mapped(tree, lambda leaf: _array_of(leaf, left))
        for name, value in told.items():
            own = self._state.get(name)
            if _has_state_dict(own):
                cast(Any, own).load_state_dict(value)
            elif isinstance(own, np.ndarray) and _fits(own, value):
                if own is not value:
                    own[...] = value
            else:
                self._state[name] = value


def _make_room(tree: Any, own: Any, room: list[npt.NDArray[Any]]) -> None:
    """Walk through ``tree`` as ``_mapped`` does, and through ``own`` as far as it is alike."""
    if isinstance(tree, Mapping):
        for key, value in cast(Any, tree).items():
            _make_room(value, own.get(key) if isinstance(own, Mapping) else None, room)
    elif isinstance(tree, (list, tuple)):
        alike = isinstance(own, (list, tuple)) and len(own) == len(cast(Any, tree))
        for i, value in enumerate(cast(Any, tree)):
            _make_room(value, cast(Any, own)[i] if alike else None, room)
    elif isinstance(tree, Leaf):
        here = own.local if isinstance(own, DArray) else own
        usable = (
            isinstance(here, np.ndarray)
            and (here.shape, here.dtype) == (tree.shape, tree.dtype)
            and here.flags.writeable
            and here.flags.c_contiguous
        )
        room.append(cast(Any, here) if usable else np.empty(tree.shape, tree.dtype))


def _has_state_dict(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _fits(own: Any, value: Any) -> bool:
    alike = isinstance(value, np.ndarray) and own.shape == value.shape
    return alike and own.dtype == value.dtype and own.flags.writeable


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``tree`` with each leaf changed: dicts, lists, (named) tuples, and JAX's pytrees."""
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change) for key, value in cast(Any, tree).items()}
    if isinstance(tree, list):
        return [_mapped(value, change) for value in cast(Any, tree)]
    if isinstance(tree, tuple):
        values = [_mapped(value, change) for value in cast(Any, tree)]
        # A named tuple takes its fields one by one, as optax's states do.
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return change(tree)


def _leaf_of(value: Any, arrays: list[Any]) -> Any:
    local = value.local if isinstance(value, DArray) else value
    if not (hasattr(local, "dtype") and hasattr(local, "shape")) or isinstance(local, np.generic):
        return value
    if not isinstance(local, np.ndarray) and type(local).__module__.partition(".")[0] != "jaxlib":
        namespace(local, "state")  # refuses what is not an array
    arrays.append(local)
    library = type(local).__module__.partition(".")[0]
    shape, dtype = tuple(local.shape), np.dtype(local.dtype)
    if isinstance(value, DArray):
        return Leaf(shape, dtype, library, value.sharding, value.shape)
    return Leaf(shape, dtype, library)


def _array_of(leaf: Any, arrays: Iterator[Any]) -> Any:
    if not isinstance(leaf, Leaf):
        return leaf
    array = next(arrays)
    if leaf.library in ("jax", "jaxlib"):
        import jax.numpy as jnp

        array = jnp.asarray(array)
    elif leaf.library == "cupy":
        import cupy  # pyright: ignore[reportMissingImports]

        array = cupy.asarray(array)
    return array if leaf.sharding is None else DArray(array, leaf.sharding, leaf.whole, leaf.dtype)
