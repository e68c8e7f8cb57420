"""Which rank failed first, and what is said about it."""

from __future__ import annotations

import json

import pytest

from meshlib.diagnosis.failures import EVENTS, LOGS, rank_exit_event, register_log
from meshlib.launcher.nodes import news
from meshlib.launcher.ranks.failure import (
    ErrorRecord,
    RankExit,
    Report,
    describe_code,
    first_failure,
    rank_list,
)
from transport.store.hash_store import HashStore
from transport.store.prefix_store import PrefixStore


def error(*types, at=0.0, message="text"):
    return ErrorRecord(types[0], types, message, f"Traceback\n{types[0]}: {message}\n", at)


def ended(rank, code=1, at=0.0, stopped=False, error=None):
    return RankExit(rank, rank, "host", 100 + rank, code, at, stopped, error)


@pytest.mark.parametrize(
    ("exits", "first"),
    [
        ([], None),
        ([ended(0, 0), ended(1, 0)], None),
        ([ended(0, at=2.0), ended(1, at=1.0)], 1),
        ([ended(1, at=1.0), ended(0, at=1.0)], 0),
        ([ended(0, at=1.0, error=error("RankFailedError")), ended(1, at=2.0)], 1),
        ([ended(0, at=1.0, error=error("KeyError", "PeerLostError")), ended(1, at=2.0)], 1),
        ([ended(0, -15, at=1.0, stopped=True), ended(1, at=2.0)], 1),
        ([ended(0, -15, at=1.0, stopped=True), ended(1, 1, 2.0, error=error("PeerLostError"))], 1),
        ([ended(0, -15, at=1.0, stopped=True)], 0),
    ],
)
def test_the_first_failure(exits, first):
    found = first_failure(exits)
    assert (found.rank if found else None) == first


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
        again = RankExit.from_dict(json.loads(json.dumps(one.to_dict())))
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
    news.announce(root, [(1, "fell")])  # nobody listens yet
    register_log(job)
    news.announce(root, [(1, "was killed by SIGKILL"), (2, "fell")])
    events = [json.loads(line) for line in job.get(EVENTS).splitlines()]
    assert events == [rank_exit_event(1, "was killed by SIGKILL"), rank_exit_event(2, "fell")]
    assert news.LOGS == LOGS
