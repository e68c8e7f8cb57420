"""The engine's group as Python has it: what a call returns, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from transport.call import NO_ROOT, Call, CallHeader, Kind
from transport.deadline import Deadline
from transport.native import core

pytestmark = pytest.mark.skipif(core is None, reason="there is no compiled core")
SUM, MAX = 1, 5
SIZES = 64, 256, 1 << 20


def groups(size: int = 2) -> list[Any]:
    """Return all members' views of one piece of memory."""
    assert core is not None
    nbytes, block = core.measure_group(size, 1 << 10)
    memory = np.zeros(nbytes, np.uint8)
    core.create_group(memory, size, block)
    return [core.Group(memory, rank, size, SIZES, False) for rank in range(size)]


def a_call(kind: Kind, count: int = 0, number: int = 1) -> Call:
    return Call(CallHeader(number, count, NO_ROOT, kind, 0, 0), Deadline.after(60))


def reduce_of(group: Any, array: Any, op: int = SUM, number: int = 1) -> int:
    call = a_call(Kind.ALL_REDUCE, array.size, number)
    return group.start(Kind.ALL_REDUCE, 0, call, (), [array], op)


def test_a_call_says_again_until_the_other_comes_and_then_is_done() -> None:
    assert core is not None
    one, other = groups()
    x, y = np.arange(3.0), np.ones(3)
    assert reduce_of(one, x) == core.AGAIN
    assert one.waits_for == 1
    assert one.go_on() == core.AGAIN
    assert reduce_of(other, y) == core.DONE
    assert one.go_on() == core.DONE
    assert x.tolist() == y.tolist() == [1.0, 2.0, 3.0]


def test_what_the_engine_has_no_loops_for_is_left_to_the_caller() -> None:
    assert core is not None
    one, other = groups()
    x, y = np.array([3, 4], np.int8), np.array([5, 1], np.int8)
    assert reduce_of(one, x, MAX) == core.AGAIN
    assert reduce_of(other, y, MAX) == core.UNSUPPORTED
    assert one.go_on() == core.UNSUPPORTED
    for group in (one, other):
        parts, out = group.parts()
        assert [list(part) for part in parts] == [[3, 4], [5, 1]]
        out[:] = bytes([5, 4])
        assert group.go_on() == core.DONE
    assert x.tolist() == y.tolist() == [5, 4]


def test_calls_that_differ_are_a_mismatch_and_both_headers_told() -> None:
    assert core is not None
    one, other = groups()
    assert reduce_of(one, np.ones(3)) == core.AGAIN
    assert reduce_of(other, np.ones(4)) == core.MISMATCH
    trouble, peer, ours, theirs, _, _ = other.problem()
    assert (trouble, peer) == (core.OTHER_CALL, 0)
    assert (CallHeader.unpack(ours).elements, CallHeader.unpack(theirs).elements) == (4, 3)
    assert one.go_on() == core.MISMATCH


def test_news_ends_a_wait_also_where_the_others_have_come() -> None:
    """Else a call that was aborted could end well."""
    assert core is not None
    one, other = groups()
    assert reduce_of(other, np.ones(1)) == core.AGAIN
    one.wake()
    x = np.ones(1)
    assert reduce_of(one, x) == core.AGAIN
    assert one.go_on() == core.DONE
    assert x[0] == 2


def test_an_array_that_is_written_must_be_writable_and_all_must_be_there() -> None:
    assert core is not None
    one, _ = groups()
    locked = np.ones(3)
    locked.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        reduce_of(one, locked)
    call = a_call(Kind.ALL_GATHER)
    with pytest.raises(ValueError, match="expected 1 inputs and 3 arrays"):
        one.start(Kind.ALL_GATHER, 0, call, [np.ones(1)], [np.ones(1)], 0)
    with pytest.raises(ValueError, match="too many"):
        one.start(Kind.ALL_GATHER, 0, call, [np.ones(1)] * 2, [], 0)
    for kind, root in ((Kind.SEND, 0), (Kind.BROADCAST, 2), (Kind.BROADCAST, -1)):
        with pytest.raises(ValueError, match="is no call"):
            one.start(kind, root, call, (), (), 0)
    with pytest.raises(TypeError, match="expected a kind, a root, a call"):
        one.start(Kind.BARRIER, 0, "call", (), (), 0)
    assert one.number == 0  # nothing has happened


def test_memory_of_another_layout_is_refused() -> None:
    assert core is not None
    nbytes, block = core.measure_group(3, 0)
    memory = np.zeros(nbytes, np.uint8)
    with pytest.raises(ValueError, match="another layout"):
        core.Group(memory, 0, 3, SIZES, False)  # nothing is written there
    core.create_group(memory, 3, block)
    for size, rank, part in ((3, 3, memory), (4, 0, memory), (3, 0, memory[:-4096])):
        with pytest.raises(ValueError, match="another layout"):
            core.Group(part, rank, size, SIZES, False)
    with pytest.raises(ValueError, match="not those of 2 members"):
        core.create_group(memory, 2, block)


def test_a_counter_that_is_too_far_is_damage_and_its_member_named() -> None:
    """The counters follow the head and the sleepers' flags, a line each."""
    assert core is not None
    nbytes, block = core.measure_group(2, 1 << 10)
    memory = np.zeros(nbytes, np.uint8)
    core.create_group(memory, 2, block)
    one = core.Group(memory, 0, 2, SIZES, False)
    memory[128 + 64 + 7] = 0x80  # the highest byte of member 1's
    assert reduce_of(one, np.ones(1)) == core.DAMAGED
    assert one.problem()[1] == 1
