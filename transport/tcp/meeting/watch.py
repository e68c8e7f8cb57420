"""What goes on beside a call that connects: threads that dial, and connections by which a rank
learns that a peer, for whose own one it waits, is gone.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from transport.call import Call
from transport.communicators.runtime import Membership
from transport.condition import Condition
from transport.deadline import Deadline
from transport.errors import DistError, PeerLostError
from transport.tcp.meeting.endpoint import Endpoint
from transport.tcp.meeting.hello import Channel

Dialler = Callable[[int, Channel, Call], socket.socket]

_JOIN_SECONDS = 5.0


class Threads:
    """Those in which one communicator connects while it does something else: begun by whoever
    makes a call, one thread at a time; joined once, at the end.
    """

    def __init__(self) -> None:
        self._begun: tuple[threading.Thread, ...] = ()

    def begin(self, name: str, task: Callable[[], None]) -> None:
        """Run ``task`` in a daemon thread. Raises RuntimeError where there is no room for one."""
        thread = threading.Thread(target=task, name=name, daemon=True)
        thread.start()
        self._begun = (*(other for other in self._begun if other.is_alive()), thread)

    def join(self) -> None:
        """Wait, for some seconds at most, until all have ended: what they do was broken off."""
        deadline = Deadline.after(_JOIN_SECONDS)
        for thread in self._begun:
            thread.join(deadline.remaining())


@dataclass(slots=True, eq=False)
class _Watch:
    """``sock`` is that connection once there is one, ``error`` why there is none."""

    sock: socket.socket | None = None
    error: Exception | None = None


class Watches:
    """Those by which one member watches the peers that it waits for, and others watch it.

    They cost neither of them a thread: the ``endpoint`` notices their ends. ``dial`` connects, in
    one of ``threads``: that takes as long as the peer itself needs for it. ``on_end(peer, error)``
    is told of a peer that has gone. ``changed`` is the communicator's: who waits under its lock for
    a connection is woken when there is trouble with the watch.
    """

    def __init__(
        self,
        membership: Membership,
        changed: Condition,
        endpoint: Endpoint,
        threads: Threads,
        dial: Dialler,
        on_end: Callable[[int, PeerLostError], None],
    ) -> None:
        self.watched: dict[int, _Watch] = {}
        """By peer, the one by which it is watched."""
        self.watchers: set[socket.socket] = set()
        """Those by which others watch this member."""
        self._membership = membership
        self._changed = changed
        self._endpoint = endpoint
        self._threads = threads
        self._dial = dial
        self._on_end = on_end
        self._closed = False

    def begin(self, peer: int, call: Call) -> None:
        """See to it that this rank learns when ``peer`` is gone, while it waits for it."""
        if peer in self.watched:
            return
        self.watched[peer] = watch = _Watch()
        connect = partial(self._connect, peer, Call(call.header, call.deadline), watch)
        try:
            self._threads.begin(f"meshlib-tcp-watch-{peer}", connect)
        except RuntimeError:  # no room for another thread
            connect()

    def end(self, peer: int) -> None:
        """Watch it no more."""
        with self._changed.lock:
            watch = self.watched.pop(peer, None)
        if watch is not None and watch.sock is not None:
            end_watch(watch.sock)

    def check(self, peer: int) -> None:
        """Raise what is in the way of watching ``peer``. Under the lock."""
        watch = self.watched.get(peer)
        if watch is not None and watch.error is not None:
            raise watch.error

    def accept(self, sock: socket.socket) -> None:
        """Keep a connection by which another member watches this one. Under the lock."""
        self.watchers.add(sock)
        self._endpoint.watch(sock, partial(self._on_watcher_end, sock))

    def shut(self) -> list[socket.socket]:
        """Begin and keep no more; return the connections, for ``end_watch``. Under the lock."""
        self._closed = True
        found = [watch.sock for watch in self.watched.values() if watch.sock is not None]
        found += self.watchers
        self.watched.clear()
        self.watchers.clear()
        return found

    def _connect(self, peer: int, call: Call, watch: _Watch) -> None:
        try:
            sock = self._dial(peer, Channel.WATCH, call)
        except PeerLostError as error:
            if self.watched.get(peer) is watch:
                self._on_end(peer, error)  # which those who wait for it are told
            return
        except (DistError, OSError) as error:
            with self._changed.lock:
                watch.error = error
                self._changed.notify_all()
            return
        with self._changed.lock:
            if not self._closed and self.watched.get(peer) is watch:
                watch.sock = sock
                self._endpoint.watch(sock, partial(self._on_watch_end, peer, watch))
                return
        sock.close()

    def _on_watch_end(self, peer: int, watch: _Watch) -> None:
        with self._changed.lock:
            if self.watched.get(peer) is not watch:
                return
            del self.watched[peer]
        text = f"the connection to {self._membership.describe(peer)} was lost: it hung up"
        self._on_end(peer, PeerLostError(text, peer))

    def _on_watcher_end(self, sock: socket.socket) -> None:
        with self._changed.lock:
            self.watchers.discard(sock)


def end_watch(sock: socket.socket) -> None:
    """Have the endpoint close a connection that it watches."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
