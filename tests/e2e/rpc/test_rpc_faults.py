"""Remote calls between processes of which one dies."""

from __future__ import annotations

import pytest

from meshlib._trace.chains import describe
from meshlib._trace.dump import read

pytestmark = pytest.mark.processes

PROGRAM = """
import os, signal, sys, threading, time
import meshlib as dist
from meshlib import rpc

class Thing:
    def __init__(self): self.value = 1
    def get(self): return self.value

def whoami(): return os.getpid()
def pass_on(*paths): rpc.rpc_sync(1, until_cancelled, paths, timeout=0)
def until_cancelled(begun, told):
    with open(begun, "w"): pass
    while not rpc.cancelled(): time.sleep(0.005)
    with open(told, "w"): pass
def use(rref): return rref.to_here().value
def await_file(path):
    while not os.path.exists(path): time.sleep(0.005)

dist.init_process_group()
me = dist.get_rank()
rpc.init_rpc(f"worker{me}")
"""


def test_a_callees_and_an_owners_death_is_told_and_the_others_go_on(meshrun):
    script = meshrun.script(
        PROGRAM
        + """
if me == 0:
    rref = rpc.remote(2, Thing)
    assert rpc.rpc_sync(1, use, (rref,)) == 1
    pid = rpc.rpc_sync(2, whoami)
    call = rpc.rpc_async(2, pass_on, ("begun", "told"), timeout=0)
    await_file("begun")
    os.kill(pid, signal.SIGKILL)
    for use_it in (call.wait, rref.to_here, lambda: rpc.rpc_sync(2, whoami),
                   lambda: rpc.rpc_sync(1, use, (rref,))):
        try:
            use_it()
        except rpc.WorkerLostError as error:
            print(error.worker, error.rank, error)
    assert rpc.rpc_sync(1, whoami) != pid
rpc.shutdown()
print("done", me)
"""
    )
    result = meshrun.run("-n", "3", "--on-failure", "continue", "--trace-dir", "trace", script)
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if "worker2" in line]
    assert len(lines) == 4
    assert all("worker2 2 worker 'worker2' (rank 2) was killed by SIGKILL" in x for x in lines)
    assert "s after __main__.pass_on was called there" in lines[0]
    assert sum("done" in line for line in result.out.splitlines()) == 2
    assert "meshrun: rank 2 was killed by SIGKILL; the others go on" in result.err
    chain = describe(read(meshrun.folder / "trace"))
    for told in (
        "(worker2), at",
        "rank 2 (worker2) has left no record, and had called __main__.until_cancelled on rank 1",
    ):
        assert told in chain, chain


def test_a_callers_death_cancels_and_frees_what_it_held_but_not_what_it_gave(meshrun):
    script = meshrun.script(
        PROGRAM
        + """
from meshlib.rpc._worker import current_worker
held = []
def keep(rref): held.append(rref)
if me == 1:
    mine, granted, given = [rpc.remote(0, Thing) for _ in range(3)]
    given.rpc_sync().get()
    references = current_worker().references
    references.dump(granted, 0)  # the owner is told, and the reference is never sent
    references._tell = lambda *_: None  # it is sent, and the owner is not told
    rpc.rpc_sync(0, keep, (given,))
    rpc.rpc_async(0, until_cancelled, ("begun", "told"), timeout=0)
    await_file("begun")
    os.kill(os.getpid(), signal.SIGKILL)
if me == 0:
    await_file("told")
    while len(current_worker().references) > 1: time.sleep(0.005)
    assert held[0].to_here().value == 1
    held.clear()
    while len(current_worker().references): time.sleep(0.005)
rpc.shutdown()
print("done", me)
"""
    )
    result = meshrun.run("-n", "2", "--on-failure", "continue", script)
    assert result.code == 0, result.err
    assert result.out.splitlines() == ["done 0"]


def test_what_fails_because_its_worker_ends_is_no_answer(meshrun):
    """The callee's program leaves the job: its functions have no World any more."""
    script = meshrun.script(
        PROGRAM
        + """
from meshlib._job.world import World
def rank_of(path):
    await_file("leaving")
    try:
        return dist.get_rank()
    finally:
        with open(path, "w"): pass
if me == 1:
    def close(self, **options):
        with open("leaving", "w"): pass
        await_file("ran")
        time.sleep(0.3)
        closed(self, **options)
    closed, World.close = World.close, close
    rpc.rpc_sync(0, whoami)
    await_file("called")
    dist.destroy_process_group()
    sys.exit()
if me == 0:
    call = rpc.rpc_async(1, rank_of, ("ran",), timeout=0)
    with open("called", "w"): pass
    await_file("leaving")
    thing = rpc.RRef(Thing())
    for answer in call.wait, lambda: rpc.rpc_sync(1, use, (thing,), timeout=0):
        try:
            print("value", answer())
        except rpc.WorkerLostError as error:
            print("lost", error.rank)
        except Exception as error:
            print("error", repr(error))
rpc.shutdown()
"""
    )
    result = meshrun.run("-n", "2", "--on-failure", "continue", script)
    assert result.code == 0, result.err
    assert result.out.splitlines() == ["lost 1", "lost 1"]


def test_rank_0_says_how_such_a_job_ended(meshrun):
    script = meshrun.script("import os; raise SystemExit(3 * (os.environ['RANK'] == '0'))")
    assert meshrun.run("-n", "2", "--on-failure", "continue", script).code == 3
