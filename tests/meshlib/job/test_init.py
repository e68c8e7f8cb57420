"""Beginning and ending a job: over each init method, twice, and when somebody is missing."""

import threading
import time

import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._events.log import announce_ends
from meshlib._job.world import World
from meshlib.testing import RankError, run_ranks
from tests.support.transport.growing import with_growing_deadlines
from transport import _environment as environment
from transport._communicators.runtime import Runtime
from transport._errors import DistStoreError, RankFailedError
from transport._store.hash_store import HashStore
from transport._store.prefix_store import PrefixStore
from transport._store.tcp.store import TCPStore

WAIT = 60.0


def in_threads(count, program):
    """Run ``program(rank)`` in threads and return what each returned or raised."""
    results = [None] * count

    def guarded(rank):
        try:
            results[rank] = program(rank)
        except Exception as error:  # noqa: BLE001
            results[rank] = error

    threads = [threading.Thread(target=guarded, args=(r,), daemon=True) for r in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    return results


def test_an_explicit_store_again_and_again():
    store = HashStore()

    def program(rank):
        totals = []
        for _ in range(3):
            dist.init_process_group("inproc", store=store, rank=rank, world_size=3)
            totals.append(dist.all_reduce(np.ones(1))[0])
            dist.destroy_process_group()
            assert not dist.is_initialized()
        return totals

    assert in_threads(3, program) == [[3.0] * 3] * 3
    assert store.num_keys() > 0  # it is the user's, and still open
    store.close()


def test_destroying_one_group_leaves_the_others():
    store = HashStore()

    def program(rank):
        dist.init_process_group("inproc", store=store, rank=rank, world_size=2)
        other = dist.new_group()
        dist.destroy_process_group(other)
        with pytest.raises(ValueError, match="was destroyed"):
            dist.barrier(group=other)
        total = dist.all_reduce(np.ones(1))[0]
        dist.destroy_process_group(dist.group.WORLD)
        return total

    assert in_threads(2, program) == [2.0, 2.0]


def test_who_has_not_come_is_named():
    def attempt(seconds):
        def program(rank):
            dist.init_process_group("inproc", store=store, rank=rank, world_size=4, timeout=seconds)

        store = HashStore()
        errors = in_threads(2, program)
        assert all(isinstance(error, DistStoreError) for error in errors)
        assert all(f"waited {seconds:g} s for 4 ranks" in str(error) for error in errors)
        return all("[2, 3] have not arrived" in str(error) for error in errors) or None

    assert with_growing_deadlines(attempt)


def test_a_rank_lost_before_all_have_come_ends_the_wait():
    store = HashStore()

    def program(rank):
        if rank == 1:
            time.sleep(0.2)
            store.append("events", '{"kind": "rank_exit", "rank": 1, "how": "was unlucky"}\n')
            return
        with pytest.raises(RankFailedError, match="rank 1 was unlucky"):
            World(
                store.clone(), rank, 3, runtime=Runtime(), backends={"cpu": "inproc"}, timeout=WAIT
            ).join()

    in_threads(3, lambda rank: program(2 if rank == 0 else rank) if rank < 2 else None)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"store": HashStore()}, "needs rank and world_size"),
        ({"store": HashStore(), "rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"store": HashStore(), "init_method": "env://"}, "both given"),
        ({"backend": "smoke-signals"}, "backend 'smoke-signals' is unknown; expected one of"),
        ({"backend": "cpu:tcp,cpu:inproc"}, "a backend for 'cpu' twice"),
        ({"backend": "tpu:tcp"}, "names device 'tpu'"),
        ({"init_method": "gopher://x"}, "gopher"),
        ({"timeout": -1}, "timeout must be"),
    ],
)
def test_bad_arguments_are_refused_before_anybody_waits(kwargs, match):
    with pytest.raises(ValueError, match=match):
        dist.init_process_group(**{"backend": "inproc", **kwargs})


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"store": {}, "rank": 0, "world_size": 1}, "store must be a Store, or .*; got dict"),
        ({"store": HashStore(), "rank": 0.0, "world_size": 1}, "rank must be a whole number"),
        ({"store": HashStore(), "rank": 0, "world_size": "1"}, "world_size must be a whole numb"),
        ({"init_method": "tcp://h:1", "rank": "0", "world_size": 1}, "rank must be a whole number"),
        (
            {"timeout": "10"},
            "timeout must be a number of seconds >= 0, a timedelta or a str",
        ),
    ],
)
def test_arguments_of_another_type_are_refused_before_anybody_waits(kwargs, match):
    with pytest.raises(TypeError, match=match):
        dist.init_process_group(**{"backend": "inproc", **kwargs})


def test_init_twice_is_an_error():
    store = HashStore()

    def program(rank):
        dist.init_process_group("inproc", store=store, rank=rank, world_size=1)
        try:
            with pytest.raises(ValueError, match="already initialised"):
                dist.init_process_group("inproc", store=store, rank=rank, world_size=1)
        finally:
            dist.destroy_process_group()

    assert in_threads(1, program) == [None]


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_ended_under_a_launcher_is_not_waited_for(monkeypatch, before):
    monkeypatch.setenv(environment.RANK, "1")
    monkeypatch.setenv(environment.WORLD_SIZE, "2")
    root = HashStore()
    part = PrefixStore("restart0/turn1", root)
    ends = threading.Timer(0 if before else 0.05, announce_ends, [root.clone(), 0, [0]])
    ends.start()
    if before:
        ends.join()
    with pytest.raises(RankFailedError, match="rank 0 ended with exit code 0") as raised:
        World(part, 1, 2, runtime=Runtime(None), backends={"cpu": "inproc"}, timeout=WAIT).join()
    assert raised.value.rank == 0
    ends.join()


