"""A stream runs tasks in order, whoever issues them."""

import threading

from meshlib._calls import call_streams
from meshlib._calls.call_stream import CallStream
from meshlib._calls.call_streams import CallStreams
from transport._calls.header import Kind

WAIT = 60.0


def test_tasks_run_in_the_order_of_issue():
    stream, seen, done = CallStream("stream"), [], threading.Event()
    for i in range(100):
        stream.submit(lambda i=i: seen.append(i))
    stream.submit(done.set)
    assert done.wait(WAIT)
    assert seen == list(range(100))
    stream.join(WAIT)


def test_an_idle_lane_is_entered_by_the_caller_and_a_busy_one_is_not():
    stream = CallStream("stream")
    assert stream.try_enter()
    assert not stream.try_enter()
    stream.leave()
    assert stream.try_enter()
    stream.leave()


def test_what_was_submitted_meanwhile_runs_after_the_caller_leaves():
    stream, ran = CallStream("stream"), threading.Event()
    assert stream.try_enter()
    stream.submit(ran.set)
    assert not ran.wait(0.05)
    stream.leave()
    assert ran.wait(WAIT)
    assert stream.drain(WAIT)
    stream.join(WAIT)


def test_a_lane_that_was_joined_leaves_no_thread_and_can_be_used_again():
    stream, before = CallStream("stream"), set(threading.enumerate())
    for _ in range(3):
        ran = threading.Event()
        stream.submit(ran.set)
        assert ran.wait(WAIT)
        stream.join(WAIT)
        assert not set(threading.enumerate()) - before


def test_draining_waits_for_the_caller_that_is_inside():
    stream, drained = CallStream("stream"), threading.Event()
    assert stream.try_enter()
    assert not stream.drain(0.01)
    waiter = threading.Thread(target=lambda: stream.drain(WAIT) and drained.set(), daemon=True)
    waiter.start()
    assert not drained.wait(0.05)
    stream.leave()
    assert drained.wait(WAIT)
    waiter.join(WAIT)


def test_what_waits_behind_a_caller_survives_a_join():
    stream, seen, done = CallStream("stream"), [], threading.Event()
    assert stream.try_enter()
    stream.submit(lambda: seen.append(1))
    stream.join(0.01)
    stream.submit(lambda: seen.append(2))
    stream.submit(done.set)
    stream.leave()
    assert done.wait(WAIT)
    assert seen == [1, 2]
    assert stream.drain(WAIT)
    stream.join(WAIT)


def test_many_threads_share_a_lane_without_overlap():
    stream, inside, worst = CallStream("stream"), [0], [0]
    lock = threading.Lock()

    def task() -> None:
        with lock:
            inside[0] += 1
            worst[0] = max(worst[0], inside[0])
        with lock:
            inside[0] -= 1

    def caller() -> None:
        for _ in range(200):
            if stream.try_enter():
                try:
                    task()
                finally:
                    stream.leave()
            else:
                stream.submit(task)

    threads = [threading.Thread(target=caller, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    assert stream.drain(WAIT)
    stream.join(WAIT)
    assert worst[0] == 1


def test_threads_that_are_the_first_to_send_to_a_peer_share_its_lane(monkeypatch):
    found, of_two = [], CallStreams("group", 0, lambda: None)

    def find(tag):
        found.append(of_two.of_peer(Kind.SEND, 1, tag))

    second = threading.Thread(target=find, args=(1,))

    def make(name):
        if second.ident is None:  # it comes while the first makes the stream
            second.start()
            second.join(0.1)
        return CallStream(name)

    monkeypatch.setattr(call_streams, "CallStream", make)
    find(0)
    second.join(WAIT)
    assert len(found) == 2
    assert found[0] is found[1]
