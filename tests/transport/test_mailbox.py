"""What a mailbox keeps of a message once it was received, and who is woken."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from rank_threads import LONG, Member, Transport, run_group, run_threads

from transport.call import Call, CallHeader, Kind, dtype_code
from transport.deadline import Deadline
from transport.errors import PeerLostError
from transport.mailbox import Mailbox, Receive
from transport.reduce_op import Flat
from transport.runtime import Membership, Runtime
from transport.shm import ShmCommunicator
from transport.store.hash_store import HashStore

HEADER = CallHeader(0, 3, -1, Kind.RECV, dtype_code(np.dtype(np.float64)), 0)


@pytest.mark.parametrize("waits", ["for the message", "for its bytes"])
def test_a_received_array_is_not_kept_until_the_collector_comes(waits: str) -> None:
    mailbox = Mailbox(Membership("g", 0, (0, 1), HashStore(), Runtime(secret=b"s")))
    payload = np.arange(3.0).view(np.uint8)
    stored = mailbox.begin(1, HEADER, payload.nbytes) if waits == "for its bytes" else None
    arrays: list[weakref.ref[Flat]] = []

    def receive() -> None:
        buffer = np.zeros(3)
        arrays.append(weakref.ref(buffer))
        assert mailbox.recv(Call(HEADER, Deadline.after(LONG)), buffer, 1, 0) == 1
        assert buffer.tolist() == [0.0, 1.0, 2.0]

    def deliver() -> None:
        deadline = Deadline.after(LONG)
        while not (mailbox.receiving if stored else mailbox.awaits(1)):
            assert not deadline.expired
            time.sleep(0.001)
        incoming = stored or mailbox.begin(1, HEADER, payload.nbytes)
        incoming.buffer[:] = payload
        incoming.complete()

    gc.collect()
    gc.disable()
    try:
        run_threads([receive, deliver])
        assert arrays[0]() is None
    finally:
        gc.enable()


def test_who_slept_while_another_thread_took_in_a_loss_becomes_the_carrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeps = threading.Semaphore(0)
    sleep = Mailbox._sleep

    def counted(self: Mailbox, call: Call, receive: Receive) -> None:
        sleeps.release()
        sleep(self, call, receive)

    taken_in, received = threading.Event(), threading.Event()

    def body(member: Member) -> None:
        if member.rank == 1:
            assert taken_in.wait(LONG)
            member.send(np.arange(3.0), 0, 7)
        if member.rank != 0:
            assert received.wait(LONG)  # a member that leaves would be a rescue
            return
        mailbox: Any = member.comm.mailbox  # type: ignore[attr-defined]
        carry = mailbox._carry

        def slow_carry(patient: bool) -> bool:
            # The receiver was woken, found this thread carrying, and sleeps again.
            assert sleeps.acquire(timeout=LONG)
            with mailbox._lock:
                mailbox._carry = carry
            return carry(patient)

        def receive() -> None:
            assert member.recv(np.zeros(3), 1, 7, timeout=LONG / 4) == 1
            received.set()

        def take_in() -> None:
            assert sleeps.acquire(timeout=LONG)
            with mailbox._lock:  # it sleeps
                mailbox._ending[2] = PeerLostError("rank 2 left", 2)
            mailbox._carry = slow_carry
            mailbox._stop_carrying()
            taken_in.set()

        assert mailbox._carrying.acquire(blocking=False)
        monkeypatch.setattr(Mailbox, "_sleep", counted)
        run_threads([receive, take_in], LONG / 2)

    run_group(
        Transport("shm", lambda membership, _: ShmCommunicator(membership), has_links=False),
        3,
        body,
    )
