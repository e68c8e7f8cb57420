"""The engine's group as Python has it: what a call returns, and what it refuses."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transport._calls.call import Call
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._native import core
from transport._waiting.deadline import Deadline

pytestmark = pytest.mark.skipif(core is None, reason="there is no compiled core")
SUM, MIN, MAX = 1, 4, 5
SIZES = 64, 1 << 20


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


def test_a_call_returns_again_until_the_other_arrives_and_then_done() -> None:
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


@pytest.mark.parametrize(("op", "wanted"), [(MIN, np.minimum), (MAX, np.maximum)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_least_and_greatest_of_floats_are_numpys(op: int, wanted: Any, dtype: Any) -> None:
    assert core is not None
    one, other = groups()
    payload = np.array([0x7FC00123 << 32 * (dtype == np.float64)], f"u{dtype().itemsize}")
    special = [1.0, -1.0, np.inf, -np.inf, np.nan, *payload.view(dtype), 3e38, 1e-40]
    x, y = (np.array(special, dtype)[at.ravel()] for at in np.indices((8, 8)))
    expected = wanted(x, y)
    assert reduce_of(one, x, op) == core.AGAIN
    assert reduce_of(other, y, op) == core.DONE
    assert one.go_on() == core.DONE
    assert x.tobytes() == y.tobytes() == expected.tobytes()


def test_calls_that_differ_are_a_mismatch_with_both_headers() -> None:
    assert core is not None
    one, other = groups()
    assert reduce_of(one, np.ones(3)) == core.AGAIN
    assert reduce_of(other, np.ones(4)) == core.MISMATCH
    trouble, peer, ours, theirs, _, _ = other.problem()
    assert (trouble, peer) == (core.OTHER_CALL, 0)
    assert (CallHeader.unpack(ours).elements, CallHeader.unpack(theirs).elements) == (4, 3)
    assert one.go_on() == core.MISMATCH


def test_a_wakeup_ends_a_wait_even_if_the_others_have_arrived() -> None:
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
    with pytest.raises(ValueError, match="expected 1 inputs, and 3 arrays in all"):
        one.start(Kind.ALL_GATHER, 0, call, [np.ones(1)], [np.ones(1)], 0)
    with pytest.raises(ValueError, match="too many"):
        one.start(Kind.ALL_GATHER, 0, call, [np.ones(1)] * 2, [], 0)
    for kind, root in ((Kind.SEND, 0), (Kind.BROADCAST, 2), (Kind.BROADCAST, -1)):
        with pytest.raises(ValueError, match="is not a call"):
            one.start(kind, root, call, (), (), 0)
    with pytest.raises(TypeError, match="expected a kind, a root, a call"):
        one.start(Kind.BARRIER, 0, "call", (), (), 0)
    assert one.number == 0  # nothing has happened


def test_memory_of_another_layout_is_refused() -> None:
    assert core is not None
    nbytes, block = core.measure_group(3, 0)
    memory = np.zeros(nbytes, np.uint8)
    with pytest.raises(ValueError, match="another version's layout"):
        core.Group(memory, 0, 3, SIZES, False)  # nothing is written there
    core.create_group(memory, 3, block)
    for size, rank, part in ((3, 3, memory), (4, 0, memory), (3, 0, memory[:-4096])):
        with pytest.raises(ValueError, match="another version's layout"):
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


def test_misuse_is_refused() -> None:
    assert core is not None
    one, _ = groups()
    with pytest.raises(RuntimeError, match="made once"):
        one.__init__(None, 0, 2, SIZES, False)
    with pytest.raises(TypeError, match="list of segments"):
        one.lay_out(())
    with pytest.raises(TypeError):
        one.lay_out([("a", "segment", "is numbers")])
    with pytest.raises(ValueError, match="no block 4"):
        one.block(0, 4)
    with pytest.raises(ValueError, match="are too few for an inbox"):
        core.read_wakeup(np.zeros(64, np.uint8))
    nbytes, capacity = core.measure_inbox(2, 1 << 12)
    inbox = np.zeros(nbytes, np.uint8)
    core.create_inbox(inbox, 2, capacity)
    end = core.RingEnd(inbox, 2, 1, 1, False)
    with pytest.raises(RuntimeError, match="made once"):
        end.__init__(inbox, 2, 1, 1, 256, False)
    header, large = bytes(32), bytes(1 << 14)
    assert end.begin(header, large, core.LOOK) == core.AGAIN
    with pytest.raises(ValueError, match="under way"):
        end.begin(header, large, core.LOOK)
    with pytest.raises(ValueError, match="bytes are left"):
        end.write(b"", core.LOOK)


def test_pages_are_allocated_inside_the_memory_only() -> None:
    assert core is not None
    memory = np.zeros(1 << 16, np.uint8)
    core.allocate(memory, 0, memory.size)
    core.allocate(memory, 5, 0)
    for start, size in ((0, memory.size + 1), (memory.size, 1), (1 << 63, 1 << 63)):
        with pytest.raises(OSError, match="Invalid argument"):
            core.allocate(memory, start, size)


def test_calls_allocate_the_part_of_the_blocks_that_they_stage() -> None:
    assert core is not None
    allocated = mmap.mmap(-1, 1 << 16)
    core.allocate(allocated, 0, len(allocated))
    if resident(allocated) < len(allocated):
        pytest.skip("what runs this program takes the advice, and ignores it: an emulator")
    nbytes, block = core.measure_group(2, 1 << 20)
    memory = mmap.mmap(-1, nbytes)
    core.create_group(memory, 2, block)
    held = [resident(memory)]
    for count in (4, 5000, 1 << 17):  # the first lies with its header
        reduce_of(core.Group(memory, 0, 2, SIZES, False), np.ones(count))
        held.append(resident(memory))
    assert held[0] == held[1] < held[2] < held[3]
    assert held[2] - held[1] == 4 << 16  # of each of four blocks 64 KiB, for 40,000 bytes


def resident(memory: mmap.mmap) -> int:
    """Return how many bytes of a mapping have pages."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    for entry in Path("/proc/self/smaps").read_text().split("VmFlags"):
        lines = entry.splitlines()
        place = next((line for line in lines if "-" in line.split(" ")[0]), "0-0 ")
        low, high = (int(end, 16) for end in place.split(" ")[0].split("-"))
        if low <= address < high:
            return 1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1])
    raise AssertionError("the mapping is not there")
