"""Memory that is used again is nobody else's any more."""

import numpy as np

from meshlib._arrays.pickling import dump, load
from transport._channel.buffer_pool import KEPT_BYTES, BufferPool

SIZE = 1 << 20


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_given_out_again_only_when_nothing_refers_to_it():
    pool = BufferPool()
    sent = np.arange(SIZE // 8)
    payload = dump({"a": sent})
    memory = pool.take(SIZE)
    memory[:] = payload.buffers[0]
    where = address(memory)
    value = load(payload.data, [memory.data])["a"]
    del memory
    part = value[5:7]
    for _ in range(3):
        other = pool.take(SIZE)
        assert address(other) != where
        other[:] = 0
    np.testing.assert_array_equal(value, sent)
    del value
    assert address(pool.take(SIZE)) != where
    assert list(part) == [5, 6]
    del part, other
    assert where in {address(taken) for taken in [pool.take(SIZE) for _ in range(9)]}


def test_only_so_much_is_kept():
    pool = BufferPool()
    arrays = [pool.take(KEPT_BYTES // 4) for _ in range(8)]
    assert sum(kept.nbytes for kept in pool._kept) <= KEPT_BYTES
    assert len({address(array) for array in arrays}) == 8
    assert pool.take(100).nbytes == 100
