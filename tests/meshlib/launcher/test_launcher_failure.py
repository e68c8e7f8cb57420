"""The rank that failed first, and the report about it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

import meshlib as dist
from meshlib._events.events import RankLost, parse
from meshlib._events.log import EVENTS, LogReader, announce_lost, register_log
from meshlib._launcher.ranks import workers
from meshlib._launcher.ranks.bootstrap import describe_error, write_error_file
from meshlib._launcher.ranks.failure import (
    ErrorRecord,
    RankExit,
    Report,
    describe_code,
    first_failure,
    rank_list,
)
from meshlib._launcher.ranks.workers import RankWorker
from meshlib._records import build, values_of
from meshlib.testing import RankError, run_ranks
from transport._store.hash_store import HashStore
from transport._store.prefix_store import PrefixStore


def error(*types, at=0.0, message="text"):
    return ErrorRecord(types[0], types, message, f"Traceback\n{types[0]}: {message}\n", at)


def ended(rank, code=1, at=0.0, stopped=False, error=None):
    return RankExit(rank, rank, "host", 100 + rank, code, at, stopped, error)


@pytest.mark.parametrize(
    ("exits", "first"),
    [
        ([], None),
        ([ended(0, at=2.0), ended(1, at=1.0)], 1),
        ([ended(1, at=1.0), ended(0, at=1.0)], 0),
        ([ended(0, at=1.0, error=error("RankFailedError")), ended(1, at=2.0)], 1),
        ([ended(0, at=1.0, error=error("KeyError", "PeerLostError")), ended(1, at=2.0)], 1),
        ([ended(0, -15, at=1.0, stopped=True), ended(1, at=2.0)], 1),
        ([ended(0, -15, at=1.0, stopped=True), ended(1, 1, 2.0, error=error("PeerLostError"))], 1),
        ([ended(0, -15, at=1.0, stopped=True)], 0),
        # The others may learn of a wrong argument before the exception has left its rank.
        (
            [
                ended(0, at=1.0, error=error("CollectiveMismatchError", "DistError")),
                ended(1, at=2.0, error=error("ValueError")),
            ],
            1,
        ),
        (
            [
                ended(0, at=1.0, error=error("CollectiveTimeoutError", "DistError")),
                ended(1, 3, 2.0),
            ],
            0,
        ),
        ([ended(0, -9, at=1.0), ended(1, at=2.0, error=error("ValueError"))], 0),
    ],
)
def test_the_first_failure(exits, first):
    found = first_failure(exits)
    assert (found.rank if found else None) == first


def test_run_ranks_names_the_rank_with_the_wrong_argument():
    reported = threading.Event()

    def program():
        try:
            dist.all_reduce("no array" if dist.get_rank() == 1 else np.ones(1))
        except dist.CollectiveMismatchError:
            reported.set()
            raise
        except TypeError:
            assert reported.wait(60)
            raise

    with pytest.raises(RankError) as caught:
        run_ranks(program, 2)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, TypeError)


def test_the_report_ends_with_the_traceback():
    exits = [
        ended(0, error=error("RankFailedError", at=1.0, message="rank 2 left\nand more")),
        ended(1, error=error("RankFailedError", at=1.0, message="rank 2 left\nand more")),
        ended(2, at=2.0, error=error("ValueError", message="boom")),
        ended(3, -15, stopped=True),
        ended(4, 0),
    ]
    report = Report(exits)
    assert report.code == 1
    assert report.text().splitlines() == [
        "meshrun: ranks 0-1: RankFailedError: rank 2 left",
        "meshrun: rank 3: ended by meshrun (SIGTERM)",
        "meshrun: rank 2 on host (local rank 2, pid 102) failed: exit code 1:",
        "Traceback",
        "ValueError: boom",
    ]
    assert "after 3 attempts:" in Report(exits, attempts=3).text()


def test_what_was_no_ranks_failure_comes_last():
    echo = ended(0, error=error("RankFailedError", message="rank 2 was lost"))
    report = Report([echo, ended(1, 3)], "node 1 was lost")
    assert report.code == 1
    assert report.text().splitlines() == [
        "meshrun: rank 0: RankFailedError: rank 2 was lost",
        "meshrun: rank 1: exit code 3",
        "meshrun: node 1 was lost",
    ]


def test_nothing_to_report():
    assert (Report([]).code, Report([]).text()) == (0, "")


@pytest.mark.parametrize(
    ("code", "shell", "words"),
    [(3, 3, "exit code 3"), (-9, 137, "SIGKILL"), (-11, 139, "SIGSEGV"), (-40, 168, "signal 40")],
)
def test_codes(code, shell, words):
    assert ended(0, code).shell_code == shell
    assert describe_code(code) == words


def test_a_failure_is_never_the_shells_success():
    assert ended(0, 0, error=error("ValueError")).shell_code == 1
    assert ended(0, 256 * 3).shell_code == 1


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8")],
)
def test_rank_list(ranks, text):
    assert rank_list(ranks) == text


def test_exits_survive_the_way_to_another_node():
    for one in (ended(2, -9), ended(1, error=error("ValueError", at=4.5))):
        again = build(RankExit, json.loads(json.dumps(one, default=values_of)))
        assert again.shell_code == one.shell_code
        assert again.what_happened() == one.what_happened()
        assert again == one


@pytest.mark.parametrize("text", ["", "{", "[]", '{"type": "E"}', '{"message": 1, "time": "soon"}'])
def test_a_broken_error_file_is_none(tmp_path, text):
    (tmp_path / "error.json").write_text(text)
    assert ErrorRecord.load(tmp_path / "error.json") is None
    assert ErrorRecord.load(tmp_path / "missing") is None


def test_another_programs_error_file_needs_only_a_message(tmp_path):
    (tmp_path / "error.json").write_text('{"message": "out of disk"}')
    found = ErrorRecord.load(tmp_path / "error.json")
    assert found is not None
    assert found.summary() == "error: out of disk"
    assert Report([ended(0, 4, error=found)]).text().endswith("exit code 4:\nerror: out of disk\n")


def test_the_ranks_hear_of_a_failure_where_they_listen():
    root = HashStore()
    job = PrefixStore("restart0", PrefixStore("job", root))
    announce_lost(root, [RankLost(1, "fell")])  # nobody listens yet
    register_log(job)
    lost = [RankLost(1, "was killed by SIGKILL"), RankLost(2, "fell")]
    announce_lost(root, lost)
    assert LogReader(job, EVENTS, parse).read(0.0) == lost


def test_setting_the_clock_changes_nothing_about_who_failed_first(monkeypatch, tmp_path):
    """The clock is set back by an hour between a rank's error and the launcher's signals."""
    began, now = time.time(), time.time
    file, process = tmp_path / "error.json", subprocess.Popen([sys.executable, "-c", "exit(1)"])
    worker = RankWorker(process, 0, 0, partial(ErrorRecord.load, file))
    write_error_file(str(file), describe_error(OSError("mine"), 0, ""))
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    worker.signal(signal.SIGTERM)
    process.wait()
    result = worker.result()
    assert result.is_cause
    assert abs(result.time - began) < 60
    late = ErrorRecord.from_dict({"message": "set back", "monotonic": time.monotonic()})
    assert late.time >= result.time


def test_a_program_that_is_not_python_may_tell_the_wall_clock():
    assert ErrorRecord.from_dict({"message": "m", "time": 7.5}).time == 7.5
    assert ErrorRecord.from_dict({"message": "m"}).time == 0.0


@pytest.mark.parametrize(("struck", "shown"), [(1, True), (0, False)])
def test_a_rank_that_the_kernel_killed_for_want_of_memory(monkeypatch, struck, shown):
    kills = iter([3, 3 + struck])
    monkeypatch.setattr(workers, "oom_kills", lambda: next(kills))
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    worker = RankWorker(process, 0, 0, lambda: None)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert worker.collect()
    exit_ = worker.result()
    assert ("out-of-memory" in Report([exit_]).text()) == shown
    assert ("out-of-memory" in exit_.loss.how) == shown
    assert "was killed by SIGKILL" in Report([exit_]).text()
