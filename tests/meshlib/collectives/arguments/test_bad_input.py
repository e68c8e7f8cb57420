"""Wrong arguments: an error that names them before a byte moves.

The group lives on if no rank could make the call.
"""

import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import run_ranks
from transport._calls.header import Kind

READ_ONLY = np.broadcast_to(1.0, 2)


def ones(n=2, dtype="f8"):
    return np.ones(n, dtype)


def overlapping_gather():
    x = ones(4)
    dist.all_gather([x[1:3], ones()], x[:2])


def overlapping_scatter():
    x = ones(4)
    dist.reduce_scatter(x[1:3], [x[:2], x[2:]])


def overlapping_exchange():
    x = ones(2)
    dist.all_to_all([x[:1], ones(1)], [x[:1], x[1:]])


BAD = {
    "gather without a list": (
        lambda: dist.gather(ones(), dst=0),
        lambda: dist.gather(ones(), [ones(), ones()], dst=0),
        ValueError,
        "gather_list (is None on the destination, rank 0|was given on rank 1, which is not the)",
    ),
    "gather into too few": (
        lambda: dist.gather(ones(), [ones()], dst=0),
        lambda: dist.gather(ones(), [ones()] * 3, dst=1),
        ValueError,
        r"gather_list has \d entries; expected 2",
    ),
    "scatter without a list": (
        lambda: dist.scatter(ones(), src=0),
        lambda: dist.scatter(ones(), [ones(), ones()], src=0),
        ValueError,
        "scatter_list (is None on the source, rank 0|was given on rank 1, which is not the)",
    ),
    "scatter of another size": (
        lambda: dist.scatter(ones(3), [ones(), ones()], src=0),
        lambda: dist.scatter(ones(3), [ones(), ones()], src=1),
        ValueError,
        r"tensor has 3 elements .* the size of scatter_list\[\d\]",
    ),
    "objects without a list": (
        lambda: dist.gather_object(1, dst=0),
        lambda: dist.gather_object(1, [None, None], dst=0),
        ValueError,
        "object_gather_list (is None on the destination|was given on a rank that is not)",
    ),
    "objects into too few": (
        lambda: dist.all_gather_object([None], 1),
        lambda: dist.all_gather_object([None] * 3, 1),
        ValueError,
        r"object_list has \d entries; expected 2",
    ),
    "an object that cannot be pickled": (
        lambda: dist.send_object_list([lambda: 0], dst=1),
        lambda: dist.broadcast_object_list([lambda: 0], src=1),
        TypeError,
        "object_list cannot be pickled",
    ),
    "no room for an object": (
        lambda: dist.scatter_object_list([], [1, 2]),
        lambda: dist.scatter_object_list([], None),
        ValueError,
        "scatter_object_output_list is empty",
    ),
    "both destinations": (
        lambda: dist.send(ones(), dst=1, group_dst=1),
        lambda: dist.reduce(ones(), dst=0, group_dst=0),
        ValueError,
        "exactly one of dst and group_dst is expected",
    ),
    "no destination": (
        lambda: dist.isend(ones()),
        lambda: dist.reduce(ones()),
        ValueError,
        "exactly one of dst and group_dst is expected",
    ),
    "both sources": (
        lambda: dist.recv(ones(), src=1, group_src=1),
        lambda: dist.irecv(ones(), src=0, group_src=0),
        ValueError,
        "exactly one of src and group_src is expected",
    ),
    "a rank outside": (
        lambda: dist.broadcast(ones(), group_src=2),
        lambda: dist.send(ones(), group_dst=-1),
        ValueError,
        r"group_(src|dst) is -?\d; expected 0 to 1",
    ),
    "read-only outputs": (
        lambda: dist.recv(READ_ONLY, src=1),
        lambda: dist.all_gather([READ_ONLY, ones()], ones()),
        TypeError,
        r"(tensor|tensor_list\[0\]) is a read-only array",
    ),
    "outputs over inputs": (
        overlapping_gather,
        overlapping_scatter,
        ValueError,
        "overlaps",
    ),
    "one buffer for both directions": (
        overlapping_exchange,
        overlapping_exchange,
        ValueError,
        r"output_tensor_list\[0\] overlaps input_tensor_list\[0\]",
    ),
    "an output of another dtype": (
        lambda: dist.reduce_scatter(ones(2, "f4"), [ones(), ones()]),
        lambda: dist.all_gather_into_tensor(ones(4, "i4"), ones()),
        TypeError,
        "has dtype",
    ),
    "an output of another size": (
        lambda: dist.all_gather_into_tensor(ones(3), ones()),
        lambda: dist.reduce_scatter_tensor(ones(), ones(5)),
        ValueError,
        "has (3|5) elements .* expected 4: 2 times",
    ),
    "a string for a list": (
        lambda: dist.all_gather("ab", ones()),
        lambda: dist.all_to_all([ones(), ones()], ones(1)[0]),
        TypeError,
        "must be a list",
    ),
    "a rank that would have to be rounded": (
        lambda: dist.send(ones(), 0.5),
        lambda: dist.broadcast(ones(), group_src=0.5),
        TypeError,
        "(dst|group_src) must be a whole number, got 0.5 of type float",
    ),
    "a rank that would have to be read": (
        lambda: dist.reduce(ones(), "1"),
        lambda: dist.recv(ones(), "0"),
        TypeError,
        "(dst|src) must be a whole number, got '[01]' of type str",
    ),
    "a tag that is no number": (
        lambda: dist.send(ones(), 1, tag="a"),
        lambda: dist.irecv(ones(), 0, tag=1.0),
        TypeError,
        "tag must be a whole number, got ",
    ),
    "a factor that is no number": (
        lambda: dist.all_reduce(ones(), dist.premul_sum("2")),
        lambda: dist.all_reduce(ones(), dist.premul_sum([1.0, "x"])),
        TypeError,
        "factor must be a number or an array of numbers",
    ),
    "splits that are no numbers": (
        lambda: dist.all_to_all_single(ones(), ones(), [1.0, 1]),
        lambda: dist.all_to_all_single(ones(), ones(), None, ["1", "1"]),
        TypeError,
        r"(out|in)put_split_sizes\[0\] must be a whole number, got (1\.0|'1')",
    ),
    "splits that are no list": (
        lambda: dist.all_to_all_single(ones(), ones(), 2),
        lambda: dist.all_to_all_single(ones(), ones(), None, "11"),
        TypeError,
        "(out|in)put_split_sizes must be a list of whole numbers, got (2|'11')",
    ),
    "too few outputs for several inputs": (
        lambda: dist.all_gather_coalesced([[ones()], [ones()]], [ones(), ones()]),
        lambda: dist.all_gather_coalesced([[ones()], [ones()]], [ones(), ones()]),
        ValueError,
        r"output_tensor_lists\[\d\] has 1 entries; expected 2, one for each of input_tensor_list",
    ),
    "a complex factor of real numbers": (
        lambda: dist.all_reduce(ones(), dist.premul_sum(1j)),
        lambda: dist.reduce(ones(), 0, dist.premul_sum([1, 1j])),
        TypeError,
        "PREMUL_SUM.* does not apply to dtype float64: its factor is complex",
    ),
    "no factor": (
        lambda: dist.all_reduce(ones(), dist.ReduceOp.PREMUL_SUM),
        lambda: dist.ReduceOp(dist.ReduceOp.PREMUL_SUM),
        ValueError,
        r"PREMUL_SUM needs a factor; use premul_sum\(factor\)",
    ),
    "factors for another number of elements": (
        lambda: dist.all_reduce(ones(), dist.premul_sum(ones(3))),
        lambda: dist.reduce_scatter_tensor(ones(1), ones(2), dist.premul_sum(ones(3))),
        ValueError,
        r"has a factor of shape \(3,\); expected a number, or one for each of the [12] elements",
    ),
    "coalesced factors for another number of elements": (
        lambda: dist.all_reduce_coalesced([ones(), ones()], dist.premul_sum(ones(2))),
        lambda: dist.all_reduce_coalesced([ones(), ones()], dist.premul_sum(ones(2))),
        ValueError,
        r"has a factor of shape \(2,\); expected a number, or one for each of the 4 elements",
    ),
    "objects that are no list": (
        lambda: dist.send_object_list("abc", 1),
        lambda: dist.send_object_list(3, 0),
        TypeError,
        "object_list must be a list, got (str|int)",
    ),
    "no list to put objects into": (
        lambda: dist.broadcast_object_list("abc", src=1),
        lambda: dist.scatter_object_list((None,), None, src=0),
        TypeError,
        "(scatter_object_output|object)_list must be a list, whose entries are replaced; got",
    ),
    "no list to gather objects into": (
        lambda: dist.all_gather_object((None, None), 1),
        lambda: dist.recv_object_list((None, None), 0),
        TypeError,
        "object_list must be a list, whose entries are replaced; got tuple",
    ),
}


