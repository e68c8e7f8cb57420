"""The arguments that the compiled types of calls refuse, though only this project makes them."""

from __future__ import annotations

from typing import Any

import pytest

from meshlib._calls.call_stream import CallStream
from meshlib._native import calls as native
from meshlib._recording import recorder
from meshlib._recording.recorder import Record

pytestmark = pytest.mark.skipif(native is None, reason="there is no compiled core")

FIELDS = (0, -1, 12, 11, 0, 0)


def make_ring() -> Any:
    return native.Ring(2, Record, recorder._OwnFiles())


def program_calls(size: int = 2, capacity: int = 4) -> Any:
    return native.ProgramCalls(native.Order(), make_ring(), {}, 0, size, capacity)


def program_call(sending: Any = None, calls: Any = None, buffer: int = 0) -> Any:
    places = [(buffer, 0, 8)]
    return native.ProgramCall(
        *(sending, calls, None, FIELDS, False, 8, 1, 0, False, (8,), (), 1, places)
    )


def test_what_is_made_once() -> None:
    stream, ring, calls = CallStream("a stream"), make_ring(), program_calls()
    with pytest.raises(RuntimeError, match="already initialised"):
        native.StreamLock.__init__(stream, [])
    with pytest.raises(RuntimeError, match="already initialised"):
        ring.__init__(2, Record, recorder._OwnFiles())
    with pytest.raises(RuntimeError, match="already initialised"):
        calls.__init__(native.Order(), ring, {}, 0, 2, 4)


def test_calls_of_programs() -> None:
    for size, capacity in [(0, 4), (2, 0)]:
        with pytest.raises(ValueError, match="at least 1"):
            program_calls(size, capacity)
    calls = program_calls()
    with pytest.raises(TypeError, match="expected a Group"):
        calls.attach(1)
    with pytest.raises(TypeError):
        calls.connect(1, None, 7)
    with pytest.raises(TypeError, match="ProgramCalls or None"):
        program_call(calls=7)
    with pytest.raises(TypeError, match="ProgramCall or None"):
        program_call(sending=calls)
    with pytest.raises(ValueError, match="no buffer 1"):
        program_call(calls=calls, buffer=1)
    call = program_call(calls=calls)
    assert call.of_meshlib
    with pytest.raises(TypeError, match="only XLA's handler"):
        call()


def test_numbers_and_paths() -> None:
    with pytest.raises(TypeError, match="expected a CallSpec"):
        native.Order().next_header(7)
    with pytest.raises(TypeError):
        native.FastPath(None, None, False, ())
