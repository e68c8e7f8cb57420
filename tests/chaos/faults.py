"""The faults: what goes wrong, on which rank, and what every other rank must then say.

A fault is a program for the victim and one for the rest. Each rank runs inside ``guarded``, which
notes what it raised and when.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import meshlib as dist

DEADLINE = 1.0
"""Seconds: the calls' deadline where the fault is that somebody is silent."""

LONG = 30.0
"""Seconds: the calls' deadline elsewhere. Whoever raises by it was not told in time."""

Program = Callable[[Any], None]


@dataclass(frozen=True)
class Fault:
    """``victim`` and ``others`` run on a group of all ranks after a few calls have gone well.

    ``error`` is what every rank that lives must raise. ``limit`` bounds, in seconds, the time from
    the fault until the last rank raised. ``victim_raises``: the victim is one of those that raise.
    """

    name: str
    victim: Program
    others: Program
    error: type[Exception]
    limit: float
    deadline: float = LONG
    victim_raises: bool = False
    least_ranks: int = 2


def _large(group: Any) -> None:
    big = np.ones(8 << 20, np.float32)
    while True:
        group.all_reduce(big)


def _small(group: Any) -> None:
    group.all_reduce(np.ones(4))


def _then_barrier(program: Program) -> Program:
    """A rank whose part in a call needs nobody learns of the trouble at its next call."""

    def run(group: Any) -> None:
        program(group)
        group.barrier()

    return run


def _kill(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit(_: Any) -> None:
    os._exit(3)


def _raise(_: Any) -> None:
    raise KeyError("the victim's own mistake")


def _sleep(_: Any) -> None:
    time.sleep(DEADLINE + 3.0)


def _kill_in_large(group: Any) -> None:
    import threading

    threading.Timer(0.15, _kill, [None]).start()
    _large(group)


def _other_group(group: Any) -> None:
    dist.new_group(group_desc="another").all_reduce(np.ones(4))


def _recv_from_victim(victim: int) -> Program:
    def run(group: Any) -> None:
        group.recv(np.ones(4), group_src=victim)

    return run


def _with_window(victim: int, act: Program, wait: Program) -> tuple[Program, Program]:
    """The victim does ``act(window)`` and is killed, others ``wait(window)`` afterwards."""

    def kill(group: Any) -> None:
        window = group.window(np.zeros(4, np.int64))
        with window.lock(group_dst=0):
            act(window)
            group.barrier()
            _kill(group)

    def others(group: Any) -> None:
        window = group.window(np.zeros(4, np.int64))
        group.barrier()
        while True:
            wait(window)

    return kill, others


def faults(victim: int, size: int) -> list[Fault]:
    """Return the faults for a group of ``size`` ranks in which ``victim`` is to blame."""
    mismatch, lost, late = (
        dist.CollectiveMismatchError,
        dist.RankFailedError,
        dist.CollectiveTimeoutError,
    )
    other = (victim + 1) % size

    def differ(name: str, wrong: Program, right: Program) -> Fault:
        return Fault(
            f"mismatch: {name}",
            _then_barrier(wrong),
            _then_barrier(right),
            mismatch,
            limit=1.5,
            victim_raises=True,
        )

    def dies(name: str, how: Program, waiting: Program) -> Fault:
        return Fault(name, how, waiting, lost, limit=1.0)

    return [
        differ("dtype", lambda g: g.all_reduce(np.ones(4, "f4")), _small),
        differ("op", lambda g: g.all_reduce(np.ones(4), dist.ReduceOp.MAX), _small),
        differ("count", lambda g: g.all_reduce(np.ones(5)), _small),
        differ(
            "count, large",
            lambda g: g.all_reduce(np.ones((1 << 20) + 1)),
            lambda g: g.all_reduce(np.ones(1 << 20)),
        ),
        differ("kind", lambda g: g.broadcast(np.ones(4), group_src=0), _small),
        differ(
            "root",
            lambda g: g.broadcast(np.ones(4), group_src=victim),
            lambda g: g.broadcast(np.ones(4), group_src=other),
        ),
        differ(
            "root of reduce",
            lambda g: g.reduce(np.ones(4), group_dst=victim),
            lambda g: g.reduce(np.ones(4), group_dst=other),
        ),
        differ("barrier", lambda g: g.barrier(), _small),
        differ("group", _other_group, _small),
        dies("killed, others in all_reduce", _kill, _small),
        dies("killed, others in barrier", _kill, lambda g: g.barrier()),
        dies("killed, others in recv", _kill, _recv_from_victim(victim)),
        dies(
            "killed, others in store wait",
            _kill,
            lambda g: g.get_group_store().get("never", timeout=LONG),
        ),
        dies("killed in a large all_reduce", _kill_in_large, _large),
        dies("os._exit, others in all_reduce", _exit, _small),
        dies("exception, others in all_reduce", _raise, _small),
        dies(
            "killed with a window's lock, others wait for it",
            *_with_window(
                victim, lambda w: w.put([1], group_dst=0), lambda w: w.lock(group_dst=0).__enter__()
            ),
        ),
        dies(
            "killed, others wait for its signal",
            *_with_window(victim, lambda w: None, lambda w: w.wait_signal(group_src=victim)),
        ),
        dies(
            "killed, others put into its window",
            *_with_window(
                victim, lambda w: None, lambda w: (w.put([1], group_dst=victim), w.fence())
            ),
        ),
        Fault("stopped", _stop, _small, late, limit=DEADLINE + 1.0, deadline=DEADLINE),
        Fault("absent", _sleep, _small, late, limit=DEADLINE + 1.0, deadline=DEADLINE),
    ]
