"""Plans: which collectives, over what, with how many bytes; and how a person sees them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshlib as dist
from meshlib import _cli as cli
from meshlib.sharding import P, Sharding
from meshlib.sharding._redistribution.across import messages_from, messages_to
from tests.support.meshlib.sharding_cases import meshes, named_mesh, shardings

MESH = named_mesh(2, 4)
SHAPE = (64, 32)
NBYTES = 64 * 32 * 8


def kinds(source, target, shape=SHAPE, mesh=MESH, other=None):
    plan = Sharding(mesh, *source).plan(Sharding(other or mesh, *target), shape)
    return [step.kind for step in plan.steps], plan.wire_bytes


@pytest.mark.parametrize(
    ("source", "target", "steps", "per_copy"),
    [
        # what all ranks receive, in copies of the global array
        ((P("a"),), (P("a"),), [], 0),
        ((P(),), (P("a", "b"),), ["slice", "slice"], 0),
        ((P("a"),), (P(None, "a"),), ["all_to_all"], 4 * 1 / 2),
        ((P("a", "b"),), (P("b", "a"),), ["all_to_all"], 3 / 4),
        ((P(("a", "b")),), (P(("b", "a")),), ["all_to_all"], 3 / 4),
        ((P("a"),), (P(),), ["all_gather"], 4),
        ((P("a", "b"),), (P(),), ["all_gather"], 7),
        ((P(("a", "b")),), (P("a"),), ["all_gather"], 3),
        ((P("a"),), (P("b"),), ["slice", "all_to_all"], None),
        ((P(), "a"), (P(),), ["all_reduce"], 8),
        ((P(), ("a", "b")), (P(),), ["all_reduce"], 14),
        ((P(), "a"), (P("a"),), ["reduce_scatter"], 4),
        ((P(), ("a", "b")), (P(None, ("a", "b")),), ["reduce_scatter"], 7),
        ((P("a"), "b"), (P(("b", "a")),), ["reduce_scatter", "all_to_all"], None),
        ((P(), "a"), (P(), "b"), ["all_reduce", "partition"], 8),
        ((P(), "a"), (P("b"), "a"), ["slice"], 0),
    ],
)
def test_the_plan_is_the_one_with_the_fewest_bytes(source, target, steps, per_copy):
    found, nbytes = kinds(source, target)
    if per_copy is None:
        assert found[-1] in steps
    else:
        assert (found, nbytes) == (steps, per_copy * NBYTES)


@given(meshes(), st.data())
def test_without_partial_values_each_rank_receives_just_what_it_lacks(mesh, data):
    shape = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    source, target = (data.draw(shardings(mesh, len(shape), None)) for _ in range(2))
    lacking = 0
    numbers = np.arange(np.prod(shape)).reshape(shape)
    for rank in range(mesh.size()):
        has, wants = (set(numbers[s.slices(shape, rank)].ravel()) for s in (source, target))
        lacking += len(wants - has)
    assert source.plan(target, shape, np.int16).wire_bytes == 2 * lacking


@given(meshes(), st.data())
def test_the_steps_lead_from_one_to_the_other(mesh, data):
    shape = data.draw(st.lists(st.integers(0, 7), min_size=0, max_size=3))
    source, target = (data.draw(shardings(mesh, len(shape))) for _ in range(2))
    at = source
    for step in source.plan(target, shape).steps:
        assert step.source == at
        at = step.target
    assert at == target


OTHER = dist.DeviceMesh("cpu", [[6, 7, 8], [9, 1, 0]], mesh_dim_names=("x", "y"))


@given(st.data())
def test_from_mesh_to_mesh_each_byte_is_sent_once_and_none_to_oneself(data):
    shape = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    source = data.draw(shardings(MESH, len(shape), None))
    target = data.draw(shardings(OTHER, len(shape), None))
    (step,) = [s for s in source.plan(target, shape).steps if s.kind == "point_to_point"]
    sent = {
        (rank, m.peer, str(m.box))
        for rank in range(10)
        for m in messages_from(step.source, step.target, shape, rank)
    }
    received, nbytes = set(), 0
    for rank in range(10):
        count = np.zeros(shape, int)
        for message in messages_to(step.source, step.target, shape, rank):
            received.add((message.peer, rank, str(message.box)))
            count[message.box] += 1
            nbytes += 8 * count[message.box].size * (message.peer != rank)
        if OTHER.coordinate_of(rank) is not None:
            own = step.target.slices(shape, rank)
            assert (count[own] == 1).all()
            assert count.sum() == count[own].size
    assert sent == received
    assert step.wire_bytes == nbytes


def test_replicas_of_another_mesh_share_what_comes():
    apart = dist.DeviceMesh("cpu", [10, 11, 12, 13])
    found, nbytes = kinds((P("a", "b"),), (P(),), other=apart)
    assert found == ["point_to_point", "all_gather"]
    assert nbytes == (1 + 3) * NBYTES


def test_partial_values_are_reduced_before_they_leave_their_mesh():
    apart = dist.DeviceMesh("cpu", [10, 11, 12, 13])
    found, _ = kinds((P("a"), "b"), (P(0),), other=apart)
    assert found == ["reduce_scatter", "point_to_point"]


def test_a_plan_for_a_million_ranks():
    mesh = dist.DeviceMesh.from_shape("cpu", (100, 100, 100))
    plan = Sharding(mesh, P(0, (1, 2))).plan(Sharding(mesh, P(0, (2, 1))), (10**6, 10**7), "f4")
    (step,) = plan.steps
    assert step.kind == "all_to_all"
    assert step.wire_bytes == 4 * (10**13 - 10**13 // 100)  # the diagonal stays where it is


def test_a_plan_is_printed():
    text = str(Sharding(MESH, P("a"), "b").plan(Sharding(MESH, P(("b", "a"))), SHAPE))
    assert text.splitlines() == [
        "float64 (64, 32), 16 KiB: P('a'), partial {'b': 'sum'} on a=2 × b=4 -> P(('b', 'a'))",
        "  1. reduce_scatter  sum over b=4    -> P(('a', 'b'))  48 KiB, 6 KiB a rank",
        "  2. all_to_all      over a=2 × b=4  -> P(('b', 'a'))  12 KiB, 1.5 KiB a rank",
        "  on the wire: 60 KiB",
    ]
    assert "nothing to do" in str(Sharding(MESH, P()).plan(Sharding(MESH, P()), SHAPE))


def test_explain_prints_a_plan(capsys):
    arguments = ["explain", "plan", "dp=2,tp=2", "--shape", "8,6", "--from", "dp, None"]
    assert cli.main([*arguments, "--to", "None, dp", "--rank", "2"]) == 0
    out = capsys.readouterr().out
    assert "all_to_all  over dp=2" in out
    assert "rank 2 before: [4:8, 0:6]" in out
    assert "rank 2 after: [0:8, 3:6]" in out
    assert cli.main([*arguments, "--to", "x; sum: y", "--to-mesh", "x=2,y=1@3"]) == 0
    assert "ranks [0, 1, 2, 3] to ranks [3, 4]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "dp"], "the following arguments are required: --to, --shape"),
        (["--from", "dq", "--to", "dp", "--shape", "8"], "'dq' is not there; expected one of dp"),
        (["--from", "dp,dp", "--to", "dp", "--shape", "8,8"], "'dp' of dp=2 twice"),
        (["--from", "(dp", "--to", "dp", "--shape", "8"], "is invalid; expected a mesh dim"),
        (["--from", "dp", "--to", "; mean: dp", "--shape", "8"], "'mean'"),
        (["--from", "dp", "--to", "dp", "--shape", "8;9"], "expected lengths"),
        (["--from", "dp", "--to", "dp", "--shape", "8", "--dtype", "f99"], "dtype 'f99'"),
        (["--from", "None, dp", "--to", "dp", "--shape", "8"], "has 1 dims"),
        (["--from", "dp", "--to", "x", "--shape", "8", "--to-mesh", "x=2@y"], "FIRST_RANK"),
    ],
)
def test_explain_says_in_a_line_what_is_wrong(arguments, message, capsys):
    try:
        code = cli.main(["explain", "plan", "dp=2", *arguments])
    except SystemExit as left:
        code = left.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
