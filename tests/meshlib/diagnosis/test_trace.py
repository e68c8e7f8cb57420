"""Flight records: written when something fails, merged, explained and drawn."""

import contextlib
import errno
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import meshlib as dist
from meshlib._c10d.profiler import profile
from meshlib._job.current import current_world
from meshlib._trace import dump
from meshlib._trace.command import main
from meshlib._trace.merge import collectives, verdict
from meshlib._trace.pictures import page, page_data, trace
from meshlib.testing import RankError, run_ranks
from tests.support.transport.growing import with_growing_deadlines
from transport import _environment as environment

WAIT = 60.0


def until(condition):
    """Wait until ``condition()`` holds."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def records(program, size, folder):
    """Run ``program`` on ``size`` ranks and return the dumps that they write."""

    def recorded():
        with contextlib.suppress(dist.DistError):
            program()
        current_world().flight_record.write(folder)

    run_ranks(recorded, size)
    return dump.read(folder)


def test_a_good_run_matches_calls_across_ranks(tmp_path):
    recorders = {}
    there = threading.Barrier(2, timeout=WAIT)

    def program():
        recorders[dist.get_rank()] = current_world().recorder
        there.wait()
        if dist.get_rank() == 1:
            until(recorders[0].records)  # it has begun
            time.sleep(0.2)
        dist.all_reduce(np.ones(1000))
        dist.barrier()
        if dist.get_rank() == 0:
            dist.send(np.ones(3), dst=1)
        else:
            dist.recv(np.ones(3), src=0)

    dumps = records(program, 2, tmp_path)
    merged = collectives(dumps)
    assert [one.sequence for one in merged] == [1, 2]
    assert all(sorted(one.calls) == [0, 1] and not one.missing for one in merged)
    assert merged[0].last == 1
    assert merged[0].calls[0].nbytes == 8000
    assert "test_trace.py" in merged[0].calls[0].site
    assert verdict(dumps) == "All 2 collectives in the records ended well."
    drawn = {(c["rank"], c["kind"]): c for c in page_data(dumps)["calls"]}
    waited = drawn[0, "all_reduce"]["ready"] - drawn[0, "all_reduce"]["begin"]
    assert waited > 0.15
    assert drawn[1, "all_reduce"]["ready"] == drawn[1, "all_reduce"]["begin"]
    assert {"send", "recv"} <= {kind for _, kind in drawn}


def test_a_mismatch_is_told_in_a_sentence(tmp_path):
    def program():
        dist.barrier()
        dist.all_reduce(np.ones(3 + dist.get_rank()))

    text = verdict(records(program, 2, tmp_path))
    assert "made different calls at #2" in text
    assert "count=3" in text
    assert "count=4" in text


def test_the_rank_that_never_came_is_named(tmp_path):
    def attempt(seconds):
        over = threading.Barrier(3, timeout=WAIT)

        def program():
            dist.barrier()
            try:
                if dist.get_rank() != 1:
                    dist.group.WORLD.all_reduce(np.ones(3), timeout=seconds)
            finally:
                over.wait()

        text = verdict(records(program, 3, tmp_path))
        return text if text.startswith("Rank 1 never reached call #2 all_reduce") else None

    text = with_growing_deadlines(attempt)
    assert "Rank 1's last call was call #1 barrier on default (done)" in text


def test_ranks_in_calls_of_different_groups_are_told_together(tmp_path):
    def attempt(seconds):
        def program():
            other = dist.new_group(group_desc="other")
            group = other if dist.get_rank() == 2 else dist.group.WORLD
            group.all_reduce(np.ones(3), timeout=seconds)

        text = verdict(records(program, 3, tmp_path))
        is_cycle = text.startswith("Ranks waited for each other in different calls: ")
        return text if is_cycle and ranks in text else None

    ranks = "ranks 0, 1 in call #1 all_reduce dtype=float64 count=3 op=SUM on default at "
    text = with_growing_deadlines(attempt)
    assert "rank 2 in call #1 all_reduce dtype=float64 count=3 op=SUM on other at " in text


def test_of_two_errors_the_first_is_told(tmp_path):
    records(dist.barrier, 3, tmp_path)
    for rank, written, error in (
        (0, 3.0, "raised KeyError: 'late'"),
        (2, 1.0, "raised OSError: early"),
    ):
        path = tmp_path / f"rank{rank}.json"
        changes = {"written": written, "error": error}
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert verdict(dump.read(tmp_path)).startswith("Rank 2 raised OSError: early.")


def test_a_rank_that_left_is_named(tmp_path):
    records(dist.barrier, 2, tmp_path)
    (tmp_path / "rank1.json").unlink()
    path = tmp_path / "rank0.json"
    changes = {"error": "rank 1 has left the job; rank 0 noticed in call #2 barrier"}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    dumps = dump.read(tmp_path)
    assert verdict(dumps).startswith("Rank 1 has left the job; rank 0 noticed in call #2 barrier.")
    drawn = page_data(dumps)
    assert (drawn["ranks"], drawn["recorded"]) == ([0, 1], [0])


def test_a_rank_without_a_record_is_said(tmp_path):
    def program():
        dist.barrier()

    records(program, 3, tmp_path)
    (tmp_path / "rank2.json").unlink()
    assert "no record of rank 2" in verdict(dump.read(tmp_path))


def test_records_are_written_when_a_group_breaks(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.TRACE_DIR, str(tmp_path / "traces"))

    def program():
        with pytest.raises(dist.CollectiveMismatchError):
            dist.all_reduce(np.ones(1 + dist.get_rank()))

    run_ranks(program, 2)
    dumps = dump.read(tmp_path / "traces")
    assert len(dumps) == 2
    assert all("made different calls" in (one.error or "") for one in dumps)


def test_records_are_written_when_a_rank_raises(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.TRACE_DIR, str(tmp_path))

    recorders = {}

    def program():
        recorders[dist.get_rank()] = current_world().recorder
        dist.barrier()
        if dist.get_rank() == 1:
            until(lambda: len(recorders[0].records()) == 2)
            raise KeyError("x")
        dist.barrier()

    with pytest.raises(RankError):
        run_ranks(program, 2)
    text = verdict(dump.read(tmp_path))
    assert text.startswith("Rank 1 raised KeyError: 'x'. Rank 1's last call was call #1 barrier")
    # The others know as much of one that could not write its record.
    (tmp_path / "rank1.json").unlink()
    text = verdict(dump.read(tmp_path))
    assert text == "Rank 1 raised KeyError: 'x'. There is no record of rank 1."


def test_the_command_writes_a_page_and_a_trace(tmp_path, capsys):
    records(lambda: dist.all_reduce(np.ones(2)), 2, tmp_path)
    assert main([str(tmp_path)]) == 0
    assert "All 1 collectives" in capsys.readouterr().out
    html = (tmp_path / "timeline.html").read_text()
    assert "/*DATA*/" not in html
    assert "http" not in html.replace("http-equiv", "")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X" and e["name"] == "all_reduce"]
    assert {e["pid"] for e in bars} == {0, 1}
    assert all(e["dur"] > 0 for e in bars)


def test_the_command_finds_the_newest_run_below_a_log_dir(tmp_path, capsys):
    for run, calls in (("second", 2), ("first", 1)):
        folder = tmp_path / run / "trace"
        records(lambda calls=calls: [dist.barrier() for _ in range(calls)], 1, folder)
    for path in (tmp_path / "first/trace").iterdir():
        os.utime(path, (1.0, 1.0))
    (tmp_path / "later_without_records").mkdir()
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"records: {tmp_path}/second/trace"
    assert "All 2 collectives" in out
    assert (tmp_path / "second/trace/timeline.html").exists()
    assert main([str(tmp_path / "first")]) == 0
    assert "All 1 collectives" in capsys.readouterr().out


def test_data_cannot_end_the_script_element(tmp_path):
    records(dist.barrier, 1, tmp_path)
    path = tmp_path / "rank0.json"
    path.write_text(path.read_text().replace("test_trace.py", "</script>.py"))
    html = page(dump.read(tmp_path))
    assert html.count("</script>") == 2


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "no flight records" in printed
    assert "meshrun --log-dir DIR keeps" in printed
    assert main([str(tmp_path / "none")]) == 2
    assert "none is not a folder; meshrun --log-dir DIR keeps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
    assert "DIR is missing: meshrun --log-dir DIR keeps" in capsys.readouterr().err
    (tmp_path / "rank0.json").write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert "rank0.json: not a flight record" in capsys.readouterr().err


def test_the_ring_is_bounded_by_the_environment(monkeypatch):
    monkeypatch.setenv(environment.TRACE_CALLS, "5")

    def program():
        for _ in range(9):
            dist.barrier()
        return [r.header.sequence for r in current_world().recorder.records()]

    assert run_ranks(program, 1) == [[5, 6, 7, 8, 9]]
    monkeypatch.setenv(environment.TRACE_CALLS, "many")
    with pytest.raises(RankError, match="MESHLIB_TRACE_CALLS is 'many'"):
        run_ranks(program, 1)


def test_a_profile_counts_what_is_inside(tmp_path):
    def program():
        dist.barrier()
        with profile() as prof:
            for _ in range(3):
                dist.all_reduce(np.ones(1000))
            dist.broadcast(np.ones(10), src=0)
        dist.barrier()
        prof.export(tmp_path)
        rows = {row.kind: row for row in prof.summaries()}
        return str(prof), rows["all_reduce"].calls, rows["all_reduce"].nbytes, sorted(rows)

    for text, calls, nbytes, kinds in run_ranks(program, 2):
        assert (calls, nbytes, kinds) == (3, 24000, ["all_reduce", "broadcast"])
        assert "GB/s" in text
    assert len(trace(dump.read(tmp_path))["traceEvents"]) > 8


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path, monkeypatch):
    def fill(path, text):
        with open(path, "w") as file:
            file.write(text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    def program():
        with pytest.raises(OSError, match="No space"):
            current_world().flight_record.write(tmp_path)

    monkeypatch.setattr(Path, "write_text", fill)
    run_ranks(program, 2)
    assert list(tmp_path.iterdir()) == []
