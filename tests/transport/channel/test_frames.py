"""Frames from any bytes, in any pieces: what was sent comes out, or FrameError."""

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport._channel.frames import FIRST_KIND, STAGE_BYTES, FrameError, FrameReader, pack


class Pieces:
    """A socket that gives what it has in pieces of given sizes."""

    def __init__(self, data, sizes):
        self.data = memoryview(data)
        self.sizes = sizes
        self.turn = 0

    def recv_into(self, buffer, nbytes=0, flags=0):
        most = self.sizes[self.turn % len(self.sizes)]
        self.turn += 1
        part = self.data[: min(most, len(buffer))]
        buffer[: len(part)] = part
        self.data = self.data[len(part) :]
        return len(part)


def read_all(data, sizes=(1 << 20,)):
    sock, reader, frames = Pieces(data, sizes), FrameReader(), []
    while sock.data:
        frames += reader.receive(sock)
    return frames, reader


FRAMES = st.lists(
    st.tuples(
        st.integers(1, 255),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2 * STAGE_BYTES),
        st.lists(st.tuples(st.integers(0, 2 * STAGE_BYTES), st.integers(0, 9)), max_size=3),
        st.integers(0, 255),
    ),
    max_size=5,
)
SIZES = st.lists(st.integers(1, 2 * STAGE_BYTES), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(FRAMES, SIZES)
def test_frames_are_read_as_they_were_written(frames, sizes):
    random = np.random.default_rng(1)
    stream, expected = b"", []
    for kind, call, size, buffers, flags in frames:
        data = random.bytes(size)
        memories = [memoryview(random.bytes(nbytes)) for nbytes, _ in buffers]
        addresses = [address if address > 6 else 0 for _, address in buffers]
        stream += b"".join(pack(kind, call, data, memories, addresses, flags))
        inline = [
            None if address else bytes(memory)
            for memory, address in zip(memories, addresses, strict=True)
        ]
        expected.append((kind, flags, call, data, inline, [len(m) for m in memories], addresses))
    sizes = [max(size, len(stream) // 200) for size in sizes]
    found, reader = read_all(stream, sizes)
    assert not reader.in_a_frame
    assert [
        (
            frame.kind,
            frame.flags,
            frame.number,
            bytes(frame.data),
            [None if b.memory is None else bytes(b.memory) for b in frame.buffers],
            [b.nbytes for b in frame.buffers],
            [b.address for b in frame.buffers],
        )
        for frame in found
    ] == expected


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 8), SIZES)
def test_any_bytes_are_frames_or_an_error(data, kind, sizes):
    data = bytes([kind]) + data
    with suppress(FrameError):
        read_all(data, sizes)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ((99, 0, 0, 0, 1, 0), "expected a frame"),
        ((1, 0, 7, 0, 1, 0), "expected a frame"),
        ((1, 0, 0, 1 << 30, 1, 0), "expected a frame"),
        ((1, 0, 0, 0, 1, 1 << 60), "expected a frame"),
        ((1, 0, 0, 0, 1, (1 << 44) - 1), "bytes of memory"),
    ],
)
def test_what_no_machine_can_hold_is_refused(header, words):
    data = struct.pack("<BBHIQQ", *header) + bytes(100)
    with pytest.raises(FrameError, match=words):
        read_all(data)


def test_the_end_of_a_stream_shows_whether_a_message_was_cut():
    whole = b"".join(pack(FIRST_KIND, 1, b"data"))
    for data, words in ((whole, "it hung up$"), (whole[:-1], "within a frame")):
        sock, reader = Pieces(data, (1 << 20,)), FrameReader()
        reader.receive(sock)
        with pytest.raises(ConnectionResetError, match=words):
            reader.receive(sock)
