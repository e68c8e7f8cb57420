"""A lane runs tasks in order, whoever issues them."""

import threading

from meshlib.calls import lanes
from meshlib.calls.lane import Lane
from meshlib.calls.lanes import Lanes
from transport.call import Kind

WAIT = 60.0


def test_tasks_run_in_the_order_of_issue():
    lane, seen, done = Lane("lane"), [], threading.Event()
    for i in range(100):
        lane.submit(lambda i=i: seen.append(i))
    lane.submit(done.set)
    assert done.wait(WAIT)
    assert seen == list(range(100))
    lane.join(WAIT)


def test_an_idle_lane_is_entered_by_the_caller_and_a_busy_one_is_not():
    lane = Lane("lane")
    assert lane.try_enter()
    assert not lane.try_enter()
    lane.leave()
    assert lane.try_enter()
    lane.leave()


def test_what_was_submitted_meanwhile_runs_after_the_caller_leaves():
    lane, ran = Lane("lane"), threading.Event()
    assert lane.try_enter()
    lane.submit(ran.set)
    assert not ran.wait(0.05)
    lane.leave()
    assert ran.wait(WAIT)
    assert lane.drain(WAIT)
    lane.join(WAIT)


def test_a_lane_that_was_joined_leaves_no_thread_and_can_be_used_again():
    lane, before = Lane("lane"), set(threading.enumerate())
    for _ in range(3):
        ran = threading.Event()
        lane.submit(ran.set)
        assert ran.wait(WAIT)
        lane.join(WAIT)
        assert not set(threading.enumerate()) - before


def test_draining_waits_for_the_caller_that_is_inside():
    lane, drained = Lane("lane"), threading.Event()
    assert lane.try_enter()
    assert not lane.drain(0.01)
    waiter = threading.Thread(target=lambda: lane.drain(WAIT) and drained.set(), daemon=True)
    waiter.start()
    assert not drained.wait(0.05)
    lane.leave()
    assert drained.wait(WAIT)
    waiter.join(WAIT)


def test_what_waits_behind_a_caller_survives_a_join():
    lane, seen, done = Lane("lane"), [], threading.Event()
    assert lane.try_enter()
    lane.submit(lambda: seen.append(1))
    lane.join(0.01)
    lane.submit(lambda: seen.append(2))
    lane.submit(done.set)
    lane.leave()
    assert done.wait(WAIT)
    assert seen == [1, 2]
    assert lane.drain(WAIT)
    lane.join(WAIT)


def test_many_threads_share_a_lane_without_overlap():
    lane, inside, worst = Lane("lane"), [0], [0]
    lock = threading.Lock()

    def task() -> None:
        with lock:
            inside[0] += 1
            worst[0] = max(worst[0], inside[0])
        with lock:
            inside[0] -= 1

    def caller() -> None:
        for _ in range(200):
            if lane.try_enter():
                try:
                    task()
                finally:
                    lane.leave()
            else:
                lane.submit(task)

    threads = [threading.Thread(target=caller, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    assert lane.drain(WAIT)
    lane.join(WAIT)
    assert worst[0] == 1


def test_threads_that_are_the_first_to_send_to_a_peer_share_its_lane(monkeypatch):
    found, of_two = [], Lanes("group", 0, lambda: None)

    def find(tag):
        found.append(of_two.of_peer(Kind.SEND, 1, tag))

    second = threading.Thread(target=find, args=(1,))

    def make(name):
        if second.ident is None:  # it comes while the first makes the lane
            second.start()
            second.join(0.1)
        return Lane(name)

    monkeypatch.setattr(lanes, "Lane", make)
    find(0)
    second.join(WAIT)
    assert len(found) == 2
    assert found[0] is found[1]
