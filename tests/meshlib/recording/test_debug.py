"""Debug levels, logging with the rank, names for calls, breakpoints, barriers that tell."""

import inspect
import io
import logging
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import RankError, run_ranks
from tests.support.transport.growing import with_growing_deadlines

WAIT = 60.0


@pytest.fixture(autouse=True)
def level_of_before():
    logger = logging.getLogger("meshlib")
    before, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(before)
    logger.handlers[:] = handlers


def test_levels_are_set_and_told():
    for level in (dist.DebugLevel.DETAIL, dist.DebugLevel.INFO, dist.DebugLevel.OFF):
        dist.set_debug_level(level)
        assert dist.get_debug_level() is level
    with pytest.raises(TypeError, match=r"level must be a DebugLevel .* got 'INFO'"):
        dist.set_debug_level("INFO")


def test_the_level_comes_from_the_environment(monkeypatch):
    for text, level in (("detail", dist.DebugLevel.DETAIL), ("INFO", dist.DebugLevel.INFO)):
        monkeypatch.setenv("MESHLIB_DEBUG", text)
        dist.set_debug_level_from_env()
        assert dist.get_debug_level() is level
    monkeypatch.setenv("MESHLIB_DEBUG", "loud")
    with pytest.raises(ValueError, match="MESHLIB_DEBUG is 'loud'; expected one of OFF, INFO"):
        dist.set_debug_level_from_env()
    monkeypatch.delenv("MESHLIB_DEBUG")
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() is dist.DebugLevel.OFF


def test_info_tells_of_groups_and_detail_of_calls(caplog):
    def program():
        dist.all_reduce(
            np.ones(2), group=dist.new_group(group_desc="the pair"), async_op=True
        ).wait()

    dist.set_debug_level(dist.DebugLevel.INFO)
    run_ranks(program, 2)
    logged = [(record.rank, record.getMessage()) for record in caplog.records]
    assert {rank for rank, text in logged if "'the pair' of 2 ranks" in text} == {0, 1}
    assert not any("all_reduce" in text for _, text in logged)
    caplog.clear()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    run_ranks(program, 2)
    for rank in (0, 1):
        mine = [r.getMessage() for r in caplog.records if r.rank == rank]
        (issued,) = [text for text in mine if "call #1 all_reduce" in text and "test_debug" in text]
        assert "dtype=float64 count=2 op=SUM" in issued
        assert any("all_reduce" in text and "done in" in text for text in mine)


def test_off_says_nothing(caplog):
    dist.set_debug_level(dist.DebugLevel.OFF)
    run_ranks(dist.barrier, 2)
    assert not caplog.records


