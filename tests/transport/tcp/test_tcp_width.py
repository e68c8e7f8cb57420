"""How many connections a link wants: what the kernel says of the first ones, while frames leave."""

from __future__ import annotations

import logging
import socket
import struct
from typing import Any, NamedTuple

import pytest
from tcp_pairs import sockets

from transport.tcp import pace
from transport.tcp.pace import Advice, window_of
from transport.tcp.width import Width

SEGMENT = 1000
MS = 1_000_000 / 1000


class Sock(NamedTuple):
    """What the kernel says of a connection: segments, milliseconds, bytes a second."""

    allowed: int = 20_000
    under_way: int = 0
    rest: int = 0
    losing: int = 0x7FFFFFFF
    confirmed: int = 1 << 40
    rate: int = 160_000_000
    round_trip: float = 50.0
    control: bytes = b"cubic"

    def getsockopt(self, _level: int, option: int, _size: int = 0) -> bytes | int:
        if option == socket.SO_SNDBUF:
            return 8 << 20
        if option == socket.TCP_CONGESTION:
            return self.control.ljust(16, b"\0")
        info = bytearray(256)
        struct.pack_into("@I4xI4xI", info, 8, 250_000, SEGMENT, self.under_way)
        struct.pack_into("@I", info, 44, self.rest)
        struct.pack_into("@II", info, 76, self.losing, self.allowed)
        struct.pack_into("@Q", info, 120, self.confirmed)
        struct.pack_into("@I", info, 148, int(MS * self.round_trip))
        struct.pack_into("@Q", info, 160, self.rate)
        return bytes(info)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_setting", lambda _name: ["1"])
    monkeypatch.setattr(pace, "_limits", lambda: (4 << 20, 16 << 20))


def link() -> Width:
    return Width("rank 1", Advice(), (1,))


def send(
    width: Width, before: list[Sock], full: Sock | None = None, nbytes: int = 8 << 20
) -> bytes:
    """A frame leaves over connections that are as said, and then take no more."""
    socks: Any = before
    shares = width.shares(socks, nbytes)
    if full is not None:
        for _ in range(3):
            width.note_full(full, len(before))  # pyright: ignore[reportArgumentType]
    return shares


FULL = Sock(under_way=8_000)


@pytest.mark.parametrize(
    ("full", "more"),
    [
        (FULL, True),
        (FULL._replace(under_way=19_000), False),  # all that is allowed: memory is not short
        (FULL._replace(under_way=6_000), False),  # there is room: its peer's window is closed
        (FULL._replace(rate=20_000_000), False),  # a slow reader, or a wire that others share
        (FULL._replace(round_trip=0.1), False),  # near
        (FULL._replace(control=b"bbr"), True),
    ],
)
def test_a_connection_that_is_full_with_window_left_wants_others(full: Sock, more: bool) -> None:
    width = link()
    for turn in range(3):
        assert width.wanted == 1, turn
        send(width, [full._replace(under_way=0)], full)
    assert width.wanted == (2 if more else 1)


def test_no_more_are_wanted_before_those_that_were_are_there_and_grown() -> None:
    width = link()

    def frames(connections: list[Sock]) -> int:
        for _ in range(9):
            send(width, connections, FULL)
        return width.wanted

    grown, young = Sock(), Sock(allowed=100)
    assert frames([grown]) == 2
    assert frames([grown, young]) == 2
    assert frames([grown, grown]) == 4
    assert frames([grown] * 3) == 4
    assert frames([grown] * 8) == 16
    assert frames([grown] * 16) == 16


@pytest.mark.parametrize(
    ("sock", "setting", "wanted"),
    [
        (Sock(rest=1_000), "1", 8),  # 1.25 MB and seven times 10 kB: three flights, not four
        (Sock(allowed=1_300), "1", 3),  # a small frame has gone first
        (Sock(allowed=1_300, round_trip=1.0), "1", 1),  # near
        (Sock(allowed=2_000), "1", 1),  # three are still three with 16
        (Sock(rest=1_000, allowed=200_000), "1", 1),  # a sixteenth of it is enough
        (Sock(rest=200), "1", 1),  # less than a timeout
        (Sock(allowed=1_300, confirmed=3_000_000), "1", 1),  # it is growing
        (Sock(allowed=1_300, losing=1_500), "1", 1),  # the network is slow
        (Sock(allowed=1_300, control=b"bbr"), "1", 1),
        (Sock(allowed=1_300), "0", 1),
    ],
)
def test_rests_that_make_frames_slow_want_other_connections_and_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sock: Sock,
    setting: str,
    wanted: int,
) -> None:
    monkeypatch.setattr(pace, "_setting", lambda _name: [setting])
    advice = Advice()
    widths = [Width(name, advice, (1,)) for name in ("rank 1", "rank 2")]
    with caplog.at_level(logging.WARNING, "meshlib.transport"):
        for width in widths:
            for turn in range(6):
                assert width.wanted == (wanted if turn >= 3 else 1)
                send(width, [sock])
    assert [width.wanted for width in widths] == [wanted] * 2
    found = [each for each in caplog.messages if "tcp_slow_start_after_idle=0" in each]
    assert len(found) == (wanted > 1)


def test_further_rests_want_more_when_those_connections_are_there_and_known() -> None:
    width, first, young = link(), Sock(allowed=1_200), Sock(allowed=10, confirmed=20_000)

    def frames(connections: list[Sock]) -> int:
        for _ in range(9):
            send(width, connections)
        return width.wanted

    assert frames([first]) == 13
    assert frames([first] + [young] * 12) == 13
    weaker = Sock(allowed=1_180)
    assert frames([weaker] + [young] * 12) == 13  # what they are good for is not known
    old = Sock(allowed=10)
    assert frames([first] + [old] * 11) == 13  # one is missing
    assert frames([first] + [old] * 12) == 13  # enough
    assert frames([weaker] + [old] * 12) == 15


@pytest.mark.parametrize(("round_trip", "links", "wanted"), [(50, 1, 3), (10, 1, 1), (50, 3, 1)])
def test_flights_do_not_matter_to_what_takes_longer_anyway(
    round_trip: float, links: int, wanted: int
) -> None:
    width = Width("rank 1", Advice(), range(links))
    for _ in range(9):
        send(width, [Sock(allowed=1_160, round_trip=round_trip)], nbytes=64 << 20)
    assert width.wanted == wanted


def test_a_young_connection_gets_a_share_that_it_can_carry() -> None:
    shares = send(link(), [Sock(), Sock(allowed=1_000)], nbytes=64 << 20)
    assert shares == bytes([255, 41])
    assert send(link(), [Sock()]) == b""


def test_where_the_kernel_tells_nothing_all_get_the_same() -> None:
    class Silent:
        def getsockopt(self, *_: int) -> bytes | int:
            return bytes(104) if len(_) == 3 else 8 << 20

    connections: Any = [Silent(), Silent()]
    width = link()
    assert width.shares(connections, 8 << 20) == bytes([255, 255])
    width.note_full(connections[0], 2)
    assert width.wanted == 1


def test_what_the_kernel_says_of_a_connection() -> None:
    with sockets() as (ours, theirs):
        ours.send(b"1")
        theirs.recv(1)
        window = window_of(ours, begins_anew=True)
        assert window is not None
        assert 1_000 < window.allowed < 100_000_000
        assert 0 <= window.under_way < 100_000
        assert 0 < window.round_trip < 1
        assert not window.shrunk
        info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        timeout = pace._WINDOW.unpack_from(info)[0]  # pyright: ignore[reportPrivateUsage]
        assert 100_000 <= timeout <= 10_000_000  # microseconds
