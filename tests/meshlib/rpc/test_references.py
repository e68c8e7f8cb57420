"""RRefs between workers that are threads: values, methods, life and death of objects."""

import gc
import pickle
import threading
import time

import numpy as np
import pytest

from meshlib import rpc
from meshlib.rpc._worker import current_worker
from tests.support.meshlib.rpc_workers import workers


class Counter:
    def __init__(self, start=0):
        self.value = start

    def __reduce__(self):
        return Counter, (self.value,)

    def add(self, n=1):
        self.value += n
        return self.value

    @rpc.functions.async_execution
    def add_later(self, to, n):
        return rpc.rpc_async(to, int, (n,)).then(lambda done: self.add(done.wait()))


class Slow:
    """An object whose making waits for the test."""

    go = threading.Event()

    def __init__(self):
        assert Slow.go.wait(90)
        self.made = True


def fail():
    raise KeyError("never")


def use(rref, n):
    return rref.rpc_sync().add(n)


def hold(rref):
    held.append(rref)


def fail_with_a_reference():
    hold(rpc.RRef(Counter(5)))
    raise KeyError(held[-1])


def let_go():
    held.clear()


def pass_on(rref, to):
    rpc.rpc_sync(to, hold, (rref,))


def give_back(rref):
    return rref


def local(rref):
    return rref.local_value().value


def make_here(value):
    return rpc.RRef(Counter(value))


def objects():
    return len(current_worker().references)


def counts():
    owned = current_worker().references._objects._objects.values()
    return {pair: count for one in owned for pair, count in one.counts.items()}


held = []


def until_freed(counts):
    """Wait until the workers have no more objects than these."""
    until = time.monotonic() + 90
    while [rpc.rpc_sync(to, objects) for to in range(len(counts))] != counts:
        gc.collect()
        assert time.monotonic() < until, [rpc.rpc_sync(to, objects) for to in range(len(counts))]
        time.sleep(0.005)


def test_an_object_is_made_used_fetched_and_freed():
    def program():
        rref = rpc.remote("w1", Counter, (5,))
        assert (rref.owner(), rref.owner_name(), rref.is_owner()) == (("w1", 1), "w1", False)
        assert rref.rpc_sync().add() == 6
        assert rref.confirmed_by_owner()
        assert rref.rpc_async().add(2).wait() == 8
        assert rref.remote().add(2).to_here() == 10
        assert rref.rpc_sync().add_later(0, 5) == 15
        assert rref.to_here().value == 15
        assert rpc.rpc_sync(1, local, (rref,)) == 15
        with pytest.raises(RuntimeError, match=r"local_value\(\) of <RRef to object .* of worker"):
            rref.local_value()
        with pytest.raises(AttributeError, match="nothing"):
            rref.rpc_sync().nothing()
        del rref
        until_freed([0, 0])

    workers(2, program)


def test_an_object_of_ones_own():
    def program():
        value = Counter(3)
        rref = rpc.RRef(value)
        assert rref.is_owner()
        assert rref.local_value() is rref.to_here() is value
        assert rpc.rpc_sync(1, use, (rref, 4)) == 7
        assert value.value == 7
        mine = rpc.remote(0, Counter, (1,))
        assert mine.is_owner()
        assert mine.to_here().add() == 2
        back = rpc.rpc_sync(1, make_here, (9,))
        assert back.owner_name() == "w1"
        assert back.to_here().value == 9
        del rref, mine, back
        until_freed([0, 0])

    workers(2, program)


def test_whoever_holds_a_reference_keeps_the_object():
    def program():
        rref = rpc.remote(1, Counter, (1,))
        rpc.rpc_sync(2, hold, (rref,))
        rpc.rpc_sync(2, pass_on, (rref, 0))
        assert rpc.rpc_sync(2, give_back, (rref,)).rpc_sync().add() == 2
        del rref
        gc.collect()
        assert held[0].rpc_sync().add() == 3
        held.clear()
        rpc.rpc_sync(2, let_go)
        until_freed([0, 0, 0])

    held.clear()
    workers(3, program)


