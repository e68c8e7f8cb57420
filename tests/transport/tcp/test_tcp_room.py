"""What a connection with delay asks the kernel for."""

from __future__ import annotations

import socket

import pytest
from tcp_pairs import sockets

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
