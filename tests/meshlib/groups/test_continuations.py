"""A continuation of a call may make calls of the same group and wait for them."""

import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib._calls.call_stream import ContinuationStream
from meshlib._calls.future import Future
from meshlib._calls.work import Work, finish
from meshlib.testing import run_ranks

WAIT = 60.0
BACKENDS = ["inproc", "shm", "tcp"]


def reduced(x, group=None):
    return dist.all_reduce(np.full(2, float(x)), group=group, async_op=True).get_future()


class Later:
    """The other rank, which makes all calls itself, and none before ``ready``.

    Until then no call of the first rank ends: what is to follow on them is registered in time to
    run in a thread of its own, and calls after those of the program.
    """

    def __init__(self):
        self.ready = threading.Event()

    def is_here(self):
        return dist.get_rank() == 1

    def calls(self, *values, group=None):
        assert self.ready.wait(WAIT)
        for x in values:
            reduced(x, group).wait(WAIT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_continuation_waits_for_a_later_call_of_its_group(backend):
    later = Later()

    def program():
        group = dist.new_group(timeout=WAIT / 2)
        if later.is_here():
            return later.calls(1, 2, 10, 20, group=group)
        waited = reduced(1, group).then(lambda f: f.value() + reduced(10, group).wait(WAIT))
        inline = reduced(2, group).then(
            lambda f: f.value() + dist.all_reduce(np.full(2, 20.0), group=group)
        )
        later.ready.set()
        return waited.wait(WAIT)[0], inline.wait(WAIT)[0]

    assert run_ranks(program, 2, backend=backend)[0] == (22.0, 44.0)


def test_the_hooks_of_pytorch_s_quantization_run():
    """Scales first, then everybody's data, then the sum: two continuations, the first of which
    waits for a call.
    """

    def program():
        size = dist.get_world_size()
        mine = np.arange(4.0) + dist.get_rank()
        scales = [np.empty(1) for _ in range(size)]
        future = dist.all_gather(scales, np.array([2.0 + dist.get_rank()]), async_op=True)

        def quantize_and_gather(done):
            scale = done.wait()[dist.get_rank()]
            parts = [np.empty(4) for _ in range(size)]
            return dist.all_gather(parts, mine * scale, async_op=True).get_future().wait()

        def sum_up(done):
            return sum(part / scale for part, scale in zip(done.wait(), scales, strict=True))

        return future.get_future().then(quantize_and_gather).then(sum_up).wait(WAIT).tolist()

    assert run_ranks(program, 3) == [[3.0, 6.0, 9.0, 12.0]] * 3


def test_continuations_keep_the_order_of_their_calls():
    later = Later()

    def program():
        if later.is_here():
            return later.calls(*range(5), *range(0, 500, 100))
        seen = []

        def follow(i):
            def callback(done):
                seen.append((i, done.value()[0]))
                return reduced(100 * i).wait(WAIT)[0]

            return reduced(i).then(callback)

        futures = [follow(i) for i in range(5)]
        later.ready.set()
        return [f.wait(WAIT) for f in futures], seen

    results, seen = run_ranks(program, 2)[0]
    assert results == [200.0 * i for i in range(5)]
    assert seen == [(i, 2.0 * i) for i in range(5)]


def test_a_continuation_waits_for_another():
    """Which needs the place that it has: it runs there, and what came before it too."""
    outside, inside = Later(), Later()

    def program():
        if outside.is_here():
            outside.calls(1, 2)
            return inside.calls(10)
        seen = []

        def outer(done):
            inner = reduced(10).then(lambda f: seen.append("inner") or f.value()[0])
            inside.ready.set()
            return done.value()[0] + inner.wait(WAIT)

        first = reduced(1).then(outer)
        second = reduced(2).then(lambda f: seen.append("second") or f.value()[0])
        outside.ready.set()
        return first.wait(WAIT), second.wait(WAIT), seen

    assert run_ranks(program, 2)[0] == (22.0, 4.0, ["second", "inner"])


def test_what_can_never_come_is_refused_at_once():
    later = Later()

    def program():
        if later.is_here():
            return later.calls(1, 2)
        box, registered = [], threading.Event()

        def itself(_):
            assert registered.wait(WAIT)
            box[0].wait()

        box.append(reduced(1).then(itself).then(lambda f: f.value()))
        registered.set()
        later.ready.set()
        with pytest.raises(RuntimeError, match=r"a callback waits for the future.*expected"):
            box[0].wait(WAIT)
        return reduced(2).wait(WAIT)[0]

    assert run_ranks(program, 2)[0] == 4.0


def test_callbacks_of_two_groups_that_wait_for_each_other_are_refused():
    one, other = ContinuationStream("one"), ContinuationStream("other")
    first, second = Future(continuations=one), Future(continuations=other)
    both, after = threading.Barrier(2), []

    def wait_for(index):
        def callback(_):
            both.wait(WAIT)
            return after[index].wait(WAIT)

        return callback

    after += [first.then(wait_for(1)), second.then(wait_for(0))]
    first.set_result(1)
    second.set_result(2)
    for future in after:
        with pytest.raises(RuntimeError, match="cannot complete before"):
            future.wait(WAIT)
    for stream in (one, other):
        stream.join(WAIT)


def test_a_callback_that_raises_harms_nobody(caplog):
    def program():
        work = dist.all_reduce(np.ones(1), async_op=True)
        work.get_future().add_done_callback(lambda _: 1 / 0)
        followed = work.get_future().then(lambda f: f.value()[0])
        return followed.wait(WAIT), reduced(3).then(lambda f: f.value()[0]).wait(WAIT)

    assert run_ranks(program, 2) == [(2.0, 6.0)] * 2
    assert "ZeroDivisionError" in caplog.text


def test_the_end_of_a_group_waits_for_what_follows_on_its_calls():
    def program():
        seen, group = [], dist.new_group()
        reduced(1, group).then(lambda f: seen.append(reduced(f.value()[0], group).wait(WAIT)[0]))
        dist.destroy_process_group(group)
        assert not [
            t.name
            for t in threading.enumerate()
            if t.name == f"meshlib-{group.id}-then-{dist.get_rank()}"
        ]
        return seen

    assert run_ranks(program, 2) == [[4.0]] * 2


def test_a_future_of_how_it_ends_needs_no_turn():
    work = Work(lambda: "call #1", None, ContinuationStream("unused"))
    ended = work.get_future_result()
    finish(work, 1)
    assert ended.wait(0.01) == 0