def test_a_reference_may_be_used_before_its_object_is_made():
    def program():
        Slow.go.clear()
        rref = rpc.remote(1, Slow)
        assert not rref.confirmed_by_owner()
        fetched = rpc.rpc_async(2, to_here, (rref,))
        assert not fetched.done()
        Slow.go.set()
        assert fetched.wait().made
        del fetched, rref
        until_freed([0, 0, 0])

    workers(3, program)


def to_here(rref):
    return rref.to_here()


def test_what_making_an_object_raised_is_raised_by_whoever_uses_it():
    def program():
        rref = rpc.remote(1, fail)
        for use_it in (rref.to_here, rref.rpc_sync().anything):
            with pytest.raises(KeyError, match="never"):
                use_it()
        with pytest.raises(KeyError, match="never"):
            rpc.rpc_sync(2, to_here, (rref,))
        assert not rref.confirmed_by_owner()

    workers(3, program)


def fail_given(rref):
    raise KeyError("never", rref.to_here())


def test_what_has_failed_to_be_made_keeps_nobody_who_has_seen_that():
    """An exception refers to all that it has passed through, with their references."""

    def program():
        given = rpc.remote(2, int, (1,))
        rref = rpc.remote(1, fail_given, (given,))
        for look in (to_here, local, use_method):
            with pytest.raises(KeyError, match="never"):
                rpc.rpc_sync(1, look, (rref,))
        del given
        until_freed([0, 1, 0])  # which the function was given
        del rref
        until_freed([0, 0, 0])

    workers(3, program)


def use_method(rref):
    return rref.rpc_sync().anything()


def test_a_reference_whose_making_was_too_late_is_unusable_everywhere():
    def program():
        Slow.go.clear()
        rref = rpc.remote(1, Slow, timeout=0.05)
        with pytest.raises(rpc.RpcTimeoutError, match=r"Slow on worker 'w1' .* deadline of 0.05 s"):
            rref.creation().wait()
        for _ in range(2):
            with pytest.raises(rpc.RpcTimeoutError):
                rref.to_here()
        with pytest.raises(rpc.RRefLostError, match=r"worker 'w0' .* gave up its creation"):
            rpc.rpc_sync(2, to_here, (rref,))
        Slow.go.set()
        del rref
        until_freed([0, 0, 0])

    workers(3, program)


def test_a_reference_is_only_pickled_in_calls():
    def program():
        with pytest.raises(RuntimeError, match="only be pickled as part of a remote call"):
            pickle.dumps(rpc.RRef(1))

    workers(2, program)


def test_arguments_with_references_that_cannot_be_pickled_grant_nothing():
    def program():
        rref = rpc.remote(1, Counter)
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"):
            rpc.rpc_sync(2, hold, ((rref, lambda: 0),))
        del rref
        until_freed([0, 0, 0])

    workers(3, program)


def test_a_reference_in_an_exception_counts_as_any_other():
    def program():
        with pytest.raises(KeyError) as caught:
            rpc.rpc_sync(1, fail_with_a_reference)
        assert caught.value.args[0].to_here().value == 5
        del caught
        until = time.monotonic() + 90
        while rpc.rpc_sync(1, counts) != {(1, 1): 1}:  # that of the one that is kept there
            gc.collect()
            assert time.monotonic() < until, rpc.rpc_sync(1, counts)
            time.sleep(0.005)
        rpc.rpc_sync(1, let_go)
        until_freed([0, 0])

    workers(2, program)


def test_a_temporary_reference_lives_until_its_method_has_run():
    def program():
        for i in range(200):
            assert rpc.remote(1, Counter, (i,)).rpc_async().add().wait() == i + 1
        array = rpc.remote(1, np.ones, (50_000,)).to_here()
        assert array.sum() == 50_000
        until_freed([0, 0])

    workers(2, program)
