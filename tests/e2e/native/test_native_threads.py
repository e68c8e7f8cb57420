"""A message that compiled code has half received, while another thread of the rank looks there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import run_ranks
from transport._shm.messages import Messages

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

from meshlib import jit as mj  # noqa: E402
from meshlib.jit._arguments import calls_group  # noqa: E402
from meshlib.jit._xla import direct  # noqa: E402

LONG = 60.0
LARGE = np.arange(1 << 18, dtype=np.float32)  # 1 MiB: more than a ring has room for
OTHER = LARGE[::-1].copy()

pytestmark = pytest.mark.skipif(
    direct.handler is None, reason="there is no compiled core, or it was built without XLA's header"
)


def mailbox_of(group: Any) -> Any:
    return call_queue_of(group).state.communicators["cpu"].mailbox  # type: ignore[attr-defined]


def stop_in_the_middle(mailbox: Any, stopped: threading.Barrier) -> None:
    """Have the next message that this rank sends stop where its ring is full."""

    def look_up(*arguments: Any) -> None:
        del mailbox._look_up
        stopped.wait()
        Messages._look_up(mailbox, *arguments)

    mailbox._look_up = look_up


def in_a_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("other", ["carries", "receives"])
def test_a_message_is_left_to_the_thread_for_which_it_was_begun(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of it has come before that thread goes on in Python."""
    stopped = threading.Barrier(2, timeout=LONG)
    monkeypatch.setattr(direct, "MOMENT", 600.0)
    make = direct.DirectCallback.make

    def rank() -> None:
        group: Any = calls_group(None)
        if dist.get_rank() == 0:
            for _ in range(2):
                dist.send(LARGE, 1, tag=1, group=group)
            stopped.wait()
            stop_in_the_middle(mailbox_of(group), stopped)
            dist.send(LARGE, 1, tag=1, group=group)
            dist.send(OTHER, 1, tag=2, group=group)
            return
        got, threads = np.zeros_like(OTHER), []
        program = jax.jit(partial(mj.recv, src=0, tag=1))
        for _ in range(2):
            program(LARGE).block_until_ready()
        mailbox = mailbox_of(group)
        end = mailbox._rings[0].end
        mailbox.carry = lambda: None  # no other thread comes before its time
        until(lambda: mailbox.lend(0))
        stopped.wait()

        def receive() -> None:
            dist.recv(got, 0, tag=2, group=group)

        def go_on(self: Any, header: bytes | None, views: Any) -> None:
            assert header is not None
            assert end.left > 0
            stopped.wait()
            until(lambda: end.untaken)
            if other == "carries":
                in_a_thread(partial(Messages.carry, mailbox)).join(LONG)
            else:
                threads.append(in_a_thread(receive))
                until(lambda: mailbox._receives)
            make(self, header, views)

        until(lambda: end.untaken)  # compiled code waits a moment only
        with monkeypatch.context() as patch:
            patch.setattr(direct.DirectCallback, "make", go_on)
            first = np.asarray(program(LARGE))
        del mailbox.carry
        for thread in threads or [in_a_thread(receive)]:
            thread.join(LONG)
        assert np.array_equal(first, LARGE)
        assert np.array_equal(got, OTHER)

    run_ranks(rank, 2, backend="shm")
