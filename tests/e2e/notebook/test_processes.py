"""Notebooks that end, are killed, attach and leave: nothing stays behind but what is to stay."""

from __future__ import annotations

import os
import signal
import sys

import pytest

pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

LOCAL = """
    import os, sys, time
    import meshlib as dist
    ranks = dist.local_ranks(2)
    print(ranks.run(lambda: dist.get_rank()), flush=True)
    {then}
"""
HOLD = "ranks.run(lambda: print('busy', flush=True) or time.sleep(100))"
ATTACH = """
    import os, time
    import meshlib as dist
    from meshlib.notebook import attach
    ranks = attach()
    def count():
        global calls
        calls = globals().get("calls", 0) + 1
        return calls
    print(ranks.run(count), flush=True)
    {then}
"""
PYTHON = (sys.executable,)


def start(meshrun, text, name="notebook.py"):
    return meshrun.start(meshrun.script(text, name), command=PYTHON)


def test_ranks_end_with_a_notebook_that_ends(meshrun):
    done = meshrun.finish(start(meshrun, LOCAL.format(then="")))
    assert (done.code, done.out, done.err) == (0, "{0: 0, 1: 1}\n", "")
    assert meshrun.wait_until_gone() == []


def test_ranks_end_with_a_notebook_that_is_killed(meshrun):
    """A fork of the notebook, as a data loader makes, does not keep them alive."""
    fork = "fork = os.fork() or time.sleep(100); print(fork, flush=True); "
    notebook = start(meshrun, LOCAL.format(then=fork + HOLD))
    _, fork, busy = (notebook.stdout.readline() for _ in range(3))
    assert busy.endswith("busy\n")
    assert meshrun.wait_for(lambda: len(meshrun.processes()) >= 5)
    notebook.send_signal(signal.SIGKILL)
    assert meshrun.wait_for(lambda: meshrun.processes() == [int(fork)])
    os.kill(int(fork), signal.SIGKILL)


def test_ranks_that_do_not_begin_say_why(meshrun):
    meshrun.script("raise RuntimeError('numpy is broken')", "numpy.py")
    text = "import meshlib.notebook as n\nn.local_ranks(2)\n"
    done = meshrun.finish(meshrun.start("-P", "-c", text, command=PYTHON))
    assert done.code == 1
    assert "numpy is broken" in done.err
    assert "the ranks ended at once" in done.err


def begin_job(meshrun):
    """Start ranks that wait for a notebook."""
    return meshrun.start("-n", "2", "-m", "meshlib.notebook")


def test_notebooks_attach_one_after_the_other(meshrun):
    job = begin_job(meshrun)
    assert meshrun.wait_for(lambda: any(meshrun.temporary.rglob("job.json")))
    first = meshrun.finish(start(meshrun, ATTACH.format(then="ranks.close()")))
    assert (first.code, first.out) == (0, "{0: 1, 1: 1}\n"), first.err
    hold = "ranks.run(lambda: open('busy', 'w').close() or time.sleep(100))"
    second = start(meshrun, ATTACH.format(then=hold))
    assert second.stdout.readline() == "{0: 2, 1: 2}\n"
    assert meshrun.wait_for((meshrun.folder / "busy").exists)
    second.send_signal(signal.SIGKILL)
    third = meshrun.finish(start(meshrun, ATTACH.format(then="")))
    assert (third.code, third.out) == (0, "{0: 3, 1: 3}\n"), third.err
    job.send_signal(signal.SIGINT)
    assert meshrun.finish(job).code == 130


def test_a_job_for_no_notebook_is_refused(meshrun):
    script = meshrun.script(
        """
        import time
        import meshlib as dist
        dist.init_process_group()
        open("begun", "w").close()
        time.sleep(100)
        """
    )
    job = meshrun.start("-n", "1", script)
    assert meshrun.wait_for((meshrun.folder / "begun").exists)
    text = "from meshlib.notebook import _ranks\n_ranks._KEY_SECONDS = 0.5\n_ranks.attach()"
    done = meshrun.finish(start(meshrun, text))
    assert done.code == 1
    assert "has no ranks for a notebook: expected one that was started with" in done.err
    job.send_signal(signal.SIGINT)
    assert meshrun.finish(job).code == 130
