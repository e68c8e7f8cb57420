"""The other workers: connections to them, what they are told about references, who is gone."""

from __future__ import annotations

import errno
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlib.job.current import adopt_thread
from meshlib.rpc.calls import Outgoing
from meshlib.rpc.errors import RpcConnectionError, RpcTimeoutError, WorkerLostError
from meshlib.rpc.wire.attempt import Attempt
from meshlib.rpc.wire.connection import Connection
from meshlib.rpc.wire.frames import Frame, Kind
from meshlib.rpc.wire.payload import Payload, load
from transport.call import NO_ROOT, Call, CallHeader
from transport.call import Kind as CallKind
from transport.communicators.runtime import Membership
from transport.condition import Condition
from transport.deadline import Deadline
from transport.errors import (
    AuthenticationError,
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistError,
    DistNetworkError,
    PeerLostError,
)
from transport.operands.copying import address
from transport.place import this_machine
from transport.shm.process_memory import ProcessMemory, is_possible
from transport.tcp.meeting.address import listening_host
from transport.tcp.meeting.dial import Dial, publish
from transport.tcp.meeting.endpoint import Endpoint
from transport.tcp.meeting.hello import WELCOME, Channel, Hello

if TYPE_CHECKING:
    from meshlib.rpc.agent import Agent

NEWS_SECONDS = 0.6
"""For the news of how a worker ended whose connection broke."""
GREETING_SECONDS = 10.0
"""For one attempt to connect; calls with later deadlines make another."""
_ACKNOWLEDGED_EVERY = 64
# The flags of the three HELLO frames.
_FIRST, _READABLE, _NOT_READABLE = 0, 1, 2


class _Peer:
    """What is kept of one worker."""

    def __init__(self) -> None:
        self.dialing = threading.Lock()
        self.attempt: Attempt | None = None
        self.dial: Dial | None = None
        """What the attempt waits for: first this, then the greeting on the new connection."""
        self.greeting: Connection | None = None
        # Of what follows, whoever tells the worker something about references.
        self.telling = threading.Lock()
        self.connection: Connection | None = None
        self.notices: deque[tuple[int, bytes]] = deque()
        """Those that it has not acknowledged."""
        self.told = 0
        self.hearing = threading.RLock()
        """Of whoever acts on its notices: what is left of a connection that broke is read by one
        thread, while another one reads the next."""
        self.heard = 0
        """The number of its last notice that was acted on."""
        self.latest = 0
        """Of connections that came before this one, nothing is to come any more."""
        self.orphans: dict[int, Outgoing] = {}
        """Calls whose connection broke; it is being found out what became of the worker."""


