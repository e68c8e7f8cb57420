"""``local_ranks``: ranks that stay, and run functions of cells."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import meshlib as dist
from meshlib.notebook import _call, _control, local_ranks
from meshlib.notebook._link import NotebookLink
from meshlib.rpc import RpcTimeoutError
from meshlib.testing import RankError
from tests.support.meshlib.cells import Cells
from transport._waiting.interrupts import InterruptHandler

pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

BEGIN = "import os, sys, time\nimport numpy as np\nimport meshlib as dist"


@pytest.fixture(autouse=True)
def _long_windows(monkeypatch):
    """Ranks have the time that a busy machine needs to end what is interrupted, and to print."""
    monkeypatch.setattr(_call, "STOP_SECONDS", 60.0)
    monkeypatch.setattr(_call, "MARK_SECONDS", 1000.0)  # they do come


@pytest.fixture(scope="module")
def all_ranks():
    with local_ranks("dp=2,tp=2") as ranks:
        yield ranks


@pytest.fixture
def cell(all_ranks):
    """A new notebook, whose ``ranks`` are those of all tests here."""
    run = Cells(ranks=all_ranks)
    run(BEGIN)
    return run


@pytest.fixture
def ctrl_c():
    """Have Ctrl-C come when a file appears, but not after the test; return what arms it."""
    threads, pressing, over = [], threading.Lock(), threading.Event()

    def arm(path):
        def press():
            while not path.exists():
                if over.wait(0.01):
                    return
            with pressing:
                if not over.is_set():
                    os.kill(os.getpid(), signal.SIGINT)

        threads.append(threading.Thread(target=press))
        threads[-1].start()

    yield arm
    with pressing:
        over.set()
    for thread in threads:
        thread.join(60)


def test_results_by_rank_and_output_behind_its_rank(cell, capsys):
    result = cell(
        """
def program(x):
    print("hello")
    print("trouble", file=sys.stderr)
    print("unfinished", end="")
    return float(dist.all_reduce(np.full(3, x * dist.get_rank()))[0])
ranks.run(program, 2.0)"""
    )
    assert result == dict.fromkeys(range(4), 12.0)
    assert list(result) == [0, 1, 2, 3]
    out, err = capsys.readouterr()
    for rank in range(4):
        assert f"[rank {rank}] hello\n" in out
        assert f"[rank {rank}] unfinished\n" in out
        assert f"[rank {rank}] trouble\n" in err
    assert "\x1e" not in out + err


def test_a_lambda_a_closure_and_a_method(cell):
    assert cell("ranks.run(lambda: dist.get_rank() + 1)") == {0: 1, 1: 2, 2: 3, 3: 4}
    assert cell(
        """
def adds(n):
    return lambda x: x + n + dist.get_rank()
ranks.run(adds(10), 5)"""
    ) == {0: 15, 1: 16, 2: 17, 3: 18}


def test_some_ranks_by_their_coordinates(cell):
    sums = "float(dist.init_device_mesh()['tp'].all_reduce(np.array([dist.get_rank()]))[0])"
    assert cell(f"ranks['dp=1'].run(lambda: {sums})") == {2: 5.0, 3: 5.0}
    assert cell("ranks['dp=0,tp=1'].ranks") == (1,)
    assert cell("ranks[[3, 0]].run(dist.get_rank)") == {0: 0, 3: 3}
    assert cell("ranks['tp=0']['dp=1'].run(dist.get_rank)") == {2: 2}


def test_names_live_on(cell):
    cell(
        """
def begin():
    global state
    state = [dist.get_rank()]
