"""A rank's samples: computed from its flight record, for the time since the last sample."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import meshlib as dist
from meshlib._diagnosis.sampling.sample import Sample
from meshlib._diagnosis.sampling.sampler import RankStatus, Sampler, covered, period_of
from meshlib._job.current import current_world
from meshlib._recording.recorder import FlightRecorder
from meshlib.testing import run_ranks
from transport._calls.header import CallHeader


class Alone:
    """A rank without groups."""

    def status(self):
        return RankStatus(0, {}, 0, 0, 1, ())


def record(recorder, group="g", nbytes=8, start=True):
    def call():
        def method():
            def door():
                header = CallHeader(1, 1, 0, 0, 0, 0, 0)
                return recorder.open(group, header.pack(), nbytes, -1, True, 5.0)

            return door()

        return method()

    made = call()
    if start:
        made.start()
    return made


@pytest.mark.parametrize(
    ("calls", "period"),
    [
        ("", 0),
        ("a", 0),
        ("abcabcabc", 3),
        ("aaaaaabaaaaaabaaaaaab", 7),
        ("xyzzyabababab", 2),  # a beginning that does not repeat itself is forgotten
        ("abababcabcdefghabab", 0),  # only a loop at the very end does
        ("abcbcabcacbacbbcaccab", 0),
        ("baaaaaabaaaaaabaaaaaabaaa", 7),  # in the middle of a step, inside of a loop
    ],
)
def test_a_step_is_the_period_of_the_calls(calls, period):
    assert period_of(calls) == period


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [([], 0.0), ([(1, 2), (3, 5)], 3.0), ([(3, 5), (1, 4)], 4.0), ([(1, 9), (2, 3)], 8.0)],
)
def test_time_that_calls_share_is_counted_once(spans, seconds):
    assert covered(spans) == seconds


def test_each_call_is_counted_once_whenever_it_ends():
    recorder = FlightRecorder(8)
    sampler = Sampler(recorder, threading.get_ident(), Alone())
    record(recorder).end(None)
    slow = record(recorder, "h", 100)
    first = sampler.take()
    assert {(t.group, t.calls, t.nbytes) for t in first.traffic} == {("g", 1, 8), ("h", 0, 0)}
    assert [(call.group, call.state) for call in first.open_calls] == [("h", "running")]
    second = sampler.take()
    assert [(t.group, t.calls) for t in second.traffic] == [("h", 0)]
    assert second.traffic[0].seconds == pytest.approx(second.seconds)
    assert second.inside == pytest.approx(second.seconds)
    slow.end(None)
    third = sampler.take()
    assert [(t.group, t.calls, t.nbytes) for t in third.traffic] == [("h", 1, 100)]
    assert sampler.take().traffic == []
    assert (first.total, third.total, third.number) == (2, 2, 3)


def test_a_call_that_has_not_had_its_turn_takes_no_time():
    recorder = FlightRecorder(8)
    sampler = Sampler(recorder, threading.get_ident(), Alone())
    record(recorder, start=False)
    taken = sampler.take()
    assert (taken.inside, taken.open_calls[0].state) == (0.0, "queued")


def test_where_the_record_forgets_the_time_begins_later():
    recorder = FlightRecorder(4)
    sampler = Sampler(recorder, threading.get_ident(), Alone())
    record(recorder).end(None)
    sampler.take()
    made = [record(recorder) for _ in range(6)]
    for one in made:
        one.end(None)
    taken = sampler.take()
    assert (taken.traffic[0].calls, taken.total) == (4, 5)
    assert taken.seconds <= time.monotonic() - made[2].issued
    assert taken.inside <= taken.seconds


def test_a_loop_that_says_where_its_steps_end_is_believed():
    recorder = FlightRecorder(8)
    sampler = Sampler(recorder, threading.get_ident(), Alone())
    recorder.steps.mark(10.0, 41)
    assert sampler.take().step is None
    recorder.steps.mark(10.5, 42)
    recorder.steps.mark(11.5, 43)
    step = sampler.take().step
    assert (step.seconds, step.committed) == (0.75, 43)


def test_a_sample_is_read_as_it_was_written():
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for _ in range(4):
            mesh["tp"].all_reduce(np.ones(10))
            dist.barrier()
        world = current_world()
        sampler = Sampler(world.recorder, 0, world.progress)
        taken = sampler.take()
        assert Sample.unpack(taken.pack()) == taken
        return taken

    first, second, *_ = run_ranks(program, 4)
    moved = {(t.name, t.calls, t.nbytes) for t in first.traffic}
    assert moved == {("tp", 4, 320), ("default", 4, 0)}
    assert [(c.name, c.index, c.size) for c in second.mesh] == [("dp", 0, 2), ("tp", 1, 2)]
    assert first.step is not None
    assert (second.place, second.size, second.epoch) == (1, 4, 0)


def test_a_dim_over_all_ranks_is_called_by_its_name():
    def program():
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        mesh["tp"].all_reduce(np.ones(10))
        world = current_world()
        return [t.name for t in Sampler(world.recorder, 0, world.progress).take().traffic]

    assert run_ranks(program, 2) == [["tp"]] * 2


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"step": 1}', b'{"rank": 0, "step": null}'])
def test_what_is_no_sample_is_refused(data):
    with pytest.raises(ValueError):
        Sample.unpack(data)


def test_who_waits_for_a_call_that_was_issued_before_stands_still():
    seen = threading.Event()
    blocking = []

    def program():
        world = current_world()
        if dist.get_rank() == 0:
            sampler = Sampler(world.recorder, world.thread_id, world.progress)
            work = dist.all_reduce(np.ones(3), async_op=True)
            with ThreadPoolExecutor(1) as other:
                blocking.append(other.submit(sampler.take).result().open_calls[0].blocking)
            looker = threading.Thread(target=look, args=(sampler,))
            looker.start()
            work.wait()
            looker.join()
        else:
            assert seen.wait(30)
            dist.all_reduce(np.ones(3))

    def look(sampler):
        end = time.monotonic() + 30
        while not sampler.take().open_calls[0].blocking and time.monotonic() < end:
            time.sleep(0.01)
        blocking.append(sampler.take().open_calls[0].blocking)
        seen.set()

    run_ranks(program, 2)
    assert blocking == [False, True]


def test_nobody_posts_unless_somebody_watches():
    before = set(threading.enumerate())

    def program():
        dist.barrier()
        return current_world().store.check(["samples/0"])

    assert run_ranks(program, 2) == [False, False]
    assert "meshlib-samples" not in {t.name for t in set(threading.enumerate()) - before}
