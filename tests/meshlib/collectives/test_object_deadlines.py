"""A deadline on objects is of the whole, however many array calls that is made of."""

import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

ALONE = {
    "broadcast_object_list": lambda **time: dist.broadcast_object_list([None], src=1, **time),
    "all_gather_object": lambda **time: dist.all_gather_object([None, None], 1, **time),
    "gather_object": lambda **time: dist.gather_object(1, [None, None], **time),
    "scatter_object_list": lambda **time: dist.scatter_object_list([None], src=1, **time),
    "recv_object_list": lambda **time: dist.recv_object_list([None], 1, **time),
}


@pytest.mark.parametrize("name", ALONE)
def test_who_waits_alone_is_told_at_the_deadline(name):
    raised = threading.Event()

    def program():
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match="timeout"):
                ALONE[name](timeout=-1)
            with pytest.raises(dist.CollectiveTimeoutError, match=r"rank 1"):
                ALONE[name](timeout="0.1s")
            raised.set()
        else:
            assert raised.wait(60)

    run_ranks(program, 2, timeout=120)


def test_what_the_first_call_has_taken_the_second_one_has_not():
    """The size is there at once; what has that size never comes."""

    def program():
        if dist.get_rank() == 1:
            dist.send(np.array([100, 1], np.int64), 0)
            sent.set()
            assert raised.wait(60)
            return
        assert sent.wait(60)
        with pytest.raises(dist.CollectiveTimeoutError, match=r"deadline of 0(\.\d+)? s"):
            dist.recv_object_list([None], 1, timeout=0.2)
        raised.set()

    sent, raised = threading.Event(), threading.Event()
    run_ranks(program, 2, timeout=120)


def test_objects_come_in_time():
    def program():
        rank = dist.get_rank()
        found, all_found, one = [rank], [None] * 2, [None]
        dist.broadcast_object_list(found, src=1, timeout=60)
        dist.all_gather_object(all_found, {"rank": rank}, timeout=60)
        dist.scatter_object_list(one, ["a", "b"], timeout=60)
        if rank == 0:
            dist.send_object_list([7], 1, timeout=60)
        else:
            dist.recv_object_list(found, 0, timeout=60)
        return found, all_found, one

    both = [{"rank": 0}, {"rank": 1}]
    assert run_ranks(program, 2) == [([1], both, ["a"]), ([7], both, ["b"])]