ranks.run(begin)"""
    )
    cell("ranks.run(lambda: state.append('more'))")
    assert cell("ranks['dp=0'].run(lambda: state)") == {0: [0, "more"], 1: [1, "more"]}


def test_a_global_of_the_notebook_travels_along(cell):
    cell("rate = 0.5\ndef twice():\n    return 2 * rate\nranks.run(twice)")
    assert cell("rate = 4\nranks[0].run(lambda: twice())") == {0: 8}
    cell("del rate")
    assert cell("ranks[0].run(lambda: rate)") == {0: 4}


def test_a_class_of_a_cell_comes_back_as_itself(cell):
    cell("class Point:\n    def __init__(self, x):\n        self.x = x")
    point = cell("ranks[1].run(lambda: Point(dist.get_rank()))")[1]
    assert type(point) is cell.names["Point"]
    assert point.x == 1


def test_large_arrays_travel_both_ways(cell):
    array = np.random.default_rng(0).random(1 << 20)
    cell.names["array"] = array
    got = cell("ranks[2].run(lambda a: a * 2, array)")[2]
    assert np.array_equal(got, array * 2)
    got[0] = 1  # and can be written


def test_cells_as_text(cell, capsys):
    cell.names["ranks"].execute("import meshlib as dist\nhere = dist.get_rank() * 10\nhere + 1\n")
    out = capsys.readouterr().out
    assert sorted(out.splitlines()) == [f"[rank {rank}] {rank * 10 + 1}" for rank in range(4)]
    assert cell("ranks[3].run(lambda: here)") == {3: 30}


# ------------------------------------------------------------------ errors


def test_a_failing_rank_is_named_with_the_line_of_the_cell(cell):
    with pytest.raises(RankError) as caught:
        cell(
            """
def helper(x):
    return 1 / x  # the line
def program():
    if dist.get_rank() == 2:
        helper(0)
    dist.all_reduce(np.ones(3))  # where the others wait
ranks.run(program)"""
        )
    text = str(caught.value)
    assert caught.value.rank == 2
    assert text.startswith("rank 2 raised ZeroDivisionError")
    assert "return 1 / x  # the line" in text
    assert ", line 3, in helper" in text
    assert "meshlib/notebook" not in text
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert cell("ranks.run(lambda: float(dist.all_reduce(np.ones(1))[0]))")[0] == 4.0


def test_a_typing_error_leaves_the_groups_as_they_are(cell):
    cell("def keep():\n    global group\n    group = dist.new_group([0, 1, 2, 3])\nranks.run(keep)")
    with pytest.raises(RankError, match="NameError"):
        cell("ranks.run(lambda: no_such_name)")
    sums = "float(dist.all_reduce(np.ones(1), group=group)[0])"
    assert cell(f"ranks.run(lambda: {sums})")[0] == 4.0


def test_meshes_go_on_after_a_failure(cell):
    cell("def keep():\n    global mesh\n    mesh = dist.init_device_mesh()\nranks.run(keep)")
    sums = "float(mesh['dp'].all_reduce(np.ones(1))[0])"
    assert cell(f"ranks.run(lambda: {sums})")[3] == 2.0
    with pytest.raises(RankError):
        cell("ranks.run(lambda: mesh.barrier() if dist.get_rank() else 1 / 0)")
    assert cell(f"ranks.run(lambda: {sums})")[3] == 2.0


def test_exit_in_a_cell_ends_no_rank(cell):
    with pytest.raises(RankError, match="SystemExit"):
        cell("ranks.run(lambda: sys.exit(3))")
    assert cell("ranks.run(dist.get_rank)") == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_result_that_cannot_travel(cell):
    with pytest.raises(RankError, match="the result of <lambda>, a lock, cannot be sent"):
        cell("import threading\nranks.run(lambda: threading.Lock())")


def test_an_error_that_cannot_travel_is_told(cell):
    with pytest.raises(RankError, match="rank 0 raised Odd: it has a lock"):
        cell(
            """
