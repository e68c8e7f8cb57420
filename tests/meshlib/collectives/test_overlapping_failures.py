"""What befalls one of two calls that overlap: both raise on every rank, and nothing is left.

Rank 0 has begun its second call, and waits in the first, before rank 1 makes either.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from far_ranks import Begun, settle

import meshlib as dist
from meshlib.testing import run_ranks
from transport.tcp.link import TcpLink
from transport.tcp.outbox import TcpOutbox

COUNT = 100_000
WAIT = 60.0
LONG = 120
Fault = Callable[[dist.ProcessGroup], object]
Array = npt.NDArray[np.float32]


def gather(group: dist.ProcessGroup, count: int = COUNT) -> dist.Work[Any]:
    own = np.full(count, dist.get_rank(), np.float32)
    return dist.all_gather_into_tensor(
        np.empty(2 * count, np.float32), own, async_op=True, group=group
    )


def two_calls(group: dist.ProcessGroup) -> list[dist.Work[Any]]:
    """Make two, of which none begins before both have been issued."""
    stream = group.call_queue.streams.collectives
    assert stream.try_enter()
    works = [gather(group) for _ in range(2)]
    stream.leave()
    return works


def told(works: list[dist.Work[Any]]) -> list[BaseException]:
    errors: list[BaseException] = []
    for work in works:
        with pytest.raises(dist.DistError) as caught:
            work.wait()
        errors.append(caught.value)
    return errors


def links(group: dist.ProcessGroup) -> list[TcpLink]:
    communicator: Any = group.communicator("cpu")
    return list(communicator._links.values())


def leaves(group: dist.ProcessGroup) -> None:
    """The rank closes the group, in which its calls are under way, or without having made any."""
    group.close(drain=0.05)


def aborts(group: dist.ProcessGroup) -> None:
    group.abort("enough")


def loses_the_link(group: dist.ProcessGroup) -> None:
    for link in links(group):
        link.abort("cut")


def makes_another_call(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(dist.DistError):
        gather(group, COUNT - 1).wait()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    return Begun(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    threads, descriptors = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    yield
    until = time.monotonic() + WAIT
    while True:
        more = {t.name for t in set(threading.enumerate()) - threads}
        more |= set(os.listdir("/proc/self/fd")) - descriptors
        if not more:
            break
        assert time.monotonic() < until, more
        time.sleep(0.01)


@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize("fault", [leaves, aborts, loses_the_link, makes_another_call])
def test_both_calls_raise_on_every_rank(begun: Begun, fault: Fault, by: int) -> None:
    if by == 0 and fault is makes_another_call:
        pytest.skip("rank 0 has made its calls")

    def program() -> list[BaseException]:
        settle()
        group = dist.new_group(timeout=LONG)
        settle(group)
        begun.once.clear()
        dist.barrier()
        works = two_calls(group) if dist.get_rank() == 0 else []
        assert begun.once.wait(WAIT)
        if dist.get_rank() == by:
            fault(group)
        if not works:
            # Who has left in good order has sent what the others wait for.
            if fault is not leaves:
                assert group.await_failure(WAIT)
            if fault is not leaves or by == 1:
                with pytest.raises((dist.DistError, ValueError)):
                    gather(group)
            return []
        return told(works)

    for error in run_ranks(program, 2, backend="tcp")[0]:
        assert "rank 1" in str(error) or "rank 0" in str(error) or "destroyed" in str(error)


class Broken(Exception):
    """What a test has a call fail with."""


@pytest.mark.parametrize("which", ["the later", "the earlier"])
def test_a_rank_that_fails_in_one_of_two_calls_breaks_both(
    begun: Begun, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    post, pull, mine = TcpOutbox.post, TcpLink.pull, set[str]()
    armed = threading.Event()

    def fail_behind(outbox: TcpOutbox, link: Any, data: memoryview) -> None:
        post(outbox, link, data)
        if armed.is_set() and not outbox._leads:
            raise Broken("here")

    def fail_in_a_wait(link: TcpLink, *arguments: Any) -> bool:
        if armed.is_set() and begun.once.is_set() and threading.current_thread().name in mine:
            raise Broken("here")
        return pull(link, *arguments)

    if which == "the later":
        monkeypatch.setattr(TcpOutbox, "post", fail_behind)
    else:
        monkeypatch.setattr(TcpLink, "pull", fail_in_a_wait)

    def program() -> None:
        settle()
        dist.barrier()
        group = dist.group.WORLD
        assert group is not None
        failing = dist.get_rank() == 0
        if failing:
            mine.add(group.call_queue.streams.collectives.name)
            armed.set()
            works = two_calls(group)
        else:
            assert begun.once.wait(WAIT)
            assert "Broken: here" in str(group.await_failure(WAIT))
            return
        errors: list[BaseException] = []
        for work in works:
            with pytest.raises((dist.DistError, Broken)) as caught:
                work.wait()
            errors.append(caught.value)
        assert isinstance(errors[which == "the later"], Broken)
        assert "Broken: here" in str(errors[which == "the earlier"])

    run_ranks(program, 2, backend="tcp")
