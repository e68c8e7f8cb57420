"""A wrong argument on some ranks only: the others raise, too, and say which rank, where, what."""

import re
import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib import CollectiveMismatchError
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import run_ranks

WAIT = 60


def ones(n=2, dtype="f8"):
    return np.ones(n, dtype)


# What rank 1 calls; what the others call; what it is told.
WRONG = {
    "all_reduce": (
        lambda: dist.all_reduce("x"),
        lambda: dist.all_reduce(ones()),
        "TypeError: tensor must be a NumPy.*; got str",
    ),
    "all_reduce in place": (
        lambda: dist.all_reduce(ones(2, "i8"), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(ones(2, "i8")),
        "TypeError: .*AVG",
    ),
    "all_reduce of a read-only array": (
        lambda: dist.all_reduce(np.broadcast_to(1.0, 2)),
        lambda: dist.all_reduce(ones()),
        "TypeError: tensor is a read-only array",
    ),
    "broadcast": (
        lambda: dist.broadcast(ones(), src=7),
        lambda: dist.broadcast(ones(), src=0),
        "ValueError: src: global rank 7 is not in",
    ),
    "reduce": (
        lambda: dist.reduce(ones(), dst=0, op="SUM"),
        lambda: dist.reduce(ones(), dst=0),
        "TypeError: op must be a ReduceOp",
    ),
    "all_gather": (
        lambda: dist.all_gather([ones()], ones()),
        lambda: dist.all_gather([ones() for _ in range(3)], ones()),
        "ValueError: tensor_list has 1 entries; expected 3",
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter_tensor(ones(), ones(5)),
        lambda: dist.reduce_scatter_tensor(ones(), ones(6)),
        "ValueError: input has 5 elements",
    ),
    "gather": (
        lambda: dist.gather(ones(), [ones()], dst=0),
        lambda: dist.gather(ones(), list(ones((3, 2))) if dist.get_rank() == 0 else None, dst=0),
        "ValueError: gather_list was given on rank 1",
    ),
    "scatter": (
        lambda: dist.scatter(ones(), ones(4), src=1),
        lambda: dist.scatter(ones(), src=1),
        "ValueError: scatter_list has 4 entries; expected 3",
    ),
    "all_to_all": (
        lambda: dist.all_to_all_single(ones(2), ones(3)),
        lambda: dist.all_to_all_single(ones(3), ones(3)),
        "ValueError: output has 2 rows",
    ),
    "all_reduce_coalesced": (
        lambda: dist.all_reduce_coalesced([]),
        lambda: dist.all_reduce_coalesced([ones()]),
        "ValueError: tensors is empty",
    ),
    "barrier": (
        lambda: dist.barrier(timeout="soon"),
        dist.barrier,
        "TypeError: timeout must be a number of seconds",
    ),
    "all_gather of objects": (
        lambda: dist.all_gather_object([None] * 3, lambda: 0),
        lambda: dist.all_gather_object([None] * 3, 0),
        "TypeError: obj cannot be pickled",
    ),
    "broadcast of objects": (
        lambda: dist.broadcast_object_list([lambda: 0], src=1),
        lambda: dist.broadcast_object_list([None], src=1),
        "TypeError: object_list cannot be pickled",
    ),
    "gather of objects": (
        lambda: dist.gather_object(0, [None] * 3, dst=0),
        lambda: dist.gather_object(0, [None] * 3 if dist.get_rank() == 0 else None, dst=0),
        "ValueError: object_gather_list was given on a rank that is not the destination",
    ),
    "scatter of objects": (
        lambda: dist.scatter_object_list([None], [1, 2], src=1),
        lambda: dist.scatter_object_list([None], None, src=1),
        "ValueError: scatter_object_input_list has 2 entries; expected 3",
    ),
    "symmetric memory": (
        lambda: dist.group.WORLD.empty(-1),
        lambda: dist.group.WORLD.empty(2),
        "ValueError: shape is -1",
    ),
}


@pytest.mark.parametrize("met", [False, True], ids=["at first", "after calls"])
@pytest.mark.parametrize("case", WRONG)
def test_the_other_members_are_told(case, met):
    wrong, right, message = WRONG[case]
    kept = threading.Event()

    def calls():
        if met:
            dist.all_reduce(ones())
            dist.barrier()
        if dist.get_rank() == 1:
            with pytest.raises((TypeError, ValueError)):
                wrong()
            # It makes no further call: nothing but its word can tell the others.
            assert kept.wait(WAIT)
        else:
            right()
        dist.barrier()  # a root may be done with its call at once

    def program():
        # Where one member is told, another may still be in the call before.
        with pytest.raises(CollectiveMismatchError) as raised:
            calls()
        if dist.get_rank() == 0:
            kept.set()
        return str(raised.value)

    results = run_ranks(program, 3, timeout=120)
    assert len(set(results)) == 1
    text = results[0]
    assert re.match(
        rf"rank 1 could not make call #{3 if met else 1} \w+ on group 'default' of 3 ranks .*, "
        rf".*test_refusals\.py:\d+ in <lambda>: {message}",
        text,
    ), text


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_a_member_that_comes_later_is_told_as_well(backend):
    refused, notified = threading.Event(), threading.Event()

    def program():
        dist.all_reduce(ones())
        if dist.get_rank() == 1:
            with pytest.raises(TypeError):
                dist.all_reduce(3)
            refused.set()
            assert notified.wait(WAIT)
        else:
            assert refused.wait(WAIT)
        with pytest.raises(CollectiveMismatchError, match="rank 1 could not make call #2"):
            dist.all_reduce(ones())
        notified.set()
        return True

    assert run_ranks(program, 2, backend=backend, timeout=120) == [True, True]


def test_a_call_that_nobody_can_make_takes_its_turn_on_all():
    def program():
        group = dist.new_group()
        for _ in range(3):
            with pytest.raises(TypeError, match=r"tensor must be a .*; got int"):
                group.all_reduce(3)
            with pytest.raises(ValueError, match="input has 5 elements"):
                group.reduce_scatter_tensor(ones(), ones(5))
            assert group.all_reduce(ones(1))[0] == dist.get_world_size()
            group.barrier()
        return call_queue_of(group).state.order.sequence

    assert run_ranks(program, 3) == [12, 12, 12]


def test_a_refused_message_is_nobody_elses():
    def program():
        if dist.get_rank() == 0:
            with pytest.raises(TypeError):
                dist.send("x", 1)
            dist.send(ones(), 1)
        else:
            dist.recv(ones(), 0)
        return dist.all_reduce(ones(1))[0]

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_a_number_and_an_object_are_told_what_to_write():
    def program():
        with pytest.raises(
            TypeError, match=r"tensor must be .*; got int\. Write tensor=np\.array\(3\)"
        ):
            dist.all_reduce(3)
        with pytest.raises(
            TypeError, match=r"tensor must be .*; got float\. Write tensor=np\.array\(3\.5\)"
        ):
            dist.all_reduce(3.5)
        with pytest.raises(TypeError, match=r"tensor must be .*; got dict\. .* all_gather_object"):
            dist.broadcast({}, src=0)
        return True

    assert run_ranks(program, 2) == [True, True]


def test_calls_of_objects_return_their_results():
    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        boxes = [None] * size
        assert dist.all_gather_object(boxes, rank) is boxes
        boxes = [rank]
        assert dist.broadcast_object_list(boxes, src=1) is boxes
        assert boxes == [1]
        boxes = [None] * size if rank == 0 else None
        assert dist.gather_object(rank, boxes, dst=0) is boxes
        return dist.scatter_object_list([None], ["a", "b"] if rank == 0 else None, src=0)

    assert run_ranks(program, 2) == ["a", "b"]


def test_a_rank_in_the_group_is_suggested_for_one_outside():
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if mesh.get_local_rank("dp") == 1:
            with pytest.raises(ValueError, match=r"src: global rank 0 .*; write group_src=0 for"):
                mesh["tp"].broadcast(ones(), src=0)
        return mesh["tp"].broadcast(np.full(1, dist.get_rank()), group_src=0)[0]

    assert run_ranks(program, 4) == [0, 0, 2, 2]
