"""The parts of elastic training by themselves: who goes on, shares of batches, state on its way."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import nn, optim
from parallel.elastic import ElasticBatches, ElasticMesh
from parallel.elastic import _transfer as transfer_module
from parallel.elastic._choice import Choice, MemberReport, choose
from parallel.elastic._transfer import ManagedState, transfer


def said(committed, ranks, *, voted=0, fresh=False):
    values = asdict(MemberReport(committed, 10 * committed, voted, fresh))
    return dict.fromkeys(ranks, values)


class TestChoose:
    ROW = np.arange(4)
    TWO = np.arange(6).reshape(3, 2)

    def test_all_that_are_left(self):
        found = choose(self.ROW, 0, 4, 1, said(7, [0, 1, 3]), [])
        assert found == Choice([0, 1, 3], 7, 70, fresh=[], stateless=False)

    def test_who_waits_takes_the_place(self):
        found = choose(self.ROW, 0, 4, 1, said(7, [0, 1, 3]), [9, 8])
        assert found.ranks == [0, 1, 9, 3]
        assert found.fresh == [9]
        grown = choose(np.array([0, 3]), 0, 4, 1, said(7, [0, 3]), [9, 8])
        assert grown.ranks == [0, 3, 9, 8]

    def test_of_two_dims_a_replica_needs_all_its_ranks(self):
        left = said(7, [0, 1, 3, 4, 5])
        assert choose(self.TWO, 0, 3, 1, left, []).ranks == [[0, 1], [4, 5]]
        filled = choose(self.TWO, 0, 3, 1, left, [9])
        assert filled.ranks == [[0, 1], [3, 9], [4, 5]]
        assert filled.fresh == [3, 9]
        assert choose(self.TWO, 1, 2, 1, left, []).ranks == [[1], [3], [5]]

    def test_the_step_that_one_has_committed_all_that_voted_commit(self):
        told = said(8, [0]) | said(7, [1], voted=12) | said(7, [2])
        found = choose(self.ROW, 0, 4, 1, told, [])
        assert (found.committed, found.cursor) == (8, 80)
        assert found.fresh == [2]  # cannot be: it says so itself, and gets the state

    def test_too_few_and_nobody_with_the_state(self):
        assert choose(self.ROW, 0, 4, 3, said(7, [0, 1]), []) is None
        assert choose(self.ROW, 0, 4, 3, said(7, [0, 1]), [5]).ranks == [0, 1, 5]
        empty = choose(self.ROW, 0, 4, 1, said(7, [0, 1], fresh=True), [])
        assert empty.stateless
        lost = choose(self.TWO, 0, 3, 1, said(7, [0, 3]), [])
        assert lost.stateless  # the shards of two replicas are not those of one
        assert lost.committed == 7

    @given(
        rows=st.integers(1, 4),
        width=st.integers(1, 3),
        lost=st.sets(st.integers(0, 11)),
        waiting=st.integers(0, 4),
    )
    def test_whatever_is_lost(self, rows, width, lost, waiting):
        ranks = np.arange(rows * width).reshape(rows, width)
        left = [rank for rank in ranks.ravel().tolist() if rank not in lost]
        found = choose(ranks, 0, rows, 1, said(1, left), list(range(20, 20 + waiting)))
        whole = [row for row in ranks.tolist() if set(row) <= set(left)]
        there = len(left) + waiting
        expected = min(rows, len(whole) + (there - len(whole) * width) // width)
        if not expected:
            assert found is None
            return
        assert len(found.ranks) == expected
        assert all(row in found.ranks for row in whole)
        assert len(np.unique(found.ranks)) == np.size(found.ranks)
        assert found.stateless == (not whole)


class TestBatches:
    @given(
        length=st.integers(1, 50),
        size=st.integers(1, 30),
        ranks=st.lists(st.integers(1, 7), min_size=1, max_size=8),
        shuffle=st.booleans(),
        policy=st.sampled_from(["keep", "scale"]),
    )
    def test_each_sample_once_a_pass_over_any_history(self, length, size, ranks, shuffle, policy):
        batches = ElasticBatches(length, size, shuffle=shuffle, policy=policy, seed=5)
        used, cursor = [], 0
        for count in ranks:
            shares = [batches.share(cursor, place, count, 4) for place in range(count)]
            assert sum(share.weight for share in shares) == pytest.approx(count)
            assert sum(len(share.samples) for share in shares) == shares[0].batch
            used += [sample for share in shares for sample in share.samples.tolist()]
            cursor += batches.batch(count)
        assert len(used) == cursor
        for begin in range(0, cursor, length):
            one = used[begin : begin + length]
            assert len(set(one)) == len(one)
            assert set(one) <= set(range(length))
        full = [s for p in range(0, cursor, length) for s in batches.at(np.arange(p, p + length))]
        assert full[:cursor] == used

    def test_policies(self):
        keep, scale = ElasticBatches(100, 12), ElasticBatches(100, 3, policy="scale")
        assert [keep.share(0, 0, n, 4).batch for n in (4, 3)] == [12, 12]
        assert [scale.share(0, 0, n, 4).batch for n in (4, 3)] == [12, 9]
        assert [keep.share(0, 0, n, 4).scale for n in (4, 3)] == [1, 1]
        assert [scale.share(0, 0, n, 4).scale for n in (4, 3)] == [1, 0.75]

    def test_microbatches(self):
        share = ElasticBatches(100, 12, shuffle=False).share(0, 1, 2, 4)
        assert [piece.tolist() for piece in share.microbatches(4)] == [[6, 7, 8], [9, 10, 11]]
        assert [piece.tolist() for piece in share.microbatches(6)] == [list(range(6, 12))]

    def test_wrong_arguments(self):
        with pytest.raises(ValueError, match="policy is 'grow'"):
            ElasticBatches(3, 1, policy="grow")
        with pytest.raises(ValueError, match="length"):
            ElasticBatches(0, 1)
        with pytest.raises(TypeError, match="batch_size"):
            ElasticBatches(3, "1")


Pair = namedtuple("Pair", "one two")


def make_state(seed):
    generator = np.random.default_rng(seed)
    model = nn.Linear(5, 3, rng=generator)
    optimizer = optim.Adam(model.parameters())
    if seed:
        for parameter in model.parameters():
            parameter.expect_grad()
            parameter.accumulate_grad(np.ones_like(parameter.data))
        optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "array": generator.standard_normal((3, 4)),
        "tree": {"a": [np.int64(seed), Pair(np.full(2, seed), np.zeros(0))], "b": "text", 3: None},
        "scalar": np.array(float(seed)),
        "turned": np.asfortranarray(generator.standard_normal((4, 2))),
    }


@pytest.mark.parametrize("fresh", [[0], [1, 3], [2]])
def test_state_comes_whole_from_several_senders(fresh, monkeypatch):
    monkeypatch.setattr(transfer_module, "_PIECE_BYTES", 7)

    def rank():
        state = make_state(0 if dist.get_rank() in fresh else 9)
        array = state["array"]
        transfer(ManagedState(state), dist.group.WORLD, fresh)
        assert state["array"] is array
        return state

    expected = make_state(9)
    for state in run_ranks(rank, 4):
        tree, arrays = ManagedState(state).take_apart()
        other, others = ManagedState(expected).take_apart()
        assert tree == other
        assert [a.tolist() for a in arrays] == [a.tolist() for a in others]
        assert isinstance(state["tree"]["a"][1], Pair)


def test_a_hash_that_does_not_fit(monkeypatch):
    def rank():
        if dist.get_rank() == 0:
            state = {"array": np.zeros(4)}
            with pytest.raises(dist.DistBackendError, match="rank 1 sent to rank 0"):
                transfer(ManagedState(state), dist.group.WORLD, [0])
            return state["array"].tolist()
        send = dist.group.WORLD.send

        def spoil(array, *others, **where):
            spoilt = array[::-1].copy() if getattr(array, "size", 0) == 32 else array
            send(spoilt, *others, **where)

        group = dist.group.WORLD
        group.send = spoil
        transfer(ManagedState({"array": np.arange(100.0)}), group, [0])
        return None

    assert run_ranks(rank, 2)[0] == [0.0] * 4


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dim": "dq"}, dist.MeshDimError, "dq"),
        ({"min_size": 3}, ValueError, "min_size is 3, but dim 'dp' has 2 ranks"),
        ({"min_size": 0}, ValueError, "min_size"),
        ({"mesh": 3}, TypeError, "mesh must be"),
        ({"timeout": "1"}, TypeError, "timeout"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    def rank():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with pytest.raises(error, match=text):
            ElasticMesh(**{"mesh": mesh, "dim": "dp", **arguments})

    run_ranks(rank, 2)


def test_a_mesh_of_some_ranks_and_a_slice_are_refused():
    def rank():
        whole = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match="expected a whole mesh"):
            ElasticMesh(whole["dp"], "dp")
        with pytest.raises(ValueError, match="expected all ranks of the job"):
            ElasticMesh(whole.without([0], "dp"), "dp")

    run_ranks(rank, 4)


def test_shares_that_were_looked_up_ahead_are_those_of_each_step():
    batches = ElasticBatches(1000, 12, seed=3)
    cursor = 0
    for place, ranks, steps in ((1, 4, 200), (1, 3, 3), (0, 3, 2), (1, 4, 40)):
        for _ in range(steps):
            share = batches.share(cursor, place, ranks, 4)
            fresh = ElasticBatches(1000, 12, seed=3).share(cursor, place, ranks, 4)
            np.testing.assert_array_equal(share.samples, fresh.samples)
            begin, end = (cursor + 12 * i // ranks for i in (place, place + 1))
            np.testing.assert_array_equal(fresh.samples, batches.at(np.arange(begin, end)))
            again = batches.share(cursor, place, ranks, 4).samples  # the step is tried once more
            again[:] = -1
            cursor += 12
    assert batches.share(5, 1, 4, 4).samples.tolist() == batches.at(np.arange(8, 11)).tolist()


def test_state_is_received_where_it_lies():
    def program():
        own = {"a": np.zeros(5), "tree": [np.zeros((2, 3)), np.zeros(2, np.float32)], "none": None}
        read_only = np.zeros(3)
        read_only.flags.writeable = False
        state = {**own, "fixed": read_only, "other": np.zeros(3 + dist.get_rank())}
        if dist.get_rank():
            state = {"a": np.arange(5.0), "tree": [np.ones((2, 3)), np.ones(2, np.float32)]}
            state |= {"none": None, "fixed": np.ones(3), "other": np.ones(4)}

        def arrays():
            return state["a"], *state["tree"], state["fixed"]

        before = arrays()
        transfer(ManagedState(state), dist.group.WORLD, [0])
        kept = [one is two for one, two in zip(arrays(), before, strict=True)]
        return kept, [array.tolist() for array in (state["a"], *state["tree"], state["other"])]

    (kept, values), (_, expected) = run_ranks(program, 2)
    assert kept == [True, True, True, False]
    assert values == expected
