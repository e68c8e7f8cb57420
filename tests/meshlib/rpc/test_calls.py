"""Calls between workers that are threads: what they carry, return and raise; futures; nesting."""

import pickle
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import meshlib as dist
from meshlib import rpc
from meshlib.rpc._membership.directory import WorkerDirectory
from meshlib.testing import RankError, run_ranks
from tests.support.meshlib.rpc_workers import workers

gate = threading.Event()


def add(a, b=0):
    return a + b


def same(value):
    return value


def whoami():
    return rpc.get_worker_info()


def fail(error):
    raise error


def descend(depth):
    if depth == 0:
        return 0
    here = rpc.get_worker_info().id
    after = (here + 1) % len(rpc.get_worker_infos())
    return 1 + rpc.rpc_sync(after, descend, (depth - 1,))


def descend_twice(to, depth):
    both = dist.collect_all([rpc.rpc_async(to, descend, (depth,)) for _ in range(2)])
    return [done.wait() for done in both.wait()]


def wait_for_gate():
    assert gate.wait(90)


def twice(array):
    array *= 2
    return array


@rpc.functions.async_execution
def add_elsewhere(to, a, b):
    return rpc.rpc_async(to, add, (a, b)).then(lambda done: done.wait() + 1)


@rpc.functions.async_execution
def no_future():
    return 1


def test_a_worker_is_called_by_name_rank_info_and_itself():
    def program():
        info = rpc.get_worker_info("w1")
        assert info == rpc.WorkerInfo("w1", 1)
        assert rpc.get_worker_info() == ("w0", 0)
        found = [rpc.rpc_sync(to, whoami) for to in ("w1", 1, info, "w0", 0)]
        assert found == [info, info, info, ("w0", 0), ("w0", 0)]
        assert rpc.rpc_sync("w1", add, (1,), {"b": 2}) == 3

    workers(2, program)


def test_a_call_that_comes_before_its_callee_has_met_all_workers_waits_for_that(monkeypatch):
    meets, waits = threading.Event(), threading.Event()
    meet = WorkerDirectory.meet

    class Met(threading.Event):
        def wait(self, timeout=None):
            waits.set()
            return super().wait(timeout)

    def late(directory, names):
        if directory.rank == 1:
            directory._met = Met()
            meets.set()
            assert waits.wait(90)
        meet(directory, names)

    def program():
        assert meets.wait(90)
        try:
            assert rpc.rpc_sync(1, whoami) == ("w1", 1)
        finally:
            waits.set()

    monkeypatch.setattr(WorkerDirectory, "meet", late)
    workers(2, program)


def test_wrong_arguments_are_named():
    def program():
        for to, error, words in (
            ("w7", ValueError, "to is 'w7', and no worker has that name; there are 'w0', 'w1'"),
            (2, ValueError, "to is 2; expected a rank from 0 to 1"),
            (1.5, TypeError, "to must be a worker's name, its rank or its WorkerInfo, got 1.5"),
        ):
            with pytest.raises(error, match=words):
                rpc.rpc_sync(to, whoami)
        with pytest.raises(TypeError, match="func must be callable, got 3"):
            rpc.rpc_async(1, 3)
        with pytest.raises(ValueError, match="timeout must be a number of seconds >= 0"):
            rpc.rpc_sync(1, whoami, timeout=-2)
        with pytest.raises(RuntimeError, match="RPC is already initialised"):
            rpc.init_rpc("again")

    workers(2, program)


def test_a_timeout_of_minus_one_is_the_default():
    def program():
        rref = rpc.remote(1, whoami, timeout=-1.0)
        assert rref.to_here(timeout=-1.0) == rref.to_here(-1) == rpc.rpc_sync(1, whoami, timeout=-1)
        call = rpc.rpc_async(1, whoami, timeout=-1)
        assert call.seconds == rpc.get_rpc_timeout()
        assert rref.rpc_sync(timeout=-1).index("w1") == 0

    workers(2, program)


@pytest.mark.parametrize("elements", [0, 10, 1000, 40_000, 300_000])
def test_arrays_arrive_whole_and_are_the_callees_own(elements):
    def program():
        sent = np.arange(elements, dtype=np.float64)
        for to in (0, 1):
            back = rpc.rpc_sync(to, twice, (sent,))
            np.testing.assert_array_equal(back, np.arange(elements) * 2.0)
            back += 1  # ours to write to
        np.testing.assert_array_equal(sent, np.arange(elements))

    workers(2, program)


def test_jax_arrays_stay_jax_arrays():
    jnp = pytest.importorskip("jax.numpy")

    def program():
        for array in (jnp.arange(5000.0), jnp.zeros((0, 3)), jnp.asarray(2), jnp.ones(3) > 0):
            back = rpc.rpc_sync(1, same, (array,))
            assert type(back) is type(array)
            assert (back.dtype, back.weak_type) == (array.dtype, array.weak_type)
            np.testing.assert_array_equal(back, array)

    workers(2, program)


def test_the_original_exception_has_the_remote_traceback_as_its_cause():
    def program():
        with pytest.raises(KeyError, match="lost") as caught:
            rpc.rpc_sync("w1", fail, (KeyError("lost"),))
        text = str(caught.value.__cause__)
        assert "On worker 'w1' (rank 1)" in text
        assert "raise error" in text
        assert "test_calls.py" in text
        with pytest.raises(rpc.RemoteError, match=r"ended with SystemExit\(3\)"):
            rpc.rpc_sync("w1", fail, (SystemExit(3),))

    workers(2, program)