import threading
class Odd(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()
def program():
    raise Odd("it has a lock")
ranks[0].run(program)"""
        )


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("dp=2", "has the coordinates 0 to 1"),
        ("pp=0", "not a coordinate of the mesh"),
        ("dp", "expected DIM=NUMBER"),
        (7, "rank 7 is not among ranks 0-3"),
        ([], "expected at least one"),
    ],
)
def test_ranks_that_there_are_not(all_ranks, which, message):
    with pytest.raises(ValueError, match=message):
        all_ranks[which]


def test_wrong_arguments(all_ranks):
    with pytest.raises(TypeError, match="fn must be callable, got str"):
        all_ranks.run("print")
    with pytest.raises(TypeError, match="source must be a str"):
        all_ranks.execute(print)
    with pytest.raises(ValueError, match="ranks is 0"):
        local_ranks(0)
    with pytest.raises(ValueError, match="dp"):
        local_ranks("dp=")
    with pytest.raises(ValueError, match="to be inferred"):
        local_ranks("dp=-1")


# ------------------------------------------------------------------ Ctrl-C, deadlines


@pytest.mark.parametrize("where", ["a collective", "Python"])
def test_ctrl_c_stops_the_call_and_keeps_the_ranks(cell, ctrl_c, tmp_path, where):
    """Ranks other than 0 may be in the function by then, or not have begun it yet."""
    cell.names["sign"] = str(tmp_path / "sign")
    pids = cell("ranks.run(os.getpid)")
    waits = "dist.all_reduce(np.ones(1))" if where == "a collective" else "time.sleep(100)"
    ctrl_c(tmp_path / "sign")
    with pytest.raises(KeyboardInterrupt):
        cell(
            f"""
def program():
    if dist.get_rank() == 0:
        open(sign, "w").close()
        time.sleep(100)
    {waits}
ranks.run(program)"""
        )
    assert cell("ranks.run(os.getpid)") == pids
    assert cell("ranks.run(lambda: float(dist.all_reduce(np.ones(1))[0]))")[0] == 4.0


def test_an_interrupt_that_comes_before_its_task(cell, monkeypatch):
    start = NotebookLink.start

    def interrupt_first(link, tasks, calls):
        for rank, task in tasks.items():
            link._world.call(rank, _control.interrupt, task.number).wait()
        start(link, tasks, calls)

    with monkeypatch.context() as patch:
        patch.setattr(NotebookLink, "start", interrupt_first)
        with pytest.raises(RankError, match=r"rank \d raised KeyboardInterrupt"):
            cell("ranks.run(time.sleep, 100)")
    assert cell("ranks.run(dist.get_rank)") == {0: 0, 1: 1, 2: 2, 3: 3}


def test_ctrl_c_waits_until_the_library_is_whole():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with local_ranks(1):
            assert isinstance(signal.getsignal(signal.SIGINT), InterruptHandler)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_deadline_names_the_ranks_and_their_lines(cell):
    with pytest.raises(RpcTimeoutError, match=r"not done after 3 s: rank 1\n") as caught:
        cell(
            """
def program():
    if dist.get_rank() == 1:
        time.sleep(100)  # here
ranks.run(program, timeout=3)"""
        )
    assert "time.sleep(100)  # here" in str(caught.value)
    assert cell("ranks.run(dist.get_rank)") == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_rank_that_heeds_no_interrupt_is_named_until_it_has_ended(cell, tmp_path, monkeypatch):
    monkeypatch.setattr(_call, "STOP_SECONDS", 0.5)
    cell.names["go"] = str(tmp_path / "go")
    with pytest.raises(RpcTimeoutError, match="rank 1"):
        cell(
            """
def stubborn():
    while not os.path.exists(go):
        try:
            time.sleep(0.1)
        except KeyboardInterrupt:
            pass
ranks[1].run(stubborn, timeout=0.5)"""
        )
    with pytest.raises(RuntimeError, match="rank 1 has not ended an earlier"):
        cell("ranks.run(dist.get_rank)")
    (tmp_path / "go").touch()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            assert cell("ranks.run(dist.get_rank)") == {0: 0, 1: 1, 2: 2, 3: 3}
            return
        except RuntimeError:
            time.sleep(0.05)
    pytest.fail("rank 1 did not come back")


# ------------------------------------------------------------------ ends


def test_a_dead_rank_ends_all_and_is_named(capsys):
    with local_ranks(2) as ranks:
        cell = Cells(ranks=ranks)
        cell(BEGIN)
        with pytest.raises(
            dist.RankFailedError, match=r"rank 1 .* was killed by SIGKILL"
        ) as caught:
            cell(
                """
def program():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(np.ones(3))
ranks.run(program)"""
            )
        assert caught.value.rank == 1
        assert ranks.is_closed
        with pytest.raises(RuntimeError, match="closed: rank 1 has died"):
            ranks.run(os.getpid)
    capsys.readouterr()


def test_a_missing_cloudpickle_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match=r"pip install 'meshlib-spmd\[notebook\]'"):
        local_ranks(2)


def test_one_call_at_a_time(cell, all_ranks, tmp_path):
    cell.names["go"] = str(tmp_path / "go")
    cell("def wait():\n    while not os.path.exists(go):\n        time.sleep(0.01)")
    thread = threading.Thread(target=cell, args=("ranks[0].run(wait)",))
    thread.start()
    try:
        end = time.monotonic() + 60
        while not all_ranks._link._lock.locked() and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="one at a time"):
            cell("ranks[1].run(os.getpid)")
    finally:
        (tmp_path / "go").touch()
        thread.join(60)
    assert not thread.is_alive()