def refused():
    """Return the kind of the collective that this rank has just not made; None for a message."""
    last = call_queue_of(dist.group.WORLD).context.recorder.records()[-1:]
    return last[0].header.extra if last and last[0].header.kind == Kind.REFUSED else None


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
@pytest.mark.parametrize("case", BAD)
def test_the_argument_is_named_and_the_group_is_usable_if_the_ranks_agree(case, backend):
    on_rank_0, on_rank_1, error, match = BAD[case]

    def program():
        with pytest.raises(error, match=match):
            (on_rank_1 if dist.get_rank() else on_rank_0)()
        kind = refused()
        try:
            return kind, dist.all_reduce(ones(1))[0]
        except dist.CollectiveMismatchError:
            return kind, None

    (kind_0, total_0), (kind_1, total_1) = run_ranks(program, 2, backend=backend, timeout=120)
    assert total_0 == total_1 == (2.0 if kind_0 == kind_1 else None)


def test_objects_of_another_number_are_refused_by_the_receiver():
    def program():
        if dist.get_rank() == 0:
            dist.send_object_list([1, 2, 3], dst=1)
        else:
            with pytest.raises(ValueError, match="object_list has 2 entries; rank 0 sent 3"):
                dist.recv_object_list([None, None], src=0)
        return dist.all_reduce(ones(1))[0]

    assert run_ranks(program, 2) == [2.0, 2.0]
