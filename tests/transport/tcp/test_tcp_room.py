"""Room in the kernel for what arrives while other links are read."""

from __future__ import annotations

import socket

from tcp_pairs import sockets

from transport.tcp.link import TcpLink
from transport.tcp.pace import make_room

ROOM = 1 << 20


def room_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


def far_link(sock: socket.socket) -> TcpLink:
    link = TcpLink(sock, 1, "rank 1")
    link._on_this_machine = False  # so it looks from another one
    return link


def test_each_connection_gets_its_share_those_that_come_later_too() -> None:
    with sockets() as (one, _), sockets() as (more, _):
        before = room_of(one)
        assert before < ROOM  # what the kernel begins with
        link = far_link(one)
        link.make_room(ROOM)
        assert room_of(one) >= ROOM
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        link.add(more, known=True)
        assert before < room_of(more) < room_of(one)
        assert room_of(more) >= ROOM // 2
        kept = room_of(one)
        link.make_room(ROOM // 2)  # there is more already
        assert room_of(one) == kept
        link.close()


def test_on_one_machine_the_kernel_knows_better() -> None:
    with sockets() as (one, _):
        before, link = room_of(one), TcpLink(one, 1, "rank 1")
        link.make_room(ROOM)
        assert room_of(one) == before
        link.close()


def test_a_connection_that_is_gone_is_left_to_the_next_call() -> None:
    with sockets() as (one, _):
        one.close()
        make_room(one, ROOM)
