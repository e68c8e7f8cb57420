"""Trouble on one rank: every rank raises, the same, soon, and says who and where."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._job.current import current_world
from meshlib._job.world import World
from meshlib.testing import run_ranks
from tests.support.transport.growing import with_growing_deadlines

WAIT = 60.0


def failures(program, size, **kwargs):
    """Run ``program`` and return what each rank raised."""

    def guarded():
        try:
            program()
        except Exception as error:  # noqa: BLE001
            return error
        return None

    return run_ranks(guarded, size, **kwargs)


MISMATCHES = {
    "dtype": (
        lambda r: dist.all_reduce(np.ones(4, "f4" if r == 1 else "i4")),
        "dtype=float32",
        "dtype=int32",
    ),
    "op": (
        lambda r: dist.all_reduce(np.ones(4), dist.ReduceOp.MAX if r == 1 else dist.ReduceOp.SUM),
        "op=MAX",
        "op=SUM",
    ),
    "size": (lambda r: dist.all_reduce(np.ones(5 if r == 1 else 4)), "count=5", "count=4"),
    "kind": (
        lambda r: dist.barrier() if r == 1 else dist.all_reduce(np.ones(4)),
        "barrier",
        "all_reduce",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
@pytest.mark.parametrize("size", [2, 3])
def test_a_mismatch_raises_on_every_rank_with_the_table(case, size):
    call, one, rest = MISMATCHES[case]

    def program():
        call(dist.get_rank())
        # A rank whose own part was done learns at its next call at the latest.
        dist.barrier()

    errors = failures(program, size)
    assert {type(error) for error in errors} == {dist.CollectiveMismatchError}
    text = str(errors[0])
    assert all(str(error) == text for error in errors)
    assert one in text
    assert rest in text
    assert "test_failures.py" in text


@pytest.mark.parametrize("backend", ["inproc", "shm"])
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        # Each rank's own part ends well, and no frame of one call reaches who is in the other.
        (lambda g: g.reduce(np.ones(4), 1), lambda g: g.broadcast(np.ones(4), 1)),
        # Rank 1 waits for rank 2 in the first call, while the others wait for it in the next.
        (lambda g: g.reduce(np.ones(4), 0), lambda g: g.reduce(np.ones(4), 1)),
    ],
)
def test_a_mismatch_that_no_frame_shows_is_found_behind_it(wrong, right, backend):
    def program():
        group = dist.group.WORLD
        group.barrier()
        (wrong if dist.get_rank() == 2 else right)(group)
        group.barrier()

    errors = failures(program, 3, backend=backend)
    assert {type(error) for error in errors} == {dist.CollectiveMismatchError}
    rows = [line.split() for line in str(errors[0]).splitlines()]
    calls = {
        row[0]: " ".join(row[1:4]) for row in rows if row[:1] != ["rank"] and "call" in row[1:2]
    }
    assert calls.keys() == {"0", "1", "2"}
    assert all(call.startswith("call #2 ") for call in calls.values())


def test_a_broken_group_says_so_and_others_go_on():
    def program():
        other = dist.new_group()
        with pytest.raises(dist.CollectiveMismatchError):
            dist.all_reduce(np.ones(1 + dist.get_rank()))
        with pytest.raises(dist.CollectiveMismatchError):
            dist.barrier()
        return dist.all_reduce(np.ones(1), group=other)[0]

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_a_timeout_names_who_has_not_come_and_where_it_is():
    there, over = threading.Event(), threading.Barrier(3, timeout=WAIT)

    def program():
        if dist.get_rank() == 1:
            there.set() or over.wait()  # the line that the others are told about
            return
        assert there.wait(WAIT)
        try:
            dist.group.WORLD.all_reduce(np.ones(1), timeout=0.3)
        finally:
            over.wait()

    errors = failures(program, 3)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert isinstance(error, dist.CollectiveTimeoutError)
        assert isinstance(error, TimeoutError)
        assert re.search(r"ranks? (0, )?1(, 2)? ha(s|ve) not arrived", str(error))
        assert "there.set() or over.wait()" in str(error)
        assert "did not complete within 0.3 s" in str(error)


def test_a_late_rank_finds_the_group_broken_and_why():
    over = threading.Event()

    def program():
        if dist.get_rank() == 1:
            assert over.wait(WAIT)
        try:
            dist.group.WORLD.barrier(timeout=0.2)
            dist.barrier()  # rank 1, if its own part of the first was done
        finally:
            over.set()

    errors = failures(program, 2)
    assert all(isinstance(error, dist.CollectiveTimeoutError) for error in errors)
    assert "rank 1 has not arrived" in str(errors[1])


def test_a_rank_that_raises_is_named_on_the_others():
    def program():
        if dist.get_rank() == 2:
            raise RuntimeError("out of luck")
        dist.barrier()

    seen = {}

    def guarded():
        try:
            program()
        except dist.RankFailedError as error:
            seen[dist.get_rank()] = error
            return

    with pytest.raises(dist.DistError, match="out of luck"):
        run_ranks(guarded, 4)
    assert {error.rank for error in seen.values()} == {2}
    assert sorted(seen) == [0, 1, 3]
    assert all("rank 2 raised RuntimeError: out of luck" in str(e) for e in seen.values())


def test_a_receive_of_the_wrong_size_says_both_and_the_group_lives():
    def program():
        if dist.get_rank() == 0:
            dist.send(np.ones(3), dst=1)
        else:
            box = np.zeros(2, "f4")
            with pytest.raises(dist.CollectiveMismatchError, match=r"3.*2|2.*3"):
                dist.recv(box, src=0)
            assert (box == 0).all()
        return dist.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_a_receive_that_times_out_leaves_the_group_usable():
    def program():
        if dist.get_rank() == 0:
            with pytest.raises(dist.CollectiveTimeoutError):
                dist.group.WORLD.recv(np.zeros(1), src=1, timeout=0.1)
        return dist.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_a_failed_async_call_fails_its_work():
    def program():
        work = dist.all_reduce(np.ones(1 + dist.get_rank()), async_op=True)
        with pytest.raises(dist.CollectiveMismatchError):
            work.wait()
        assert not work.is_success()
        assert isinstance(work.exception(), dist.CollectiveMismatchError)

    run_ranks(program, 2)


def test_a_send_that_times_out_names_its_receiver():
    over = threading.Event()

    def program():
        if dist.get_rank() == 0:
            with pytest.raises(dist.CollectiveTimeoutError) as caught:
                dist.group.WORLD.send(np.ones(4 << 20), 1, timeout=0.2)
            assert "rank 1 did not receive it" in str(caught.value)
            assert "has not arrived" not in str(caught.value)
            over.set()
        else:
            assert over.wait(WAIT)

    run_ranks(program, 2, backend="tcp")


def test_a_rank_that_is_interrupted_in_a_call_is_named_on_the_others():
    def program():
        if dist.get_rank() == 1:
            communicator = call_queue_of(dist.group.WORLD).state.communicator("cpu")

            def interrupt(*_):
                raise KeyboardInterrupt

            communicator.all_reduce = interrupt
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(np.ones(1))
        else:
            with pytest.raises(dist.RankFailedError, match=r"rank 1 left .* KeyboardInterrupt"):
                dist.all_reduce(np.ones(1))
        with pytest.raises(dist.RankFailedError):
            dist.barrier()

    run_ranks(program, 3)


@pytest.mark.parametrize("backend", ["inproc", "tcp", "shm"])
@pytest.mark.parametrize("busy", [True, False], ids=["in the call", "before the call"])
def test_a_rank_that_met_a_limit_says_so_itself_where_another_reports_first(
    busy, backend, impatient
):
    """As an endpoint's thread does it that cannot take a peer's memory."""
    limit = "this rank has no file descriptor left: its limit is 120"
    aborted = threading.Barrier(2)

    def rank():
        dist.all_reduce(np.ones(1 << 20))
        group = dist.group.WORLD
        assert group is not None
        if dist.get_rank() == 1:
            aborted.wait(WAIT)
            with pytest.raises(dist.DistError) as lost:
                dist.all_reduce(np.ones(1 << 20))
            if busy and not isinstance(lost.value, dist.RankFailedError):
                assert limit in str(lost.value)  # rank 0 was first after all
                return 0
            return lost.value.rank
        communicator = call_queue_of(group).state.communicator("cpu")
        if busy:
            timer = threading.Timer(0.1, lambda: (communicator.abort(limit), aborted.wait(WAIT)))
            timer.start()
        else:
            communicator.abort(limit)
            aborted.wait(WAIT)
            assert call_queue_of(group).state.await_failure(WAIT) is not None
        for _ in range(2):
            with pytest.raises(
                dist.DistBackendError, match=r"failed on rank 0: .*its limit is 120"
            ):
                dist.all_reduce(np.ones(1 << 20))
        return None

    assert run_ranks(rank, 2, backend=backend) == [None, 0]


def test_a_rank_with_many_calls_queued_has_come():
    def attempt(seconds):
        over = threading.Barrier(3, timeout=WAIT)

        def program():
            world = dist.group.WORLD
            try:
                if dist.get_rank() != 1:
                    calls = range(20)
                    works = [
                        world.all_reduce(np.ones(1), async_op=True, timeout=seconds) for _ in calls
                    ]
                    works[0].wait()
            finally:
                over.wait()

        errors = failures(program, 3)
        assert errors[1] is None
        assert "call #1 all_reduce" in str(errors[2])
        return errors if "rank 1 has not arrived" in str(errors[0]) else None

    with_growing_deadlines(attempt)


CALLS_THAT_NEED_RANK_1 = {
    "all_reduce": lambda: dist.all_reduce(np.ones(3)),
    "barrier": dist.barrier,
    # A transport may take a small message for somebody who never comes.
    "send": lambda: (dist.send(np.ones(3), dst=1), dist.barrier()),
    "recv": lambda: dist.recv(np.ones(3), src=1),
    "a call on a group made later": lambda: dist.new_group([0, 1]).barrier(),
}


@pytest.mark.parametrize("backend", ["inproc", "tcp", "shm", "auto"])
@pytest.mark.parametrize("late", [False, True], ids=["left first", "waits first"])
@pytest.mark.parametrize("name", CALLS_THAT_NEED_RANK_1)
def test_a_rank_that_left_in_good_order_without_a_call_is_not_waited_for(name, late, backend):
    def program():
        if dist.get_rank() == 1:
            time.sleep(0.1 if late else 0)
            return None
        if not late:
            time.sleep(0.1)
        with pytest.raises(dist.RankFailedError, match="rank 1 has left the job") as caught:
            CALLS_THAT_NEED_RANK_1[name]()
        return caught.value.rank

    assert run_ranks(program, 2, backend=backend, timeout=120)[0] == 1


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_the_others_go_on_where_they_do_not_need_the_one_that_left(backend):
    def program():
        rank = dist.get_rank()
        if rank == 1:
            return 0.0
        time.sleep(0.1)
        x = np.full(1, float(rank))
        if rank == 0:
            dist.send(x + 5, dst=2)
        else:
            dist.recv(x, src=0)
        return dist.new_group([0, 2]).all_reduce(x)[0]

    assert run_ranks(program, 3, backend=backend, timeout=120) == [5.0, 0.0, 5.0]


@pytest.mark.parametrize("backend", ["inproc", "tcp", "shm", "auto"])
@pytest.mark.parametrize("calls", [0, 1])
def test_a_receive_from_any_ends_when_all_others_have_left(calls, backend, impatient):
    def program():
        for _ in range(calls):
            dist.barrier()
        if dist.get_rank() == 1:
            dist.send(np.full(3, 7.0), 0)
        if dist.get_rank():
            return None
        x = np.zeros(3)
        assert dist.recv(x) == 1
        assert list(x) == [7, 7, 7]
        with pytest.raises(dist.RankFailedError, match=r"all possible senders .*ranks 1, 2"):
            dist.recv(x)
        return "raised"

    assert run_ranks(program, 3, backend=backend) == ["raised", None, None]


@pytest.mark.parametrize("backend", ["inproc", "shm"])
def test_a_receive_that_nobody_sends_to_does_not_hold_the_end(backend, monkeypatch, impatient):
    # Collective calls would hold the end for longer than a test may take.
    monkeypatch.setitem(World.close.__kwdefaults__, "drain", 600.0)

    def program():
        dist.barrier()
        receives = [dist.irecv(np.ones(1)), dist.irecv(np.ones(1), 1 - dist.get_rank(), tag=4)]
        dist.destroy_process_group()
        for work in receives:
            with pytest.raises(dist.DistError, match=r"was destroyed while|ha(s|ve) left"):
                work.wait()

    run_ranks(program, 2, backend=backend)


def test_waits_on_the_groups_store_end_when_a_member_is_lost():
    def program():
        store = dist.group.WORLD.get_group_store()
        store.set(f"here/{dist.get_rank()}", b"")
        store.wait([f"here/{rank}" for rank in range(3)])
        rest = dist.new_group([0, 1]) if dist.get_rank() < 2 else None
        if dist.get_rank() == 2:
            raise RuntimeError("out of luck")
        with pytest.raises(dist.RankFailedError, match="rank 2") as caught:
            store.get("never")
        assert caught.value.rank == 2
        store.set("still/works", b"1")
        # A group that the lost rank was no member of is whole, and so is its store.
        own = rest.get_group_store()
        own.set(f"mine/{dist.get_rank()}", b"yes")
        return own.get(f"mine/{1 - dist.get_rank()}")

    seen = []
    with pytest.raises(RuntimeError, match="out of luck"):
        run_ranks(lambda: seen.append(program()), 3)
    assert seen == [b"yes", b"yes"]


def test_waits_on_the_store_that_the_job_was_given_end_when_a_rank_is_lost():
    store = dist.HashStore()

    def member(rank):
        dist.init_process_group("inproc", store=store, rank=rank, world_size=2)
        if rank == 1:
            current_world().announce_exit("is out of luck")
        else:
            with pytest.raises(dist.RankFailedError, match="rank 1 is out of luck"):
                store.get("never", timeout=WAIT)
        dist.destroy_process_group()
        return store.check(["never"])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(member, range(2))) == [False, False]
    # The store is the user's: it waits again when the job has ended.
    with pytest.raises(dist.DistStoreError, match="waited"):
        store.get("never", timeout=0.01)


@pytest.mark.parametrize("how", ["silent", "gone"])
def test_errors_have_their_kind_when_the_store_cannot_be_asked(how, impatient):
    raised = threading.Event()

    def program():
        dist.barrier()
        world = current_world()

        def refuse(*_):
            raise dist.DistStoreError("the store is gone")

        # Not the wrapper that this world happens to hold: whoever asks has one of its own.
        world.store.underlying_store._request = refuse
        if dist.get_rank() == 1:
            if how == "gone":
                call_queue_of(world.default_group).state.communicator("cpu").close()
            assert raised.wait(WAIT)
            return
        try:
            dist.group.WORLD.all_reduce(np.ones(2), timeout=0.1 if how == "silent" else WAIT)
        finally:
            raised.set()

    first, second = failures(program, 2)
    assert second is None
    assert "the store is gone" in str(first)
    if how == "silent":
        assert type(first) is dist.CollectiveTimeoutError
    else:
        assert type(first) is dist.RankFailedError
        assert first.rank == 1
