"""A peer without the job's secret has no byte unpickled; one that sends nonsense is dropped."""

import os
import pickle
import random
import socket
import struct
import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib import rpc
from meshlib._job.current import current_world
from meshlib._recording.call_report import report_calls
from meshlib.rpc._calling.frames import FrameKind
from meshlib.rpc._worker import current_worker
from meshlib.testing import run_ranks
from tests.support.net.certificates import LONG_AGO, Authority, tls_of_the_tests
from transport._channel.buffer_pool import BufferPool
from transport._channel.connection import ChannelConnection
from transport._channel.frames import HEADER_BYTES, Control, pack
from transport._channel.threads import ThreadPool
from transport._errors import AuthenticationError, DistError
from transport._net.auth import Handshake, authenticate
from transport._net.sockets import recv_exact
from transport._tcp.meeting.endpoint import TcpEndpoint
from transport._tcp.meeting.hello import WELCOME, Hello, TrafficKind, digest_of
from transport._waiting.deadline import Deadline

SECRET = b"the job's own"
LONG = 30.0
exploded = threading.Event()


def explode():
    exploded.set()


class Bomb:
    """Tells when it is unpickled."""

    def __reduce__(self):
        return explode, ()


BOMB = b"".join(pack(FrameKind.REQUEST, 7, pickle.dumps((Bomb(), (), {}, None, None))))


def secured(program, size=2, tls=None):
    """Have rank 0 run ``program(target)`` beside worker 1, whose endpoint is ``target``."""
    targets = {}
    exploded.clear()

    def rank():
        me = dist.get_rank()
        runtime = current_world().runtime
        runtime.secret = SECRET
        runtime.tls = tls(me) if tls is not None else None
        rpc.init_rpc(f"w{me}", rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=LONG))
        targets[me] = Target(current_worker())
        dist.barrier()
        if me == 0:
            program(targets[1])
        rpc.shutdown()

    run_ranks(rank, size)


class Target:
    """The endpoint of a worker, as somebody finds it who looks into the store."""

    def __init__(self, agent):
        self.agent = agent
        endpoint = agent.world.runtime.shared("tcp-endpoint", lambda: pytest.fail("there is none"))
        assert isinstance(endpoint, TcpEndpoint)
        self.port = endpoint.address.port
        token = bytes.fromhex(endpoint.address.token)
        self.hello = Hello(token, digest_of(agent.recorder.id), 0, TrafficKind.RPC).pack()

    def connect(self):
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=LONG)
        sock.settimeout(LONG)
        return sock

    def insider(self):
        """Return a connection of somebody who knows the secret and is taken for worker 0."""
        sock = self.connect()
        authenticate(sock, SECRET, Deadline.after(LONG), initiator=True)
        sock.sendall(self.hello)
        assert recv_exact(sock, len(WELCOME), Deadline.after(LONG)) == WELCOME
        return sock


def hung_up(sock):
    """Read until the other end hangs up; return whether it has."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def works():
    """Return whether worker 1 serves calls: many at once, so that each thread has to."""
    return rpc.wait_all([rpc.rpc_async(1, abs, (-i,)) for i in range(40)]) == list(range(40))


def test_who_has_no_secret_is_not_listened_to():
    def program(target):
        for words in (
            BOMB,
            target.hello + BOMB,
            Handshake(None, initiator=True).start() + target.hello + BOMB,
            Handshake(b"another", initiator=True).start() + os.urandom(32) + target.hello + BOMB,
        ):
            with target.connect() as sock:
                sock.sendall(words)
                assert hung_up(sock)
        with target.connect() as sock:
            with pytest.raises(AuthenticationError):
                authenticate(sock, b"another", Deadline.after(LONG), initiator=True)
            sock.close()
        assert works()
        assert not exploded.is_set()

    secured(program)


def test_a_replayed_handshake_opens_nothing():
    def program(target):
        sent = []
        with target.connect() as sock:
            honest = Handshake(SECRET, initiator=True)
            sent.append(honest.start())
            sock.sendall(sent[-1])
            while honest.wanted:
                message = recv_exact(sock, honest.wanted, Deadline.after(LONG))
                sent.append(honest.receive(message))
                sock.sendall(sent[-1])
            assert honest.refusal is None
            sock.sendall(target.hello)
            assert recv_exact(sock, len(WELCOME), Deadline.after(LONG)) == WELCOME
        with target.connect() as sock:
            sock.sendall(b"".join(sent) + target.hello + BOMB)
            assert hung_up(sock)
        assert works()
        assert not exploded.is_set()
        # It would have been heard behind the secret.
        with target.insider() as sock:
            sock.sendall(BOMB)
            assert exploded.wait(LONG)

    secured(program)


def broken_frames(chance):
    """Return bytes that are not frames of a caller's: each ends the connection."""
    kind = chance.randrange(256)
    while kind in set(map(int, FrameKind)):
        kind = chance.randrange(256)
    header = struct.Struct("<BBHIQQ")
    assert header.size == HEADER_BYTES
    noise = chance.randbytes(chance.randrange(400))
    return chance.choice(
        (
            header.pack(kind, 0, 0, 0, 1, 0) + noise,
            header.pack(FrameKind.REQUEST, 0, 1 + chance.randrange(1 << 15), 0, 1, 4) + noise,
            header.pack(FrameKind.REQUEST, 0, 0, (1 << 32) - 1, 1, 4) + noise,
            header.pack(FrameKind.REQUEST, 0, 0, 0, 1, 1 << 60) + noise,
            header.pack(FrameKind.REQUEST, 0, 0, 1, 1, 4) + struct.pack("<QQ", 1 << 60, 0) + noise,
            b"".join(pack(Control.POST, 1 << 40, noise)),
            b"".join(pack(Control.POST, 1 << 40, pickle.dumps(("grant", 5, "x")))),
            b"".join(pack(Control.POST, 1 << 40, pickle.dumps(("release", [3])))),
            b"".join(pack(FrameKind.QUERY, 1, noise)),
            b"".join(pack(FrameKind.QUERY, 1, pickle.dumps(("waits", 3)))),
            b"".join(pack(FrameKind.QUERY, 1, pickle.dumps(("what", 3)))),
            b"".join(pack(Control.HELLO, 1, noise)),
            b"".join(pack(FrameKind.REPLY, 1, noise)),
            b"".join(pack(FrameKind.ERROR, 1, b"")),
        )
    )


