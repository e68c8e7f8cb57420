"""The lock of a member's memory: a word there, which all members change by updates alone.

The word is the number of ranks that share the lock, or ``_EXCLUSIVE`` with the place of the one
that has it alone. A waiting rank that maps the memory sees the word change; others ask again. So
waiting ranks get the lock in no order.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._errors import CommunicatorTimeoutError
from transport._operands.reduce_op import ReduceOp
from transport._waiting.spinning import Pauses
from transport._windows.memory import REPLACE_IF, WORD, MappedMemory, Target

LOCK = 0
"""Where the word is."""
WORD_CODE = dtype_code(WORD)
SUM: int = ReduceOp.SUM.code
_EXCLUSIVE = 1 << 31
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 5e-3


def acquire(
    target: Target, place: int, shared: bool, call: Call, check: Callable[[int | None, int], None]
) -> int:
    """Take the lock of ``target`` for the member at ``place``; return a function that releases it.

    ``check(holder, sharing)`` raises when waiting is pointless: for the member at ``holder``, or
    for ``sharing`` ones (None).
    """
    pauses, seen = Pauses(_FIRST_PAUSE, _LONGEST_PAUSE), 0
    while True:
        expected = seen if shared and seen < _EXCLUSIVE else 0
        mine = expected + 1 if shared else _EXCLUSIVE | place
        back = -1 if shared else -mine

        def late(old: bytes | memoryview, expected: int = expected, back: int = back) -> None:
            if int.from_bytes(old, "little") == expected:  # nobody waits for it any more
                release(target, None, back)

        new, old = word(mine), word(expected)
        try:
            old = target.update(call, LOCK, WORD_CODE, REPLACE_IF, new, old, late)
        except CommunicatorTimeoutError:
            if seen:
                _check(check, seen)
            raise
        seen = int.from_bytes(old, "little")
        if seen == expected:
            return back
        if shared and seen < _EXCLUSIVE:
            continue
        _check(check, seen)
        if isinstance(target, MappedMemory):
            target.await_word(LOCK, seen)
        else:
            time.sleep(pauses.next(call.deadline.remaining()))


def release(target: Target, call: Call | None, back: int) -> bool:
    """Give back what ``acquire`` took; False without a ``call`` if that had to wait."""
    return target.combine(call, LOCK, WORD_CODE, SUM, word(back), True)


def word(value: int) -> bytes:
    """Return a word, where numbers below 0 wrap."""
    return (value % (1 << 64)).to_bytes(WORD.itemsize, "little")


def _check(check: Callable[[int | None, int], None], seen: int) -> None:
    if seen < _EXCLUSIVE:
        check(None, seen)
    else:
        check(seen & ~_EXCLUSIVE, 0)
