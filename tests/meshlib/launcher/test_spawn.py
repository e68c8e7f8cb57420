"""``meshlib.spawn``: ranks as processes of a running program."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import meshlib as dist
from meshlib import ProcessExitedException, ProcessRaisedException, spawn
from meshlib._launcher.ranks import workers

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _nothing_is_left():
    def children():
        path = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children"
        return set(Path(path).read_text().split())

    before, threads = children(), set(threading.enumerate())
    yield
    # multiprocessing's resource tracker, once started, stays.
    left = [pid for pid in children() - before if "resource_tracker" not in _command(pid)]
    assert left == []
    started = set(threading.enumerate()) - threads
    assert [t.name for t in started if t.name.startswith("meshlib")] == []


def _command(pid):
    try:
        return Path("/proc", pid, "cmdline").read_text()
    except OSError:
        return ""


def _all_reduce(rank, folder, factor):
    dist.init_process_group()
    x = np.array([float(rank + 1)])
    dist.all_reduce(x)
    assert dist.get_rank() == rank
    (folder / str(rank)).write_text(str(x[0] * factor))
    dist.destroy_process_group()


def test_ranks_find_each_other_without_arguments(tmp_path):
    assert spawn(_all_reduce, (tmp_path, 10), nprocs=3) is None
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["60.0"] * 3


def test_it_is_part_of_the_face_of_meshlib():
    assert dist.spawn is spawn


def _own_address(rank, folder, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x = np.ones(1)
    dist.all_reduce(x)
    (folder / str(rank)).write_text(str(x[0]))
    dist.destroy_process_group()


def test_a_program_may_choose_its_own_address(tmp_path, free_port):
    spawn(_own_address, (tmp_path, free_port), nprocs=2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2.0"] * 2


def _fail(rank, how):
    if rank == 1:
        how(rank)
    time.sleep(60)


def _raise(rank):
    raise KeyError(f"from rank {rank}")


def _exit(rank):
    sys.exit(3)


def _die(rank):
    os.kill(os.getpid(), signal.SIGKILL)


def _hang_on(rank):
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise ValueError("cannot end")


def _echo(rank):
    time.sleep(0.3)
    raise ValueError("the cause")


def test_the_error_of_the_failing_rank_is_raised():
    with pytest.raises(ProcessRaisedException, match="rank 1 ") as caught:
        spawn(_fail, (_raise,), nprocs=3)
    assert caught.value.error_index == 1
    assert isinstance(caught.value, dist.DistError)
    text = str(caught.value)
    assert text.rstrip().endswith("KeyError: 'from rank 1'")
    assert "in _raise" in text
    assert "meshlib/_launcher/spawned_rank.py" not in text


def test_an_exit_code_is_reported():
    with pytest.raises(ProcessExitedException, match=r"rank 1 .* exit code 3") as caught:
        spawn(_fail, (_exit,), nprocs=2)
    assert (caught.value.exit_code, caught.value.signal_name) == (3, None)


def test_a_signal_is_reported():
    with pytest.raises(ProcessExitedException, match=r"rank 1 .* SIGKILL") as caught:
        spawn(_fail, (_die,), nprocs=2)
    assert (caught.value.exit_code, caught.value.signal_name) == (-9, "SIGKILL")


def test_a_rank_that_fails_but_cannot_end_fails_the_rest():
    context = spawn(_fail, (_hang_on,), nprocs=2, join=False)
    with pytest.raises(ProcessRaisedException, match="cannot end"):
        context.join(grace_period=0.2)


def _echo_or_cause(rank):
    if rank == 0:
        raise dist.RankFailedError("rank 1 is gone", 1)
    time.sleep(0.4)
    raise ValueError("the cause")


def test_an_echo_is_not_taken_for_the_cause(monkeypatch):
    monkeypatch.setattr(workers, "SETTLE_AFTER_ECHO_SECONDS", 60.0)
    with pytest.raises(ProcessRaisedException, match="ValueError: the cause") as caught:
        spawn(_echo_or_cause, nprocs=2)
    assert caught.value.error_index == 1


def _only_rank_1_joins(rank):
    if rank == 1:
        dist.init_process_group(timeout=60)


def test_who_waits_for_a_rank_that_has_ended_is_told():
    """As by meshrun: at once, and not at the deadline."""
    words = "rank 0 ended with exit code 0 and has not joined"
    with pytest.raises(ProcessRaisedException, match=words):
        spawn(_only_rank_1_joins, nprocs=2)


def _wait_for_file(rank, path):
    while not path.exists():
        time.sleep(0.01)


def test_join_may_be_tried(tmp_path):
    context = spawn(_wait_for_file, (tmp_path / "go",), nprocs=2, join=False)
    assert len(set(context.pids())) == 2
    assert context.join(timeout=0.05) is False
    assert all(process.is_alive() for process in context.processes)
    (tmp_path / "go").touch()
    assert context.join(timeout=60) is True
    assert [process.exitcode for process in context.processes] == [0, 0]


def test_a_context_can_be_closed_while_ranks_run(tmp_path):
    context = spawn(_wait_for_file, (tmp_path / "never",), nprocs=2, join=False)
    context.close()
    assert [process.exitcode for process in context.processes] == [-9, -9]


PARENT = """
import os, sys, time, threading
from meshlib import spawn

