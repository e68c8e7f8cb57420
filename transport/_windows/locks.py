"""The lock of a member's memory: a word in that memory, which members change only by updates.

The word is the number of ranks that share the lock, or ``_EXCLUSIVE`` plus the place of its only
holder. A waiting rank that maps the memory sees the word change; other ranks poll. So waiting ranks
acquire the lock in no particular order.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._errors import CommunicatorTimeoutError
from transport._operands.reduce_op import ReduceOp
from transport._waiting.spinning import PollBackoff
from transport._windows.memory import REPLACE_IF, WORD, MappedMemory, Target

LOCK = 0
"""The offset of the word."""
WORD_CODE = dtype_code(WORD)
SUM: int = ReduceOp.SUM.code
_EXCLUSIVE = 1 << 31
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 5e-3


def acquire(
    target: Target, place: int, shared: bool, call: Call, check: Callable[[int | None, int], None]
) -> int:
    """Acquire the lock of ``target`` for the member at ``place``; return the argument ``back`` for
    ``release``.

    While waiting, calls ``check(holder, sharing)``, which raises if waiting is pointless. It gets
    the place of the exclusive holder, or None and the number of sharing ranks.
    """
    pauses, seen = PollBackoff(_FIRST_PAUSE, _LONGEST_PAUSE), 0
    while True:
        expected = seen if shared and seen < _EXCLUSIVE else 0
        wanted = expected + 1 if shared else _EXCLUSIVE | place
        back = -1 if shared else -wanted

        def late(old: bytes | memoryview, expected: int = expected, back: int = back) -> None:
            if int.from_bytes(old, "little") == expected:  # Acquired after the call's deadline.
                release(target, None, back)

        new, old = word(wanted), word(expected)
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
    """Release the lock; ``back`` is the result of ``acquire``. Without a ``call``, return False
    instead of waiting.
    """
    return target.combine(call, LOCK, WORD_CODE, SUM, word(back), True)


def word(value: int) -> bytes:
    """Return ``value`` modulo 2^64 as the bytes of a word."""
    return (value % (1 << 64)).to_bytes(WORD.itemsize, "little")


def _check(check: Callable[[int | None, int], None], seen: int) -> None:
    if seen < _EXCLUSIVE:
        check(None, seen)
    else:
        check(seen & ~_EXCLUSIVE, 0)
