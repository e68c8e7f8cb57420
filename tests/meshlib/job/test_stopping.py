"""All ranks stop at the same step, whichever was asked to, and wherever each is just then."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib._events.events import CanStop, StopRequest
from meshlib._job.current import current_world
from meshlib._job.stopping import StopAgreement
from meshlib.testing import RankError, run_ranks

WAIT = 60.0


@pytest.mark.parametrize("requester", [0, 2])
def test_all_ranks_stop_at_the_same_step(requester):
    def program():
        me = dist.get_rank()
        for step in range(1000):
            dist.all_reduce(np.ones(1))
            if (me, step) == (requester, 5):
                dist.request_stop("the test's")
            if dist.should_stop(step):
                assert dist.should_stop(step + 1)
                return step
        return None

    steps = run_ranks(program, 3, backend="shm")
    assert len(set(steps)) == 1
    assert steps[0] in (5, 6)  # ranks may have passed step 5 before the news


def test_a_rank_that_waits_in_a_call_answers_meanwhile():
    """Rank 1 asks in step 3, while rank 0 has passed that step and waits for rank 1 in step 4."""
    passed = threading.Event()

    def program():
        me = dist.get_rank()
        for step in range(10):
            if (me, step) == (0, 4):
                passed.set()
            dist.all_reduce(np.ones(1))
            if (me, step) == (1, 3):
                assert passed.wait(WAIT)
                dist.request_stop()
            if dist.should_stop(step):
                return step
        return None

    assert run_ranks(program, 2, backend="tcp") == [4, 4]


def test_ranks_without_common_calls_stop_at_the_latest_step():
    """Rank 0 is at step 7 when rank 1, at step 2, asks."""
    far, requested = threading.Event(), threading.Event()

    def program():
        me = dist.get_rank()
        for step in itertools.count():
            if (me, step) == (0, 8):
                far.set()
                assert requested.wait(WAIT)
            if (me, step) == (1, 2):
                assert far.wait(WAIT)
                dist.request_stop()
                requested.set()
            if dist.should_stop(step):
                break
        return step

    steps = run_ranks(program, 2, backend="inproc")
    assert steps[0] == steps[1]
    assert steps[0] >= 8


def test_a_rank_that_has_left_is_not_waited_for():
    def program():
        if dist.get_rank() == 1:
            dist.should_stop(50)
            return None
        assert current_world().membership.wait_for_change(
            lambda: 1 in current_world().membership.left, WAIT
        )
        dist.request_stop()
        return dist.should_stop(3)

    assert run_ranks(program, 2, backend="inproc") == [True, None]


def agreement(monkeypatch, timeout=WAIT):
    """The agreement of a rank of two, and the events that it publishes."""
    from meshlib._job import stopping
    from meshlib._job.membership import JobMembership

    published = []
    monkeypatch.setattr(stopping, "publish", lambda _, event: published.append(event))
    return StopAgreement(None, JobMembership(0, 2), timeout), published


def test_a_silent_rank_is_named(monkeypatch):
    mine, published = agreement(monkeypatch, 0.01)
    mine.request("SIGTERM")
    with pytest.raises(dist.DistBackendError, match=r"should_stop\(4\).*ranks \[0, 1\]"):
        mine.should_stop(4)
    mine.on_event(published[0])
    mine.on_event(CanStop(0, published[1].step))
    with pytest.raises(dist.DistBackendError, match=r"ranks \[1\]"):
        mine.should_stop(5)
    mine.on_event(CanStop(1, 6))
    assert [mine.should_stop(step) for step in (5, 6, 7)] == [False, True, True]
    assert published == [StopRequest(0, "SIGTERM"), CanStop(0, 4)]  # each once


def test_a_lost_store_ends_the_wait(monkeypatch):
    mine, _ = agreement(monkeypatch)
    mine.request("SIGTERM")
    mine.on_store_lost(dist.DistStoreError("its server is gone"))
    with pytest.raises(dist.DistStoreError, match="its server is gone"):
        mine.should_stop(4)


def test_wrong_arguments_are_named():
    def program():
        with pytest.raises(TypeError, match="step must be a whole number"):
            dist.should_stop(1.5)
        with pytest.raises(ValueError, match="step must be at least 0, got -1"):
            dist.should_stop(-1)
        with pytest.raises(TypeError, match="reason must be a str, got 3"):
            dist.request_stop(3)

    run_ranks(program, 1)
    with pytest.raises(ValueError, match="call init_process_group"):
        dist.should_stop(1)


def test_an_error_of_another_rank_is_no_wait():
    def program():
        if dist.get_rank() == 1:
            raise ArithmeticError
        dist.request_stop()
        if dist.should_stop(0):
            dist.barrier()  # what saves, say, finds that a rank is lost

    with pytest.raises(RankError, match="ArithmeticError"):
        run_ranks(program, 2, backend="tcp")


def run_alone(text):
    """Run a program of one rank in a process of its own."""
    program = "import os, signal\nimport meshlib as dist\n" + textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
    )


@pytest.mark.processes
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_signals_ask_from_the_first_call_to_the_end_of_the_job(name):
    done = run_alone(f"""
        dist.init_process_group(init_method="solo://")
        print(dist.should_stop(0))
        os.kill(os.getpid(), signal.{name})
        print(dist.should_stop(1))
        dist.destroy_process_group()
        print(signal.getsignal(signal.{name}) is signal.SIG_DFL, flush=True)
        os.kill(os.getpid(), signal.{name})
    """)
    assert done.stdout.split() == ["False", "True", "True"], done.stderr
    assert done.returncode == -getattr(signal, name)


@pytest.mark.processes
def test_a_handler_of_the_program_s_stays():
    done = run_alone("""
        signal.signal(signal.SIGTERM, lambda *_: dist.request_stop("mine"))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        dist.init_process_group(init_method="solo://")
        print(dist.should_stop(0))
        os.kill(os.getpid(), signal.SIGUSR1)
        print(dist.should_stop(1))
        os.kill(os.getpid(), signal.SIGTERM)
        print(dist.should_stop(2))
    """)
    assert done.stdout.split() == ["False", "False", "True"], done.stderr
    assert done.returncode == 0