def test_ranks_with_numbers_of_their_own_wait_for_their_own(monkeypatch):
    monkeypatch.setenv(environment.RANK, "3")
    monkeypatch.setenv(environment.WORLD_SIZE, "4")
    root = HashStore()
    part = PrefixStore("restart0/turn1", root)
    announce_ends(root, 0, [0])
    ends = threading.Timer(0.05, announce_ends, [root.clone(), 0, [0]])
    ends.start()
    with pytest.raises(DistStoreError, match=r"\[0\] have not arrived"):
        World(part, 1, 2, runtime=Runtime(None), backends={"cpu": "inproc"}, timeout=0.2).join()
    ends.join()


def test_who_gives_up_tells_the_others_who_is_missing():
    store = HashStore()

    def program(rank):
        if rank == 0:
            store.wait(["job/here/1"], timeout=WAIT)
        World(
            PrefixStore("job", store.clone()),
            rank,
            3,
            runtime=Runtime(None),
            backends={"cpu": "inproc"},
            timeout=WAIT if rank else 0.1,
        ).join()

    errors = in_threads(2, program)
    assert {type(error) for error in errors} == {DistStoreError}
    assert all("rank 0 waited 0.1 s" in str(error) for error in errors)
    assert all("[2] have not arrived" in str(error) for error in errors)
    store.close()


def test_the_rank_that_served_the_store_is_named_when_both_are_gone():
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=WAIT)
    client = TCPStore("127.0.0.1", server.port, timeout=WAIT)

    def program(rank):
        store = client if rank else server
        runtime = Runtime(None)
        return World(
            store, rank, 2, runtime=runtime, backends={"cpu": "inproc"}, timeout=WAIT
        ).join()

    worlds = in_threads(2, program)
    server.close()
    error = call_queue_of(worlds[1].default_group).state.await_failure(WAIT)
    assert isinstance(error, RankFailedError)
    assert error.rank == 0
    assert call_queue_of(worlds[0].default_group).state.await_failure(0) is None
    for world in worlds:
        world.close()


def test_ranks_that_were_told_other_world_sizes_name_both():
    store = HashStore()

    def program(rank):
        size = (2, 3)[rank]
        World(
            store.clone(), rank, size, runtime=Runtime(), backends={"cpu": "inproc"}, timeout=5
        ).join()

    for error in in_threads(2, program):
        assert isinstance(error, DistStoreError)
        assert "rank 0 expects 2" in str(error)
        assert "rank 1 expects 3" in str(error)


def ordinary_program():
    """As it would be in a file for ``meshrun``."""
    dist.init_process_group(timeout="20s")
    total = dist.all_reduce(np.array([dist.get_rank()]))[0]
    seconds = dist.group.WORLD.timeout.total_seconds()
    dist.destroy_process_group()
    return int(total), seconds, dist.is_initialized()


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_an_ordinary_program_runs_in_run_ranks(backend):
    assert run_ranks(ordinary_program, 3, backend=backend) == [(3, 20.0, False)] * 3


def test_in_run_ranks_a_group_may_be_made_again_and_another_way(tmp_path):
    def program():
        assert dist.is_initialized()
        rank = dist.get_rank()
        dist.init_process_group(world_size=2)
        with pytest.raises(ValueError, match="already initialised"):
            dist.init_process_group()
        assert dist.get_backend() == "inproc"
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="not initialised"):
            dist.get_world_size()
        dist.init_process_group("tcp", f"file://{tmp_path}/store", rank=1 - rank, world_size=2)
        assert dist.get_backend() == "tcp"
        assert dist.all_reduce(np.ones(1))[0] == 2
        return rank, dist.get_rank(), dist.get_node_local_rank()  # and leaves it to run_ranks

    assert run_ranks(program, 2) == [(0, 1, 0), (1, 0, 1)]


def test_a_world_of_run_ranks_is_the_threads_alone():
    """The rank that destroys its group does not find that of the process, or of another."""
    store = HashStore()
    dist.init_process_group("tcp", store=store, rank=0, world_size=1)
    try:
        assert run_ranks(ordinary_program, 2) == [(1, 20.0, False)] * 2
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("failing", [True, False])
def test_who_waits_for_a_rank_that_has_ended_is_told(failing):
    def program():
        if dist.get_rank() == 1:
            if failing:
                raise KeyError("before it came")
            return
        dist.init_process_group()

    with pytest.raises(RankError) as caught:
        run_ranks(program, 3)
    message = str(caught.value)
    assert (
        "rank 1 of 3 raised KeyError" if failing else "rank 1 has ended without joining"
    ) in message


def test_a_timeout_may_have_a_unit():
    def program():
        dist.new_group(timeout="2m").barrier(timeout="5s")
        work = dist.all_reduce(np.ones(1), async_op=True)
        work.wait("1.5m")
        with pytest.raises(TypeError, match=r"such as '30s', got 'soon'"):
            work.wait("soon")
        return dist.new_group(timeout="500ms").timeout.total_seconds()

    assert run_ranks(program, 2, timeout="1m", call_timeout="30s") == [0.5, 0.5]
    store = HashStore()
    store.set_timeout("2h")
    assert store.timeout.total_seconds() == 7200