def work(rank, path):
    import meshlib as dist
    dist.init_process_group()
    dist.barrier()
    open(path + str(rank), "w").write(str(os.getpid()))
    {work}

if __name__ == "__main__":
    {start}
"""
SLEEP = "time.sleep(60)"


def _start_parent(tmp_path, start, work=SLEEP):
    path = tmp_path / "parent.py"
    path.write_text(PARENT.format(start=start, work=work))
    return subprocess.Popen(
        [sys.executable, str(path), str(tmp_path / "rank")],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ranks(tmp_path):
    end = time.monotonic() + 60
    paths = [tmp_path / f"rank{rank}" for rank in range(2)]
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < end
        time.sleep(0.01)
    return [int(path.read_text()) for path in paths]


def _gone(pids):
    end = time.monotonic() + 60
    while any(Path("/proc", str(pid)).exists() for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    "start",
    [
        "spawn(work, (sys.argv[1],), nprocs=2)",
        "threading.Thread(target=spawn, args=(work, (sys.argv[1],), 2, False)).start();"
        " time.sleep(60)",
    ],
    ids=["main thread", "a thread that ends"],
)
def test_ranks_die_with_a_killed_parent(tmp_path, start):
    with _start_parent(tmp_path, start) as parent:
        ranks = _ranks(tmp_path)
        parent.kill()
        assert _gone(ranks)


def test_ranks_that_nobody_joins_end_before_the_program(tmp_path):
    start = "spawn(work, (sys.argv[1],), nprocs=2, join=False)"
    work = "time.sleep(0.5); dist.barrier(); dist.destroy_process_group()"
    with _start_parent(tmp_path, start, work) as parent:
        assert parent.communicate(timeout=60)[1] == ""
        assert parent.returncode == 0
        assert _gone(_ranks(tmp_path))


def test_ctrl_c_ends_the_ranks(tmp_path):
    with _start_parent(tmp_path, "spawn(work, (sys.argv[1],), nprocs=2)") as parent:
        ranks = _ranks(tmp_path)
        os.killpg(parent.pid, signal.SIGINT)
        error = parent.communicate(timeout=60)[1]
        assert parent.returncode == -signal.SIGINT
        assert error.count("Traceback") == 1
        assert _gone(ranks)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"nprocs": 0}, ValueError, "nprocs must be at least 1, got 0"),
        ({"fn": 3}, TypeError, "fn must be callable, got int"),
        ({"start_method": "fork"}, ValueError, "start_method must be 'spawn', got 'fork'"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        spawn(**({"fn": _all_reduce} | arguments))


def test_what_cannot_be_pickled_leaves_nothing():
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"):
        spawn(lambda rank: None, nprocs=2)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("spawn(train, nprocs=2)", "train"),
        ("spawn(print, (Settings(),), nprocs=2)", "an instance of Settings"),
    ],
)
def test_what_has_no_file_is_refused_with_what_to_do(call, name):
    program = f"""
from meshlib import spawn
def train(rank): pass
class Settings: pass
{call}
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"_pickle.PicklingError: {name} is defined in a notebook's cell")
    assert "write it into a module" in last
    assert "local_ranks" in last
    assert "run_ranks" in last
