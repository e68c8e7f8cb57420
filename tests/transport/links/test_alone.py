"""Groups of one: every backend hands out the same communicator, which behaves as any other."""

from __future__ import annotations

import threading
import warnings
from contextlib import closing
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.support.transport.rank_threads import LONG
from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._communicators.backends import BackendEntry, lookup
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership, Runtime
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
    DistStoreError,
    HeaderMismatchError,
)
from transport._inproc.communicator import InprocCommunicator
from transport._links.alone import AloneCommunicator
from transport._operands.reduce_op import Flat, ReduceOp, premul_sum
from transport._store import FileStore, HashStore, Store
from transport._tcp import TcpCommunicator
from transport._waiting.deadline import Deadline

ON_HOST = ["auto", "inproc", "shm", "tcp"]


def only_member(store: Store | None = None) -> Membership:
    return Membership("group", 0, (7,), store or HashStore(), Runtime(b"secret"))


def made(name: str = "auto") -> Communicator:
    return lookup(name).make(only_member())


def call(kind: Kind, buffer: Flat | None = None, tag: int = 0, timeout: float = LONG) -> Call:
    code, count = (0, 0) if buffer is None else (dtype_code(buffer.dtype), buffer.size)
    return Call(CallHeader(0, count, NO_ROOT, kind, code, 0, extra=tag), Deadline.after(timeout))


@pytest.mark.parametrize("name", ON_HOST)
def test_every_backend_for_host_memory_hands_it_out_and_starts_nothing(name: str) -> None:
    before = set(threading.enumerate())
    comm = made(name)
    buffer = np.full(3, 2.0)
    comm.all_reduce(call(Kind.ALL_REDUCE, buffer), buffer, premul_sum(0.5))
    assert type(comm) is AloneCommunicator
    assert buffer.tolist() == [1.0] * 3
    assert set(threading.enumerate()) <= before
    comm.close()


def test_a_third_partys_backend_is_used_from_two_members_on() -> None:
    entry = BackendEntry("theirs", InprocCommunicator, ("cpu",))
    assert type(entry.make(only_member())) is AloneCommunicator
    pair = Membership("group", 0, (0, 1), HashStore(), Runtime())
    assert type(entry.make(pair)) is InprocCommunicator


def test_the_requirements_of_a_transport_hold_for_one_member_too(tmp_path: Path) -> None:
    elsewhere = pytest.raises(DistStoreError, match="expected a HashStore")
    with closing(FileStore(str(tmp_path / "store"))) as store, elsewhere:
        lookup("inproc").make(only_member(store))
    with pytest.raises(DistBackendError, match="'mpi' was not initialised with the job"):
        lookup("mpi").make(only_member())
    missing = BackendEntry("missing", "transport.missing:Communicator", ("cpu",))
    with pytest.raises(ModuleNotFoundError):
        missing.make(only_member())


def test_links_are_for_two_or_more() -> None:
    with pytest.raises(ValueError, match="expected two members or more, got 1"):
        TcpCommunicator(only_member())


def test_messages_to_itself_are_matched_and_checked() -> None:
    comm = made()
    sent, into = np.arange(4), np.empty(4, np.int64)
    comm.send(call(Kind.SEND, sent, tag=3), sent, 0, 3)
    assert comm.left_over() == ["1 from rank 7 (rank 0 of the group) under tag 3"]
    assert comm.recv(call(Kind.RECV, into, tag=3), into, None, 3) == 0
    assert into.tolist() == [0, 1, 2, 3]
    comm.send(call(Kind.SEND, sent, tag=3), sent, 0, 3)
    short = np.empty(3, np.int64)
    with pytest.raises(HeaderMismatchError):
        comm.recv(call(Kind.RECV, short, tag=3), short, 0, 3)
    with pytest.raises(CommunicatorTimeoutError):
        comm.recv(call(Kind.RECV, into, tag=4, timeout=0.01), into, 0, 4)


@pytest.mark.parametrize("end", ["abort", "close"])
def test_every_call_after_the_end_raises_the_reason(end: str) -> None:
    comm = made()
    reason = "enough" if end == "abort" else "the communicator was closed"
    comm.abort("enough") if end == "abort" else comm.close()
    x = np.ones(2)
    calls = [
        lambda: comm.barrier(call(Kind.BARRIER)),
        lambda: comm.broadcast(call(Kind.BROADCAST, x), x, 0),
        lambda: comm.all_reduce(call(Kind.ALL_REDUCE, x), x, ReduceOp.SUM),
        lambda: comm.reduce(call(Kind.REDUCE, x), x, ReduceOp.SUM, 0),
        lambda: comm.all_gather(call(Kind.ALL_GATHER, x), [x], x),
        lambda: comm.reduce_scatter(call(Kind.REDUCE_SCATTER, x), x, [x], ReduceOp.SUM),
        lambda: comm.gather(call(Kind.GATHER, x), [x], x, 0),
        lambda: comm.scatter(call(Kind.SCATTER, x), x, [x], 0),
        lambda: comm.all_to_all(call(Kind.ALL_TO_ALL, x), [x], [x]),
        lambda: comm.allocate(call(Kind.BARRIER), 2, np.dtype(np.float32)),
        lambda: comm.send(call(Kind.SEND, x), x, 0, 0),
        lambda: comm.recv(call(Kind.RECV, x), x, 0, 0),
    ]
    for made_after in calls:
        with pytest.raises(CommunicatorAbortedError, match=reason):
            made_after()


def test_arrays_with_gaps_are_copied_in_the_order_of_their_elements() -> None:
    comm = made()
    source = np.arange(24).reshape(4, 6)[:, ::2]
    assert comm.takes_gaps
    flat = np.empty(12, np.int64)
    comm.all_gather(call(Kind.ALL_GATHER, source), [flat], source)
    assert flat.tolist() == source.ravel().tolist()
    into = np.zeros((4, 6), np.int64)[:, ::2]
    comm.all_to_all(call(Kind.ALL_TO_ALL, source), [into], [flat])
    assert (into == source).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_an_overflow_is_an_answer_and_no_warning(dtype: type) -> None:
    comm = made()
    buffer = np.full(300_000, np.finfo(np.float32).max / 2 if dtype is np.float32 else 3e4, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op = premul_sum(1e38)
        comm.all_reduce(call(Kind.ALL_REDUCE, buffer), buffer, op)
    assert np.isinf(buffer).all()
