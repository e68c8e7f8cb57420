"""Calls in flight records, and the chains that `meshlib trace` makes of them."""

import re
import threading
import time

import pytest

import meshlib as dist
from meshlib import rpc
from meshlib._job.current import current_world
from meshlib._trace import dump
from meshlib._trace.chains import describe, remote_calls
from meshlib._trace.command import main
from meshlib._trace.merge import verdict
from meshlib._trace.pictures import page_data, trace
from meshlib.rpc._worker import current_worker
from meshlib.testing import run_ranks
from tests.support.meshlib.rpc_workers import expire, workers
from transport import _environment as environment

gate, inside = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def closed_gate():
    gate.clear()
    inside.clear()
    yield
    gate.set()


def last():
    inside.set()
    assert gate.wait(60)


def middle(to):
    rpc.rpc_sync(to, last)


def first(via, to):
    rpc.rpc_sync(via, middle, (to,))


class Table:
    def look(self):
        last()


def fail():
    raise KeyError("it is not there")


agents = {}


def dumps_of(folder, size, program, **options):
    """Have rank 0 run ``program``, which returns a future, and all write records meanwhile."""

    def rank():
        me = dist.get_rank()
        rpc.init_rpc("abcdef"[me], rpc_backend_options=rpc.RpcBackendOptions(**options))
        agents[me] = current_worker()
        dist.barrier()
        pending = program() if me == 0 else None
        assert inside.wait(60)
        dist.barrier()
        current_world().flight_record.write(folder)
        dist.barrier()
        gate.set()
        if pending is not None:
            pending.wait()
        rpc.shutdown()

    run_ranks(rank, size)
    return dump.read(folder)


def lines(dumps):
    """Return what is said of chains, without times, files and this module's name."""
    text = re.sub(r"[\d.]+ s\b", "T", describe(dumps))
    text = re.sub(r"[^ ]*/test_recording\.py:\d+ in ", "", text)
    return text.replace(f"{__name__}.", "").splitlines()


HERE = __name__


def test_a_chain_of_calls_goes_over_workers(tmp_path):
    dumps = dumps_of(tmp_path, 4, lambda: rpc.rpc_async(1, first, (2, 3)))
    assert lines(dumps) == [
        "Calls that had not ended:",
        "  rank 0 (a) has waited T for first on rank 1 (b), at <lambda>",
        "    rank 1 (b) has waited T for middle on rank 2 (c), at first",
        "      rank 2 (c) has waited T for last on rank 3 (d), at middle",
        "        rank 3 (d) has run it for T: last",
    ]


def test_a_chain_goes_on_past_workers_that_left_no_record(tmp_path):
    dumps = dumps_of(tmp_path, 4, lambda: rpc.rpc_async(1, first, (2, 3)))
    of = {one.rank: one for one in dumps}
    assert lines([of[0], of[2], of[3]])[2] == (
        "    rank 1 (b) has left no record, and had called middle on rank 2 (c)"
    )
    assert lines([of[0], of[3]])[1:] == [
        "  rank 1 (b) has left no record, and had called a function on rank 2 (c)",
        "    rank 2 (c) has left no record, and had called last on rank 3 (d)",
        "      rank 3 (d) has run it for T: last",
        "  rank 0 (a) has waited T for first on rank 1 (b), at <lambda>",
        "    rank 1 (b) has left no record",
    ]


def test_methods_and_calls_that_wait_for_their_turn_are_told(tmp_path):
    def program():
        table = rpc.remote(1, Table)
        table.to_here()
        busy = table.rpc_async().look()
        assert inside.wait(60)
        after = rpc.rpc_async(1, len, ("ab",))
        until = time.monotonic() + 60
        while len(agents[1].execution.calls) < 2 and time.monotonic() < until:
            time.sleep(0.001)
        return dist.collect_all([busy, after])

    text = lines(dumps_of(tmp_path, 2, program, num_worker_threads=1))
    assert text[1:] == [
        "  rank 0 (a) has waited T for Table.look on rank 1 (b), at program",
        "    rank 1 (b) has run it for T: look",
        "  rank 0 (a) has waited T for builtins.len on rank 1 (b), at program",
        "    rank 1 (b) has not begun it, T after it arrived",
    ]


def test_a_call_under_way_is_not_driven_out_by_others(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.TRACE_CALLS, "5")

    def program():
        slow = rpc.rpc_async(1, last)
        for _ in range(20):
            rpc.rpc_sync(1, int)
        return slow

    dumps = dumps_of(tmp_path, 2, program)
    assert [call.function for call in remote_calls(dumps) if call.is_open({0, 1})] == [
        f"{HERE}.last"
    ]
    # Nor are collectives.
    assert all(any(call.collective for call in one.calls) for one in dumps)


def test_what_ended_is_told_with_its_error(tmp_path):
    def program():
        with pytest.raises(KeyError):
            rpc.rpc_sync(1, fail)
        assert rpc.rpc_sync(1, len, ("ab",)) == 2
        inside.set()

    dumps = dumps_of(tmp_path, 2, program)
    of = {call.function: call for call in remote_calls(dumps)}
    failed, good = of[f"{HERE}.fail"], of["builtins.len"]
    assert (failed.caller, failed.callee) == (0, 1)
    assert failed.made.state == failed.served.state == "failed"
    assert failed.made.error == failed.served.error == "KeyError: 'it is not there'"
    assert good.made.state == good.served.state == "done"
    assert good.made.nbytes > 0
    assert good.made.issued <= good.served.issued <= good.served.started <= good.served.ended


def test_a_good_run_counts_its_calls(tmp_path, capsys):
    def rank():
        rpc.init_rpc(f"w{dist.get_rank()}")
        if dist.get_rank() == 0:
            for _ in range(3):
                rpc.rpc_sync(1, int)
        dist.barrier()
        rpc.shutdown()
        current_world().flight_record.write(tmp_path)  # also of what was before the end of RPC

    run_ranks(rank, 2)
    text = "All 1 collectives and 3 remote calls in the records ended well."
    assert verdict(dump.read(tmp_path)) == text
    assert main([str(tmp_path)]) == 0
    assert text in capsys.readouterr().out


def test_pictures_tie_both_ends_of_a_call(tmp_path):
    dumps = dumps_of(tmp_path, 2, lambda: rpc.rpc_async(1, last))
    drawn = [call for call in page_data(dumps)["calls"] if call["kind"] == f"{HERE}.last"]
    assert len({call["id"] for call in drawn}) == 1
    assert [call["members"] for call in drawn] == [[0, 1], [0, 1]]
    flows = [e for e in trace(dumps)["traceEvents"] if e.get("cat") == "call"]
    assert [(e["ph"], e["pid"]) for e in flows] == [("s", 0), ("f", 1)]


def test_a_late_call_has_both_ends_write_their_records(tmp_path, monkeypatch):
    monkeypatch.setenv(environment.TRACE_DIR, str(tmp_path))

    def program():
        late = rpc.rpc_async(1, last)
        assert inside.wait(60)
        expire(late)
        with pytest.raises(rpc.RpcTimeoutError):
            late.wait()
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("rank*.json"))) < 2 and time.monotonic() < until:
            time.sleep(0.001)
        current_world().flight_record.write(
            tmp_path
        )  # its own once more, now that the call has ended for it
        gate.set()

    workers(2, program)
    text = lines(dump.read(tmp_path))
    assert text[2:] == ["    rank 1 (w1) has run it for T: last"]
    assert re.match(r"  rank 0 \(w0\) gave up after T \(.+\) waiting for last on rank 1 ", text[1])