class Peers:
    """One worker's connections: one a direction, made at the first call.

    ``membership`` are the workers, by rank.
    """

    def __init__(self, agent: Agent, membership: Membership) -> None:
        self._agent = agent
        self._membership = membership
        self._peers = [_Peer() for _ in range(membership.size)]
        self._incoming: dict[Connection, int] = {}
        """What others have made, numbered as they came."""
        self._accepted = itertools.count(1)
        self._changed = Condition()
        self.lost: dict[int, str] = {}
        """How workers ended that are gone."""
        self._closed = False
        self._nonce = np.frombuffer(bytearray(secrets.token_bytes(32)), np.uint8)
        runtime = membership.runtime
        self._endpoint = runtime.shared(
            "tcp-endpoint",
            lambda: Endpoint(runtime.secret, listening_host(membership), tls=runtime.tls),
        )
        self._endpoint.register(membership.group, self._accept)
        publish(membership, self._endpoint.address)

    # ------------------------------------------------------------------ connections

    def connection(self, rank: int, seconds: float, call: Outgoing | None = None) -> Connection:
        """Return the connection for calls to ``rank``, made within ``seconds`` if there is none.

        It goes on being made when ``call``, whom it is for, waits for it no longer. 0 seconds
        stand for the World's deadline. Raises ``WorkerLostError`` if the worker is gone,
        ``DistNetworkError`` if it cannot be reached, ``RpcTimeoutError`` past ``seconds``.
        """
        peer = self._peers[rank]
        connection = peer.connection
        if connection is not None and connection.error is None:
            return connection
        deadline = Deadline.after(seconds or self._agent.world.timeout)
        with self._agent.threads.slot_given_up():
            while True:
                if rank in self.lost:
                    raise self.lost_error(rank)
                said = "the connection to it is being made"
                try:
                    connection = self._attempt(rank, peer).result(deadline)
                except CommunicatorTimeoutError as error:  # the attempt's, not the call's
                    connection, said = None, str(error)
                except (CommunicatorAbortedError, DistNetworkError):
                    if rank not in self.lost:
                        raise
                    continue
                if connection is not None:
                    return connection
                if deadline.expired:
                    who = self._agent.who(rank)
                    whose = f"a call to {who}" if call is None else f"{call.what} on {who}"
                    text = f"{whose} passed its deadline of {deadline.seconds:g} s: {said}"
                    raise RpcTimeoutError(text)

    def _attempt(self, rank: int, peer: _Peer) -> Attempt:
        """Return the attempt to connect that is under way, or a new one."""
        with peer.dialing:
            attempt = peer.attempt
            made = peer.connection
            if attempt is None or (attempt.is_over and (made is None or made.error is not None)):
                name = f"meshlib-rpc-dial-{self._agent.rank}-{rank}"
                attempt = peer.attempt = Attempt(name, lambda: self._dial(rank, peer))
            return attempt

    def existing(self, rank: int) -> Connection | None:
        """Return the connection for calls to ``rank``, if there is one."""
        return self._peers[rank].connection

    def reclaim(self, connection: Connection, call: Outgoing, last: bool) -> bool:
        """Take back a call that could not be sent; False: it has ended, with its connection or
        since this was the ``last`` attempt.
        """
        peer = self._peers[connection.peer]
        with peer.telling:
            found = connection.calls.pop(call.number, None)
            found = found or peer.orphans.pop(call.number, None)
        if found is not None and last:
            self._agent.holdings.lose(call.to, [call])
            who = self._agent.who(call.to)
            text = f"{call.what} could not be sent to {who}: two connections to it broke"
            call.end(None, RpcConnectionError(text))
        return found is not None and not last

    def lost_error(self, rank: int, what: str = "", begun: float = 0.0) -> WorkerLostError:
        """Return the error for a worker that is gone; ``what`` was called there at ``begun``."""
        who = self._agent.who(rank)
        since = f", {time.monotonic() - begun:.1f} s after {what} was called there" if what else ""
        text = f"{who} {self.lost.get(rank, 'is gone')}{since}"
        return WorkerLostError(text, rank, self._agent.name_of(rank))

    def _dial(self, rank: int, peer: _Peer, last: bool = False) -> Connection:
        adopt_thread(self._agent.world)
        deadline = Deadline.after(GREETING_SECONDS)
        call = Call(CallHeader(0, 0, NO_ROOT, CallKind.SEND, 0, 0), deadline)
        who = self._agent.who(rank)
        with self._changed.lock:
            self._check_open()
            dial = peer.dial = Dial(self._membership, rank, Channel.RPC)
        try:
            sock = dial.connect(call)
        except PeerLostError as error:
            self._await_news(rank)
            self.lose(rank, f"is gone: {error}")
            raise self.lost_error(rank) from error
        except AuthenticationError as error:
            raise AuthenticationError(f"{who} is not talked to: {error}") from error
        connection = Connection(sock, rank, True, self._agent)
        try:
            with self._changed.lock:
                self._check_open()
                peer.greeting = connection
            heard = self._greet(connection, deadline)
        except TimeoutError as error:
            sock.close()
            text = f"{who} was reached, but has not answered the greeting"
            raise CommunicatorTimeoutError(text, rank) from error
        except OSError as error:
            sock.close()
            broken_off = isinstance(connection.error, ConnectionAbortedError)
            if isinstance(error, ConnectionError) and not broken_off and not last:
                # Who has died by now does not listen any more.
                return self._dial(rank, peer, last=True)
            raise DistNetworkError(f"{who} could not be reached: {error}") from error
        except DistError:
            sock.close()
            raise
        finally:
            peer.dial = peer.greeting = None
        return self._take_up(peer, connection, heard)

    def _check_open(self) -> None:
        if self._closed:
            raise DistNetworkError("RPC was shut down on this worker")

    def _break_off(self, peer: _Peer, reason: str) -> None:
        """End the attempt to connect, if there is one."""
        dial, greeting = peer.dial, peer.greeting
        if dial is not None:
            dial.cancel(reason)
        if greeting is not None:
            greeting.error = ConnectionAbortedError(errno.ECONNABORTED, reason)

    def _take_up(self, peer: _Peer, connection: Connection, heard: int) -> Connection:
        """Use a new connection; ``heard`` is the number of our last notice that came there."""
        with peer.telling:
            while peer.notices and peer.notices[0][0] <= heard:
                peer.notices.popleft()
            connection.begin(poll=False)
            peer.connection = connection
            for number, data in peer.notices:
                with suppress(OSError):
                    connection.send(Kind.NOTICE, number, Payload(data, ()))
        return connection

    def _greet(self, connection: Connection, deadline: Deadline) -> int:
        """Find out whether each side can read the other's memory.

        Returns the number of our last notice that the worker has heard.
        """
        connection.send(Kind.HELLO, 0, self._introduction(), _FIRST)
        answer = connection.receive_one(deadline)
        if answer.kind != Kind.HELLO:
            raise ConnectionError(f"expected a greeting, got a frame of kind {answer.kind}")
        connection.lends = answer.flags == _READABLE
        connection.memory = self._memory_of(answer)
        flag = _READABLE if connection.memory is not None else _NOT_READABLE
        connection.send(Kind.HELLO, 0, None, flag)
        return answer.call

    def _introduction(self) -> Payload:
        said = {
            "machine": this_machine(),
            "pid": os.getpid() if is_possible() else 0,
            "address": address(self._nonce),
            "nonce": self._nonce.tobytes().hex(),
        }
        return Payload(json.dumps(said).encode(), ())

    def _memory_of(self, frame: Frame) -> ProcessMemory | None:
        """Return the memory of the process that introduces itself, if it can be read from here."""
        said: dict[str, Any] = json.loads(bytes(frame.data))
        if not is_possible() or not said["pid"] or said["machine"] != this_machine():
            return None
        memory, nonce = ProcessMemory(said["pid"]), bytes.fromhex(said["nonce"])
        found = np.empty(len(nonce), np.uint8)
        try:
            memory.read(said["address"], found)
        except OSError:
            return None
        return memory if found.tobytes() == nonce else None

    def _accept(self, hello: Hello, sock: socket.socket) -> None:
        """Take a connection from another worker; in the endpoint's thread."""
        if self._closed or not 0 <= hello.rank < self._membership.size:
            sock.close()
            return
        sock.send(WELCOME)
        connection = Connection(sock, hello.rank, False, self._agent)
        self._incoming[connection] = next(self._accepted)
        connection.begin(poll=True)

    def on_hello(self, connection: Connection, frame: Frame) -> None:
        """Answer a greeting."""
        if frame.flags != _FIRST:
            connection.lends = frame.flags == _READABLE
            return
        try:
            connection.memory = self._memory_of(frame)
        except (ValueError, KeyError, TypeError) as error:
            raise DistNetworkError(f"expected a greeting, got {bytes(frame.data)!r}") from error
        flag = _READABLE if connection.memory is not None else _NOT_READABLE
        peer = self._peers[connection.peer]
        with peer.hearing:
            heard = peer.heard
        connection.send(Kind.HELLO, heard, self._introduction(), flag)

    # ------------------------------------------------------------------ notices

    def tell(self, rank: int, notice: object) -> None:
        """Tell a worker something about references, after all that it was told before.

        Never lost as long as both live: what a broken connection swallowed is sent again.
        """
        data = self._agent.holdings.dump(notice, None).data
        peer = self._peers[rank]
        with peer.telling:
            if rank in self.lost or self._closed:
                return
            peer.told += 1
            peer.notices.append((peer.told, data))
            connection = peer.connection
            if connection is not None:
                with suppress(OSError):
                    connection.send(Kind.NOTICE, peer.told, Payload(data, ()))
                    connection.poll()
                    return
        self._agent.threads.submit(lambda: self._connect_quietly(rank))

    def _connect_quietly(self, rank: int) -> None:
        with suppress(DistError):
            self.connection(rank, GREETING_SECONDS)

    def on_notice(self, connection: Connection, frame: Frame) -> None:
        """Act on what a worker tells, if it is new, in the order in which it does."""
        peer = self._peers[connection.peer]
        if connection.outgoing:  # it acknowledges ours
            with peer.telling:
                while peer.notices and peer.notices[0][0] <= frame.call:
                    peer.notices.popleft()
            return
        with peer.hearing:
            if frame.call <= peer.heard:
                return
            peer.heard = frame.call
            notice = load(frame.data)
            if notice[0] == "lost":
                self._end_earlier(connection)
            self._agent.holdings.hear(connection.peer, notice)
        if frame.call % _ACKNOWLEDGED_EVERY == 0:
            connection.send(Kind.NOTICE, frame.call)

    def _end_earlier(self, connection: Connection) -> None:
        """End what a worker had made before ``connection``: it has given those up."""
        peer = self._peers[connection.peer]
        peer.latest = max(peer.latest, self._incoming.get(connection, 0))
        error = ConnectionResetError("its caller has made another one")
        for one, number in list(self._incoming.items()):
            if one.peer == connection.peer and number < peer.latest:
                one.shut(error)

    def is_drained(self, rank: int) -> bool:
        """Whether all is read of the connections that a worker has given up."""
        latest = self._peers[rank].latest
        return all(
            one.peer != rank or number >= latest for one, number in list(self._incoming.items())
        )

    # ------------------------------------------------------------------ ends

    def on_end(self, connection: Connection, error: Exception) -> None:
        """A connection is over: its calls have failed, or their worker is gone."""
        if not connection.outgoing:
            self._incoming.pop(connection, None)
            return
        peer = self._peers[connection.peer]
        with peer.telling:
            if peer.connection is connection:
                peer.connection = None
            _orphan(peer, connection)
            unheard = bool(peer.notices)
        rank = connection.peer
        if rank in self.lost:
            self._end_orphans(rank, None)
        elif (peer.orphans or unheard) and not self._closed:
            self._agent.threads.submit(lambda: self._inquire(rank, error))

    def _inquire(self, rank: int, error: Exception) -> None:
        """Find out whether the worker lives to which a connection broke, and end the calls."""
        self._await_news(rank)
        with suppress(DistError):
            self.connection(rank, GREETING_SECONDS)
        self._end_orphans(rank, error)

    def _await_news(self, rank: int) -> None:
        with self._agent.threads.slot_given_up(), self._changed.lock:
            self._changed.wait_for(lambda: rank in self.lost or self._closed, NEWS_SECONDS)

    def _end_orphans(self, rank: int, error: Exception | None) -> None:
        peer = self._peers[rank]
        with peer.telling:
            orphans, peer.orphans = peer.orphans, {}
        if rank not in self.lost:
            self._agent.holdings.lose(rank, orphans.values())
        for call in orphans.values():
            if rank in self.lost:
                call.end(None, self.lost_error(rank, call.what, call.begun))
            else:
                text = (
                    f"the connection to {self._agent.who(rank)} broke ({error}) while {call.what}"
                    " was called there: it may have run, or not"
                )
                call.end(None, RpcConnectionError(text))

    def lose(self, rank: int, how: str) -> None:
        """Note that a worker is gone, and fail the calls to it. Idempotent."""
        peer = self._peers[rank]
        with self._changed.lock:
            if rank in self.lost:
                return
            self.lost[rank] = how
            self._changed.notify_all()
        with peer.telling:
            connection = peer.connection
            peer.notices.clear()
            if connection is not None:
                _orphan(peer, connection)
        self._break_off(peer, f"the worker {how}")
        error = ConnectionResetError(f"the worker {how}")
        for one in [c for c in (*self._incoming, connection) if c and c.peer == rank]:
            one.shut(error)
        self._end_orphans(rank, None)
        self._agent.on_lost(rank, how)

    def pending(self) -> list[Outgoing]:
        """Return the calls to other workers that have not ended."""
        found: list[Outgoing] = []
        for peer in self._peers:
            connection = peer.connection
            if connection is not None:
                found += list(connection.calls.values())
            found += list(peer.orphans.values())
        return found

    def connections(self) -> Sequence[Connection]:
        """Return those that there are."""
        outgoing = [peer.connection for peer in self._peers if peer.connection is not None]
        return [*outgoing, *list(self._incoming)]

    def is_over(self, rank: int) -> bool:
        """Whether a worker is gone and all that came from it was read."""
        return rank in self.lost and all(one.peer != rank for one in self.connections())

    def close(self, flush: float) -> None:
        """End all connections; what is queued gets ``flush`` seconds to leave."""
        until = time.monotonic() + flush
        while any(c.queued for c in self.connections()) and time.monotonic() < until:
            time.sleep(0.001)
        with self._changed.lock:
            self._closed = True
            self._changed.notify_all()
        self._endpoint.unregister(self._membership.group)
        for peer in self._peers:
            self._break_off(peer, "RPC was shut down on this worker")
        for peer in self._peers:
            if peer.attempt is not None:
                peer.attempt.join(1.0)
        for connection in self.connections():
            connection.shut(ConnectionAbortedError("RPC was shut down on this worker"))
        # Their ends are noticed by the threads.
        while self.connections() and time.monotonic() < until + 1.0:
            time.sleep(0.001)


def _orphan(peer: _Peer, connection: Connection) -> None:
    # One by one: a call that is put there meanwhile, to be sent in vain, has to be found there.
    for number in list(connection.calls):
        call = connection.calls.pop(number, None)
        if call is not None:
            peer.orphans[number] = call