def test_a_program_without_logging_gets_lines_with_the_rank_on_stderr():
    program = (
        "import meshlib as dist\n"
        "dist.init_process_group('tcp', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"MESHLIB_DEBUG": "DETAIL", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "[rank 0] DEBUG: call #1 barrier" in done.stderr
    assert done.stdout == ""


def test_record_comm_names_the_calls_of_this_thread():
    def program():
        with dist.record_comm("layer 1"):
            work = dist.all_reduce(np.ones(1), async_op=True)
            with dist.record_comm("inner"):
                dist.barrier()
        dist.barrier()
        work.wait()
        recorder = call_queue_of(dist.group.WORLD).context.recorder
        return [(r.label, r.title) for r in recorder.records()]

    names = [("layer 1", "layer 1"), ("inner", "inner"), (None, "meshlib.barrier")]
    assert run_ranks(program, 2) == [names] * 2
    with pytest.raises(RankError, match="name must be a str"):
        run_ranks(lambda: dist.record_comm(1), 1)


def test_monitored_barrier_names_all_ranks_that_are_missing():
    errors = {}
    there, over = threading.Semaphore(0), threading.Barrier(4, timeout=WAIT)

    def program():
        rank = dist.get_rank()
        if rank in (1, 3):
            there.release() or over.wait()  # the line that the others are told about
            return
        there.acquire(timeout=WAIT)
        try:
            dist.monitored_barrier(timeout=0.2)
        except dist.CollectiveTimeoutError as error:
            errors[rank] = str(error)
        finally:
            over.wait()

    run_ranks(program, 4)
    assert sorted(errors) == [0, 2]
    for text in errors.values():
        assert re.search(r"ranks (0, )?1(, 2)?, 3 have not arrived", text)
        assert "there.release() or over.wait()" in text


def test_monitored_barrier_passes_when_all_come():
    run_ranks(lambda: dist.monitored_barrier(timeout=WAIT, wait_all_ranks=True), 3)


def test_breakpoint_stops_one_rank_and_the_others_wait(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("p 'found', secret\nc\n"))
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    passed = {}

    def program():
        secret = 100 + dist.get_rank()
        for turn in range(2):
            dist.breakpoint(1, skip=1)
            passed[dist.get_rank(), turn] = time.monotonic()
        return secret

    assert run_ranks(program, 3, call_timeout=WAIT) == [100, 101, 102]
    text = out.getvalue()
    assert "rank 1 stops here" in text
    assert "('found', 101)" in text
    assert text.count("found") == 1


def test_the_wait_at_a_breakpoint_outlasts_the_deadline_of_the_group(monkeypatch):
    class Slow(io.StringIO):
        def readline(self, *args):
            time.sleep(0.6)
            return super().readline(*args)

    monkeypatch.setattr(sys, "stdin", Slow("c\n"))
    monkeypatch.setattr(sys, "stdout", io.StringIO())

    def program():
        dist.group.WORLD.set_timeout(0.3)
        dist.breakpoint(0)
        return dist.all_reduce(np.ones(1), timeout=WAIT)[0]

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_a_breakpoint_on_no_rank_is_refused():
    with pytest.raises(RankError, match="rank is 2; expected 0 to 1"):
        run_ranks(lambda: dist.breakpoint(2), 2)


@pytest.mark.processes
def test_a_breakpoint_under_the_launcher_talks_to_the_terminal(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import meshlib as dist\n"
        "dist.init_process_group()\n"
        "mine = 40 + dist.get_rank()\n"
        "dist.breakpoint(1)\n"
    )
    here, there = pty.openpty()
    command = [sys.executable, "-m", "meshlib._launcher", "--nproc-per-node", "2", program]
    streams = {"stdin": there, "stdout": there, "stderr": there}
    launcher = subprocess.Popen(command, **streams, start_new_session=True)
    os.close(there)
    try:
        output = read_until(here, b"(Pdb)")
        os.write(here, b"p 'it is', mine + 1\nc\n")
        output += read_until(here, b"('it is', 42)")
        assert launcher.wait(WAIT) == 0
    finally:
        launcher.kill()
        launcher.wait()
        os.close(here)
    assert b"rank 1 stops here" in output
    assert b"-> dist.breakpoint(1)" in output


def read_until(descriptor, wanted):
    """Return what a terminal says up to ``wanted``, within a minute."""
    deadline, output = time.monotonic() + WAIT, b""
    while wanted not in output:
        assert select.select([descriptor], [], [], deadline - time.monotonic())[0], output
        output += os.read(descriptor, 4096)
    return output


def test_monitored_barrier_has_its_own_name_in_a_mismatch():
    def program():
        call = dist.monitored_barrier if dist.get_rank() else dist.barrier
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            call()
        return str(caught.value)

    for text in run_ranks(program, 2):
        assert re.search(r"0 +call #1 barrier ", text)
        assert re.search(r"1 +call #1 monitored_barrier ", text)


@pytest.mark.parametrize("backend", ["inproc", "shm", "tcp"])
def test_each_line_names_the_rank_that_is_missed(backend):
    """Also where a rank waits for one that waits itself."""

    def program():
        group = dist.new_group([3, 2, 1, 0])
        try:
            if dist.get_rank() != 2:
                dist.all_reduce(np.ones(100_000), group=group, timeout=seconds)
        except dist.CollectiveTimeoutError as error:
            return str(error)
        finally:
            over.wait()
        return ""

    seconds, over = 0.0, threading.Barrier(4, timeout=WAIT)

    def attempt(given):
        nonlocal seconds
        seconds = given
        texts = list(filter(None, run_ranks(program, 4, backend=backend)))
        assert len(texts) == 3
        return texts if all("rank 2 has not arrived" in text for text in texts) else None

    for text in with_growing_deadlines(attempt):
        waiting = [line for line in text.splitlines() if "(running" in line]
        assert len(waiting) == 3
        for line in waiting:
            assert re.search(r"(waits for|misses) rank 2\b", line), text


TIMED = {
    "all_reduce": lambda t: dist.all_reduce(np.ones(1), timeout=t),
    "broadcast": lambda t: dist.broadcast(np.ones(1), 1, timeout=t),
    "all_gather": lambda t: dist.all_gather([np.ones(1), np.ones(1)], np.ones(1), timeout=t),
    "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(
        np.ones(1), np.ones(2), timeout=t
    ),
    "all_to_all_single": lambda t: dist.all_to_all_single(np.ones(2), np.ones(2), timeout=t),
    "all_reduce_coalesced": lambda t: dist.all_reduce_coalesced([np.ones(1)], timeout=t),
    "recv": lambda t: dist.recv(np.ones(1), 1, timeout=t),
}


@pytest.mark.parametrize("name", TIMED)
def test_a_function_takes_the_deadline_of_its_call(name):
    gone = threading.Event()

    def program():
        if dist.get_rank() == 0:
            with pytest.raises(dist.CollectiveTimeoutError):
                TIMED[name](0.1)
            gone.set()
        else:
            assert gone.wait(WAIT)

    run_ranks(program, 2)


def test_functions_take_what_their_methods_take():
    for name in dist.__all__:
        method = getattr(dist.ProcessGroup, name, None)
        if callable(method) and inspect.isfunction(getattr(dist, name)):
            taken = set(inspect.signature(method).parameters) - {"self"}
            assert taken <= set(inspect.signature(getattr(dist, name)).parameters) | {"tag"}, name