def test_what_cannot_be_pickled_says_so_and_harms_nobody():
    def program():
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"):
            rpc.rpc_sync(1, add, (lambda: 0,))
        with pytest.raises(TypeError, match="pickle"):
            rpc.rpc_sync(1, threading.Lock)
        assert rpc.rpc_sync(1, add, (1, 1)) == 2

    workers(2, program)


def test_thousands_of_calls_from_one_caller_all_end():
    def program():
        futures = [rpc.rpc_async(i % 3, add, (i, i)) for i in range(3000)]
        assert rpc.wait_all(futures) == [2 * i for i in range(3000)]
        together = dist.collect_all(
            [rpc.rpc_async(1, add, (1,)), rpc.rpc_async(2, fail, (KeyError(),))]
        )
        good, bad = together.wait()
        assert good.wait() == 1
        assert isinstance(bad.exception(), KeyError)
        with pytest.raises(KeyError):
            rpc.wait_all([good, bad])
        assert rpc.wait_all([]) == []
        never = rpc.Future()
        with pytest.raises(KeyError):
            rpc.wait_all([never, rpc.rpc_async(1, fail, (KeyError(),))])
        with pytest.raises(TypeError, match="a future cannot be pickled"):
            rpc.rpc_sync(1, same, (never,))

    workers(3, program)


def test_calls_nest_deeper_than_there_are_threads():
    def program():
        assert rpc.rpc_sync(1, descend, (40,)) == 40

    workers(2, program, threads=4)
    workers(2, program, threads=1)


def test_a_callback_that_waits_leaves_its_thread_to_calls():
    def program():
        gate.clear()
        call = rpc.rpc_async(1, wait_for_gate)
        nested = call.then(lambda _: rpc.rpc_sync(1, descend, (5,)))
        gate.set()
        assert nested.wait() == 5

    workers(2, program, threads=1)


def test_who_waits_for_all_of_several_leaves_its_thread_to_calls():
    def program():
        assert rpc.rpc_sync(1, descend_twice, (0, 5)) == [5, 5]

    workers(2, program, threads=1)


def test_callbacks_may_call_and_wait():
    def program():
        first = rpc.rpc_async(1, add, (1, 1))
        second = first.then(lambda done: rpc.rpc_sync(1, add, (done.wait(), 1)))
        third = second.then(lambda done: rpc.rpc_sync(0, add, (done.wait(), 1)))
        assert third.wait() == 4
        with pytest.raises(ZeroDivisionError):
            third.then(lambda done: 1 / 0).wait()

    workers(2, program)


def test_an_async_function_answers_when_its_future_is_done():
    def program():
        assert rpc.rpc_sync(1, add_elsewhere, ("w2", 1, 2)) == 4
        futures = [rpc.rpc_async(1, add_elsewhere, (2, i, 0)) for i in range(100)]
        assert rpc.wait_all(futures) == [i + 1 for i in range(100)]
        assert rpc.remote(1, add_elsewhere, (0, 5, 5)).to_here() == 11
        with pytest.raises(TypeError, match="no_future is marked with async_execution"):
            rpc.rpc_sync(1, no_future)

    workers(3, program, threads=1)


def test_many_threads_call_over_one_connection():
    def program():
        found = []

        def caller(i):
            found.append(rpc.rpc_sync(1, add, (i, 1)))

        # A rank that is a thread has no others that find its World, but those of callbacks.
        futures = [
            rpc.rpc_async(1, add, (i,)).then(lambda done: caller(done.wait())) for i in range(50)
        ]
        rpc.wait_all(futures)
        assert sorted(found) == list(range(1, 51))

    workers(2, program)


class Span:
    """A carrier: each call takes a number along, and brings back where it ran."""

    def __init__(self):
        self.here = threading.local()
        self.received = []

    def send(self, to):
        return getattr(self.here, "number", None)

    @contextmanager
    def serve(self, sent, caller):
        self.here.number = sent
        try:
            yield lambda: (sent, rpc.get_worker_info().name)
        finally:
            self.here.number = None

    def receive(self, sent, back, callee):
        self.received.append((sent, back, callee))


def test_a_carrier_goes_along_both_ways_and_through_nested_calls():
    def rank():
        rpc.init_rpc(f"w{dist.get_rank()}")
        span = Span()
        rpc.add_carrier("span", span)
        dist.barrier()
        if dist.get_rank() == 0:
            assert rpc.rpc_sync(1, descend, (2,)) == 2
            span.here.number = 7
            assert rpc.rpc_sync(1, descend, (1,)) == 1
            span.here.number = None
        rpc.shutdown()
        return span.received

    received = run_ranks(rank, 2)
    assert received[0] == [(7, (7, "w1"), 1)]
    assert received[1] == [(7, (7, "w0"), 0)]


def test_names_must_differ_and_be_names():
    def same():
        rpc.init_rpc("one")

    with pytest.raises(RankError, match=r"name is 'one' on the ranks \[0, 1\]"):
        run_ranks(same, 2)
    with pytest.raises(ValueError, match="expected 1 to 127 characters"):
        rpc.init_rpc("a b")


def test_rpc_may_begin_again_after_its_end():
    def rank():
        for turn in range(2):
            rpc.init_rpc(f"w{dist.get_rank()}-{turn}")
            assert rpc.rpc_sync(1 - dist.get_rank(), add, (turn, 1)) == turn + 1
            rpc.shutdown()
            with pytest.raises(RuntimeError, match="RPC is not initialised"):
                rpc.get_worker_info()
        before = dist.get_rank()
        dist.barrier()
        return before

    assert run_ranks(rank, 2) == [0, 1]