def test_nonsense_behind_the_secret_ends_its_connection_only():
    chance = random.Random(1)

    def program(target):
        for _ in range(60):
            words = broken_frames(chance)
            with target.insider() as sock:
                sock.sendall(words)
                sock.shutdown(socket.SHUT_WR)
                assert hung_up(sock), words
        assert works()

    secured(program)


def test_a_request_that_cannot_be_unpickled_is_answered():
    def program(target):
        with target.insider() as sock:
            sock.sendall(b"".join(pack(FrameKind.REQUEST, 9, b"no pickle")))
            answer = recv_exact(sock, HEADER_BYTES, Deadline.after(LONG))
            assert answer[0] == FrameKind.ERROR
        assert works()

    secured(program)


# ---------------------------------------------------------------------- TLS


def total(*arrays):
    return sum(float(array.sum()) for array in arrays)


def test_calls_go_inside_tls():
    def program(target):
        assert works()
        # Below and above what is fetched from the caller's memory; over many records.
        for count in (100, 9_000, 50_000):
            array = np.arange(float(count))
            assert rpc.rpc_sync(1, total, (array, array)) == 2 * array.sum()
            assert (rpc.rpc_sync(1, np.negative, (array,)) == -array).all()
        futures = [rpc.rpc_async(1, len, (bytes(i),)) for i in range(0, 60_000, 97)]
        assert rpc.wait_all(futures) == list(range(0, 60_000, 97))

    secured(program, tls=lambda me: tls_of_the_tests())


def test_more_calls_inside_tls_than_are_kept():
    def program(target):
        held = [rpc.rpc_async(1, bytes, (i % 300,)) for i in range(5_000)]
        assert [len(one) for one in rpc.wait_all(held)] == [i % 300 for i in range(5_000)]

    secured(program, tls=lambda me: tls_of_the_tests())


class Owner:
    """The owner of a connection, in place of a channel."""

    def __init__(self):
        self.threads = ThreadPool("test", 2, lambda: None, lambda error: None)
        self.received = []
        self.two = threading.Event()

    def on_frames(self, connection, frames):
        self.received += [frame.number for frame in frames]
        if len(self.received) == 2:
            self.two.set()
        return True

    def on_end(self, connection, error):
        pass


def test_a_reply_that_came_in_the_record_of_another_is_read():
    """The poll does not tell of what TLS has read already, with the end of a caller's own reply."""
    tls, owner = tls_of_the_tests(), Owner()
    ours, theirs = socket.socketpair()
    words = b"".join(pack(FrameKind.REPLY, 1, bytes(80_000))) + b"".join(
        pack(FrameKind.REPLY, 2, b"x")
    )

    def answer():
        with tls.server(theirs) as sock:
            sock.handshake(Deadline.after(LONG))
            sock.sendall(words)  # the last record has the end of the first, and the second
            owner.two.wait(LONG)

    answering = threading.Thread(target=answer)
    answering.start()
    sock = tls.client(ours)
    sock.handshake(Deadline.after(LONG))
    connection = ChannelConnection(sock, 1, True, owner, owner.threads, BufferPool())
    connection.pending[2] = object()  # somebody waits for it who does not read
    connection.begin(poll=False)
    try:
        while not owner.received:
            connection.read_until(lambda: bool(owner.received))
        assert owner.two.wait(LONG / 2)
        assert owner.received == [1, 2]
    finally:
        owner.two.set()
        connection.shut(ConnectionAbortedError("the test is over"))
        answering.join(LONG)
        owner.threads.close()


@pytest.mark.parametrize("which", ["another authority", "expired", "none"])
def test_a_worker_with_a_wrong_certificate_is_not_talked_to(tmp_path, which):
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    good = ours.issue("good").tls()
    bad = {
        "another authority": lambda: theirs.issue("bad").tls(),
        "expired": lambda: ours.issue("bad", not_after=LONG_AGO).tls(),
        "none": lambda: None,
    }[which]()

    def program(target):
        with pytest.raises(DistError) as caught:
            rpc.rpc_sync(1, explode)
        assert "worker 'w1' (rank 1)" in str(caught.value)
        assert [
            call.state
            for call in report_calls(current_world().flight_record.remote_calls.records())
        ] == ["failed"]
        assert not exploded.is_set()
        assert rpc.rpc_sync(0, abs, (-3,)) == 3
        assert rpc.rpc_sync(2, abs, (-3,)) == 3

    def rank():
        me = dist.get_rank()
        runtime = current_world().runtime
        runtime.secret, runtime.tls = SECRET, bad if me == 1 else good
        rpc.init_rpc(f"w{me}", rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=LONG))
        if me == 0:
            program(None)
        dist.barrier()
        rpc.shutdown(graceful=False)

    exploded.clear()
    run_ranks(rank, 3)
