"""The transfer of a training loop's state to new ranks.

Each replica with the state sends an equal share of its bytes, and the share's SHA-256 hash, to
each new rank, which receives from all replicas at the same time. A rank gets the state of the ranks
at its own coordinate in the other replicas. So, if parameters are sharded, it gets its shard.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib import DeviceMesh, DistBackendError, ProcessGroup
from meshlib.sharding import DArray, Sharding
from parallel._arrays import namespace
from parallel._checks import check_instance
from parallel._nested import all_leaves, map_leaves
from parallel.join._context import Joinable
from parallel.nn._module import Module


@dataclass(frozen=True, slots=True)
class ArrayPlaceholder:
    """The description of an array in a tree whose arrays are sent separately.

    ``library`` is the array's library. If the array is a part of a global array, ``sharding`` and
    ``whole`` are the sharding and the shape of the global array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    library: str
    sharding: Sharding | None = None
    whole: tuple[int, ...] = ()


class ManagedState:
    """The ``state`` of a loop: a dict of models, optimizers, arrays, and trees of these.

    If a value has ``state_dict`` and ``load_state_dict``, these methods read and load it. The
    wrappers of this package have ``move_to``, which is called when the mesh changes. A value that
    has only ``move_to`` has no state. Any other value is replaced in the dict, except that NumPy
    arrays of the same shape and dtype are written in place.
    """

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        check_instance(state, MutableMapping, "state", "{'model': model, 'optimizer': optimizer}")
        self._state = state

    def check(self, dim: str) -> None:
        """Raise ValueError unless each replica, a coordinate of ``dim``, has the whole state.

        An array that is split over ``dim``, or an optimizer with sharded states, would be lost in
        part with a replica.
        """
        for path, value in all_leaves(self._state):
            if isinstance(value, Joinable) and not hasattr(value, "move_to"):
                raise ValueError(
                    f"state{path} is a {type(value).__name__}, which has a part of its state on"
                    f" each rank of {value.join_process_group}. The part of a lost rank would be"
                    " lost; expected an optimizer whose whole state is on every replica"
                )
            parts = value.state_dict() if isinstance(value, Module) else value
            for inner, leaf in all_leaves(parts, path):
                if isinstance(leaf, DArray) and _is_split_over(dim, leaf.sharding):
                    raise ValueError(
                        f"state{inner} is split over the elastic dim {dim!r}, as {leaf.sharding}."
                        " The part of a lost rank would be lost; expected a split over other dims"
                    )

    def move_to(self, mesh: DeviceMesh) -> None:
        """Move the wrappers to ``mesh``. All its ranks must call."""
        for value in self._state.values():
            if hasattr(value, "move_to"):
                value.move_to(mesh)

    def drop_gradients(self) -> None:
        """Drop the saved activations and gradients of a step that is not committed."""
        for value in self._state.values():
            if isinstance(value, Module):
                value.discard_saved()
            if hasattr(value, "zero_grad"):
                value.zero_grad()

    def take_apart(self) -> tuple[Any, list[Any]]:
        """Return the state with an ``ArrayPlaceholder`` for each array, and the arrays."""
        arrays: list[Any] = []
        return map_leaves(partial(_leaf_of, arrays), self._values()), arrays

    def _values(self) -> dict[str, Any]:
        return {
            name: value.state_dict() if _has_state_dict(value) else value
            for name, value in self._state.items()
            if _has_state_dict(value) or not hasattr(value, "move_to")
        }

    def receive_buffers(self, tree: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Return a NumPy array for each placeholder in another rank's ``tree``.

        If this rank has an array of the same shape and dtype at the path, that array is returned.
        The state is then received in place, without more memory.
        """
        own: dict[str, Any] = {}
        map_leaves(own.__setitem__, self._values())
        buffers: list[npt.NDArray[Any]] = []

        def add_buffer(path: str, leaf: Any) -> None:
            if isinstance(leaf, ArrayPlaceholder):
                buffers.append(_buffer_for(leaf, own.get(path)))

        map_leaves(add_buffer, tree)
        return buffers

    def put_together(self, tree: Mapping[str, Any], arrays: list[Any]) -> None:
        """Load a state that another rank has taken apart; ``arrays`` are NumPy arrays."""
        values = map_leaves(partial(_array_of, iter(arrays)), tree)
        for name, value in values.items():
            own: Any = self._state.get(name)
            if _has_state_dict(own):
                own.load_state_dict(value)
            elif isinstance(value, np.ndarray) and _fits(own, value):
                if own is not value:
                    own[...] = value
            else:
                self._state[name] = value


def _buffer_for(leaf: ArrayPlaceholder, own: Any) -> npt.NDArray[Any]:
    """Return an array to receive into: ``own``, this rank's value at the path, if it fits."""
    local = own.local if isinstance(own, DArray) else own
    usable = _fits(local, leaf) and local.flags.c_contiguous
    return local if usable else np.empty(leaf.shape, leaf.dtype)


def _is_split_over(dim: str, sharding: Sharding) -> bool:
    names = sharding.mesh.mesh_dim_names or ()
    return any(names[i] == dim for split in sharding.dims for i in split if i < len(names))


def _has_state_dict(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _fits(own: Any, value: Any) -> bool:
    """True if ``own`` is a writeable NumPy array of ``value``'s shape and dtype."""
    alike = isinstance(own, np.ndarray) and (own.shape, own.dtype) == (value.shape, value.dtype)
    return alike and own.flags.writeable


def _leaf_of(arrays: list[Any], _path: str, value: Any) -> Any:
    local = value.local if isinstance(value, DArray) else value
    if not (hasattr(local, "dtype") and hasattr(local, "shape")) or isinstance(local, np.generic):
        return value
    if not isinstance(local, np.ndarray) and type(local).__module__.partition(".")[0] != "jaxlib":
        namespace(local, "state")  # raises TypeError for an unsupported library
    arrays.append(local)
    library = type(local).__module__.partition(".")[0]
    shape, dtype = tuple(local.shape), np.dtype(local.dtype)
    if isinstance(value, DArray):
        return ArrayPlaceholder(shape, dtype, library, value.sharding, value.shape)
    return ArrayPlaceholder(shape, dtype, library)


def _array_of(arrays: Iterator[Any], _path: str, leaf: Any) -> Any:
    if not isinstance(leaf, ArrayPlaceholder):
        return leaf
    array = next(arrays)
    if leaf.library in ("jax", "jaxlib"):
        import jax.numpy as jnp

        array = jnp.asarray(array)
    elif leaf.library == "cupy":
        import cupy  # pyright: ignore[reportMissingImports]

        array = cupy.asarray(array)
    return array if leaf.sharding is None else DArray(array, leaf.sharding, leaf.whole, leaf.dtype)


_PIECE_BYTES = 8 << 20
_DIGEST_BYTES = 32
Bytes = npt.NDArray[np.uint8]


def transfer(state: ManagedState, group: ProcessGroup, fresh: Sequence[int]) -> None:
    """Send ``state`` to the members ``fresh`` (global ranks) of ``group``; all members call.

    Raises DistBackendError when a hash does not match, and the errors of calls on the group.
    """
    receivers = [place for place, rank in enumerate(group.ranks) if rank in fresh]
    senders = [place for place in range(len(group.ranks)) if place not in receivers]
    if not receivers or not senders:
        return
    if group.rank() in receivers:
        _receive(state, group, senders)
        return
    tree, arrays = state.take_apart()
    share = _shares(arrays, len(senders))[senders.index(group.rank())]
    for place in receivers:
        if group.rank() == senders[0]:
            group.send_object_list([tree], group_dst=place)
        _send(group, place, share)


def _receive(state: ManagedState, group: ProcessGroup, senders: Sequence[int]) -> None:
    trees: list[Any] = [None]
    group.recv_object_list(trees, group_src=senders[0])
    (tree,) = trees
    buffers = state.receive_buffers(tree)
    errors: list[Exception] = []

    def read(place: int, share: Sequence[Bytes]) -> None:
        try:
            _receive_share(group, place, share)
        except Exception as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    readers = [
        threading.Thread(target=read, args=each, name="meshlib-state", daemon=True)
        for each in zip(senders, _shares(buffers, len(senders)), strict=True)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if errors:
        raise errors[0]
    state.put_together(tree, buffers)


def _shares(arrays: Sequence[Any], count: int) -> list[list[Bytes]]:
    """Return the bytes of ``arrays`` in ``count`` equal shares, each in pieces."""
    flat = [_bytes_of(array) for array in arrays]
    total = sum(data.size for data in flat)
    return [
        list(_between(flat, total * i // count, total * (i + 1) // count)) for i in range(count)
    ]


def _between(flat: Sequence[Bytes], begin: int, end: int) -> Iterator[Bytes]:
    offset = 0
    for data in flat:
        low, high = max(begin - offset, 0), min(end - offset, data.size)
        for first in range(low, high, _PIECE_BYTES):
            yield data[first : min(first + _PIECE_BYTES, high)]
        offset += data.size


def _bytes_of(array: Any) -> Bytes:
    if type(array).__module__.partition(".")[0] == "cupy":
        array = array.get()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _send(group: ProcessGroup, place: int, share: Sequence[Bytes]) -> None:
    digest = hashlib.sha256()
    for piece in share:
        digest.update(piece.data)
        group.send(piece, group_dst=place)
    group.send(np.frombuffer(digest.digest(), np.uint8), group_dst=place)


def _receive_share(group: ProcessGroup, place: int, share: Sequence[Bytes]) -> None:
    digest = hashlib.sha256()
    for piece in share:
        group.recv(piece, group_src=place)
        digest.update(piece.data)
    expected = np.empty(_DIGEST_BYTES, np.uint8)
    group.recv(expected, group_src=place)
    if expected.tobytes() != digest.digest():
        raise DistBackendError(
            f"the state that rank {group.ranks[place]} sent to rank {group.global_rank} does not"
            " match its hash"
        )
