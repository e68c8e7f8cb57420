"""What a connection with delay asks the kernel for, and tells the user about the kernel."""

from __future__ import annotations

import logging
import socket
import struct

import pytest
from tcp_pairs import sockets

from transport.link import Pace
from transport.tcp import pace


def room_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


@pytest.mark.parametrize(
    ("round_trip", "by_itself", "asks"),
    [
        (0.050, 64 << 10, True),
        (0.00005, 64 << 10, False),  # near: what the kernel gives is enough
        (0.0, 64 << 10, False),  # not known
        (0.050, 1 << 40, False),  # the kernel gives more by itself
    ],
)
def test_what_is_far_asks_for_more_than_the_kernel_gives_by_itself(
    monkeypatch: pytest.MonkeyPatch, round_trip: float, by_itself: int, asks: bool
) -> None:
    monkeypatch.setattr(pace, "_limits", lambda: (by_itself, 1 << 40))
    monkeypatch.setattr(pace, "round_trip_of", lambda _sock: round_trip)
    on_request = pace._on_request()
    assert 64 << 10 < on_request <= 16 << 20
    with sockets() as (ours, _):
        before = room_of(ours)
        pace.make_room(ours)
        assert room_of(ours) == (on_request if asks else before)
        expected = max(by_itself, on_request if asks else before)
        assert pace.pace_of([ours]).room == expected


def test_the_kernel_says_how_long_nothing_was_sent() -> None:
    with sockets() as (ours, theirs):
        ours.send(b"1")
        theirs.recv(1)
        info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        timeout, rest = pace._TIMEOUT_AND_REST.unpack_from(info)
        assert 100_000 <= timeout <= 10_000_000  # microseconds: it is TCP's timeout
        assert 0 <= rest < 60_000


@pytest.mark.parametrize(
    ("round_trip", "rests", "control", "setting", "told"),
    [
        (0.050, [0, 900, 900, 0, 900, 900], b"cubic", ["1"], 1),
        (0.050, [900, 0, 900, 0, 0, 0], b"cubic", ["1"], 0),  # not often enough
        (0.001, [900] * 6, b"cubic", ["1"], 0),  # near
        (0.050, [900] * 6, b"bbr", ["1"], 0),
        (0.050, [900] * 6, b"cubic", ["0"], 0),
        (0.050, [900] * 6, b"cubic", [], 0),  # not known
    ],
)
def test_pauses_that_make_a_far_link_slow_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    round_trip: float,
    rests: list[int],
    control: bytes,
    setting: list[str],
    told: int,
) -> None:
    class Sock:
        rest = 0

        def getsockopt(self, _level: int, option: int, _size: int) -> bytes:
            if option == socket.TCP_CONGESTION:
                return control + bytes(16 - len(control))
            return struct.pack("@8xI32xI", 250_000, self.rest)

    monkeypatch.setattr(pace, "_setting", lambda _name: setting)
    advice = pace.Advice()
    links = [(Sock(), pace.Rests(advice), name) for name in ("rank 1", "rank 2")]
    with caplog.at_level(logging.WARNING, "meshlib.transport"):
        for sock, noted, name in links:
            for sock.rest in rests:
                noted.note(sock, name, Pace(round_trip, 0.0))  # pyright: ignore
    found = [each for each in caplog.messages if "tcp_slow_start_after_idle=0" in each]
    assert len(found) == told
