"""Updates of a window's memory in C: what they refuse, and that none is lost between threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from transport._native import core
from transport._windows.memory import DTYPES, REPLACE_IF, MappedMemory

pytestmark = pytest.mark.skipif(core is None, reason="needs the compiled core")
INT64, SUM = 8, 1
ONE = np.ones(1, np.int64)


@pytest.mark.parametrize(
    ("offset", "itemsize", "code", "op", "values", "expected", "error"),
    [
        (64, 8, INT64, SUM, ONE, b"", ValueError),
        (57, 8, INT64, SUM, ONE, b"", ValueError),
        (2**64 - 8, 8, INT64, SUM, ONE, b"", ValueError),
        (4, 8, INT64, SUM, ONE, b"", ValueError),
        (0, 0, INT64, SUM, ONE, b"", ValueError),
        (0, 16, INT64, SUM, ONE, b"", ValueError),
        (0, 8, INT64, SUM, b"123", b"", ValueError),
        (0, 8, INT64, REPLACE_IF, ONE, b"", ValueError),
        (0, 8, 10, SUM, ONE, b"", TypeError),
        (0, 8, -1, SUM, ONE, b"", TypeError),
        (0, 8, 99, SUM, ONE, b"", TypeError),
        (0, 8, INT64, 2, ONE, b"", TypeError),
        (0, 8, 12, 6, ONE, b"", TypeError),  # float64 has no bits
    ],
)
def test_what_is_no_update_is_refused_and_changes_nothing(
    offset: int, itemsize: int, code: int, op: int, values: Any, expected: bytes, error: type
) -> None:
    memory = np.zeros(64, np.uint8)
    with pytest.raises(error):
        core.update_window(memory, offset, itemsize, code, op, values, expected, False)
    assert not memory.any()


@pytest.mark.parametrize("offset", [60, 3, 2**64 - 8])
def test_a_word_that_is_none_is_not_awaited(offset: int) -> None:
    with pytest.raises(ValueError, match="is not that of a word"):
        core.await_word(np.zeros(64, np.uint8), offset, 0)


@pytest.mark.parametrize("code", DTYPES)
def test_threads_lose_no_update(code: int) -> None:
    dtype = DTYPES[code]
    count, rounds, threads = 2048 // dtype.itemsize, 20, 4  # without the interpreter's lock
    memory = MappedMemory(np.zeros(64 + count * dtype.itemsize, np.uint8))

    def add() -> None:
        for _ in range(rounds):
            memory.combine(None, 64, code, SUM, np.ones(count, dtype))

    workers = [threading.Thread(target=add, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60.0)
    assert (memory.data[64:].view(dtype) == rounds * threads).all()
    assert not memory.data[:64].any()
