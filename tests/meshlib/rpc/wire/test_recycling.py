"""Memory that is used again is nobody else's any more."""

import numpy as np

from meshlib.rpc.wire.payload import Pickling, load
from meshlib.rpc.wire.recycling import KEPT_BYTES, Recycler

SIZE = 1 << 20


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_given_out_again_only_when_nothing_refers_to_it():
    recycler = Recycler()
    sent = np.arange(SIZE // 8)
    payload = Pickling().dump({"a": sent})
    memory = recycler.take(SIZE)
    memory[:] = payload.buffers[0]
    where = address(memory)
    value = load(payload.data, [memory.data])["a"]
    del memory
    part = value[5:7]
    for _ in range(3):
        other = recycler.take(SIZE)
        assert address(other) != where
        other[:] = 0
    np.testing.assert_array_equal(value, sent)
    del value
    assert address(recycler.take(SIZE)) != where
    assert list(part) == [5, 6]
    del part, other
    assert where in {address(taken) for taken in [recycler.take(SIZE) for _ in range(9)]}


def test_only_so_much_is_kept():
    recycler = Recycler()
    arrays = [recycler.take(KEPT_BYTES // 4) for _ in range(8)]
    assert sum(kept.nbytes for kept in recycler._kept) <= KEPT_BYTES
    assert len({address(array) for array in arrays}) == 8
    assert recycler.take(100).nbytes == 100
