"""The bytes between a TCPStore and its server."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport._store.commands import Op
from transport._store.fields import LENGTH, WireError, unpack_fields
from transport._store.tcp.wire import MAX_FRAME, REQUEST, Frames, pack_request

FIELDS = st.lists(st.binary(max_size=20), max_size=4)


@given(frames=st.lists(FIELDS, max_size=5), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_frames_are_read_as_they_were_written(frames: list[list[bytes]], cuts: list[int]) -> None:
    stream = b"".join(pack_request(i, Op.GET, i / 2, fields) for i, fields in enumerate(frames))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    cutter = Frames(REQUEST)
    found = []
    for begin, end in pairwise(edges):
        found += cutter.feed(stream[begin:end])
    assert [unpack_fields(frame, REQUEST.size, len(frame)) for frame in found] == frames
    assert [REQUEST.unpack_from(frame)[1:] for frame in found] == [
        (i, Op.GET, i / 2) for i in range(len(frames))
    ]


@given(data=st.binary(max_size=200))
def test_any_bytes_are_frames_or_an_error(data: bytes) -> None:
    cutter = Frames(REQUEST)
    try:
        for frame in cutter.feed(data):
            unpack_fields(frame, REQUEST.size, len(frame))
    except WireError:
        pass


@pytest.mark.parametrize("length", [0, 1, REQUEST.size - 5, MAX_FRAME + 1, (1 << 32) - 1])
def test_impossible_lengths(length: int) -> None:
    with pytest.raises(WireError, match="announces"):
        Frames(REQUEST).feed(LENGTH.pack(length))


@pytest.mark.parametrize("data", [b"\x01", b"\x02\x00\x00\x00x", b"\xff\xff\xff\xff"])
def test_fields_that_do_not_fill_their_frame(data: bytes) -> None:
    with pytest.raises(WireError, match="field"):
        unpack_fields(data, 0, len(data))
