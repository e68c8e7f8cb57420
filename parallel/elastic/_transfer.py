"""The state of those who have it, to those who have come: several senders, each a part, at once.

Each replica that has the state sends an equal share of its bytes to each rank that needs it, with
the share's SHA-256 hash, and the receiver reads from all of them at the same time. A rank gets what
the ranks at its own coordinate in the other replicas have: where parameters are sharded, its shard.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib import DistBackendError, ProcessGroup
from parallel.elastic._state import ManagedState

_PIECE_BYTES = 8 << 20
_DIGEST_BYTES = 32
Bytes = npt.NDArray[np.uint8]


def transfer(
    state: ManagedState, group: ProcessGroup, fresh: Sequence[int], *, compress: bool = False
) -> None:
    """Bring ``state`` to the members ``fresh`` (global ranks) of ``group``; all members call.

    ``compress``: by zlib on the way, for senders that are far away. Raises DistBackendError when a
    hash does not fit, and what calls on the group raise.
    """
    needy = [place for place, rank in enumerate(group.ranks) if rank in fresh]
    holders = [place for place in range(len(group.ranks)) if place not in needy]
    if not needy or not holders:
        return
    if group.rank() in needy:
        _receive(state, group, holders, compress)
        return
    tree, arrays = state.take_apart()
    share = _shares(arrays, len(holders))[holders.index(group.rank())]
    for place in needy:
        if group.rank() == holders[0]:
            group.send_object_list([tree], group_dst=place)
        _send(group, place, share, compress)


def _receive(
    state: ManagedState, group: ProcessGroup, holders: Sequence[int], compress: bool
) -> None:
    told: list[Any] = [None]
    group.recv_object_list(told, group_src=holders[0])
    (tree,) = told
    arrays = state.room_for(tree)
    errors: list[Exception] = []

    def read(place: int, share: Sequence[Bytes]) -> None:
        try:
            _take(group, place, share, compress)
        except Exception as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    readers = [
        threading.Thread(target=read, args=each, name="meshlib-state", daemon=True)
        for each in zip(holders, _shares(arrays, len(holders)), strict=True)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if errors:
        raise errors[0]
    state.put_together(tree, arrays)


def _shares(arrays: Sequence[Any], count: int) -> list[list[Bytes]]:
    """Return the bytes of ``arrays`` in ``count`` equal shares, each in pieces."""
    flat = [_bytes_of(array) for array in arrays]
    total = sum(one.size for one in flat)
    return [
        list(_between(flat, total * i // count, total * (i + 1) // count)) for i in range(count)
    ]


def _between(flat: Sequence[Bytes], begin: int, end: int) -> Iterator[Bytes]:
    offset = 0
    for one in flat:
        low, high = max(begin - offset, 0), min(end - offset, one.size)
        for first in range(low, high, _PIECE_BYTES):
            yield one[first : min(first + _PIECE_BYTES, high)]
        offset += one.size


def _bytes_of(array: Any) -> Bytes:
    if type(array).__module__.partition(".")[0] == "cupy":
        array = array.get()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _send(group: ProcessGroup, place: int, share: Sequence[Bytes], compress: bool) -> None:
    digest = hashlib.sha256()
    for piece in share:
        digest.update(piece.data)
        if compress:
            packed = np.frombuffer(zlib.compress(piece.data, 1), np.uint8)
            group.send(np.array([packed.size], np.int64), group_dst=place)
            group.send(packed, group_dst=place)
        else:
            group.send(piece, group_dst=place)
    group.send(np.frombuffer(digest.digest(), np.uint8), group_dst=place)


def _take(group: ProcessGroup, place: int, share: Sequence[Bytes], compress: bool) -> None:
    digest = hashlib.sha256()
    for piece in share:
        if compress:
            size = np.empty(1, np.int64)
            group.recv(size, group_src=place)
            packed = np.empty(int(size[0]), np.uint8)
            group.recv(packed, group_src=place)
            piece[...] = np.frombuffer(zlib.decompress(packed.data), np.uint8)
        else:
            group.recv(piece, group_src=place)
        digest.update(piece.data)
    said = np.empty(_DIGEST_BYTES, np.uint8)
    group.recv(said, group_src=place)
    if said.tobytes() != digest.digest():
        raise DistBackendError(
            f"the state that rank {group.ranks[place]} has sent to rank {group.global_rank} came"
            " with another hash"
        )
