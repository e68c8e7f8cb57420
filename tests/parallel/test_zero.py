"""ZeroRedundancyOptimizer: the same parameters, a share of the states."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import run_ranks
from parallel import DistributedDataParallel, Join, ZeroRedundancyOptimizer, nn, optim
from parallel.zero._shards import assign_owners
from tests.support.parallel.training import assert_close, batch, make_model, parameters


def train(model, optimizer, rank=0, world=1, steps=50, dtype="f8", first=0):
    loss = nn.CrossEntropyLoss()
    for step in range(first, first + steps):
        x, y = (part[rank::world] for part in batch(step, dtype))
        optimizer.zero_grad()
        loss(model(x), y)
        model.backward(loss.backward())
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = 0.01 / (1 + step)
        optimizer.step()
    return parameters(model)


def bytes_of(state):
    if isinstance(state, dict):
        return sum(bytes_of(value) for value in state.values())
    return state.nbytes if hasattr(state, "nbytes") else 0


OPTIMIZERS = [
    (optim.AdamW, {"lr": 0.01}),
    (optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_it_equals_the_optimizer_itself_bit_for_bit(world, kind, options, view):
    def job(sharded):
        model = DistributedDataParallel(make_model())
        optimizer = (
            ZeroRedundancyOptimizer(
                model.parameters(), kind, parameters_as_bucket_view=view, **options
            )
            if sharded
            else kind(model.parameters(), **options)
        )
        return train(model, optimizer, dist.get_rank(), world, 50 if world == 2 else 5)

    want = run_ranks(job, world, False)[0]
    for got in run_ranks(job, world, True):
        for path, value in want.items():
            np.testing.assert_array_equal(got[path], value)


@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_equality_with_one_process(dtype):
    def job():
        model = DistributedDataParallel(make_model(dtype=dtype))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
        return train(model, optimizer, dist.get_rank(), 2, dtype=dtype)

    model = make_model(dtype=dtype)
    expected = train(model, optim.AdamW(model.parameters()), dtype=dtype)
    assert_close(run_ranks(job, 2), expected, 1e-12 if dtype == "f8" else 1e-5)


def test_each_rank_keeps_its_share_of_the_states():
    def job():
        rng = np.random.default_rng(0)
        layers = [nn.Linear(32, 32, rng=rng, dtype="f8") for _ in range(8)]
        model = DistributedDataParallel(nn.Sequential(*layers))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.01)
        model(np.ones((2, 32)))
        model.backward(np.ones((2, 32)))
        optimizer.step()
        inner = optimizer.local_optimizer
        owned = {p for group in inner.param_groups for p in group["params"]}
        assert {p for p in model.parameters() if optimizer.owner(p) == dist.get_rank()} == owned
        return bytes_of(inner.state)

    whole = 2 * 8 * 8 * (32 * 32 + 32)  # two moments of 8 layers, 8 bytes each
    shares = run_ranks(job, 4)
    assert sum(shares) == whole
    assert shares == [whole // 4] * 4


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_owners_are_balanced(sizes, ranks):
    loads = [0] * ranks
    owners = assign_owners(sizes, loads)
    assert loads == [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ]
    # The fullest rank got its last parameter when it was the emptiest.
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_one_call_for_each_dtype():
    def job():
        rng = np.random.default_rng(0)
        params = [
            p for dtype in ("f4", "f8") for p in nn.Linear(3, 3, rng=rng, dtype=dtype).parameters()
        ]
        optimizer = ZeroRedundancyOptimizer(params, optim.SGD)
        group = dist.group.WORLD.process_group
        before = call_queue_of(group).state.order.sequence
        optimizer.step()
        return call_queue_of(group).state.order.sequence - before

    assert run_ranks(job, 3) == [2] * 3


def test_what_is_copied_at_once_is_bounded(monkeypatch):
    monkeypatch.setattr("parallel.zero._shards._COPIED_BYTES", 3 * 200)

    def job():
        # Owned: 400 by one rank alone, then 200, 200 and 80 by another, 200 and 160 by the third.
        sizes = (100, 50, 50, 50, 40, 20)
        params = [nn.Parameter(np.full(size, 1.0, "f4")) for size in sizes]
        optimizer = ZeroRedundancyOptimizer(params, optim.SGD, lr=1.0)
        for number, parameter in enumerate(params):
            parameter.grad = np.full(parameter.shape, number, "f4")
        group = dist.group.WORLD.process_group
        before = call_queue_of(group).state.order.sequence
        optimizer.step()
        assert call_queue_of(group).state.order.sequence - before == 3
        largest = max(
            r.nbytes for r in call_queue_of(group).context.recorder.records(group.id)[-3:]
        )
        return largest, [set(parameter.data.tolist()) for parameter in params]

    values = [{1.0 - number} for number in range(6)]
    assert run_ranks(job, 3) == [(800, values)] * 3


def test_parameter_groups_and_ones_added_later():
    def job():
        rng = np.random.default_rng(0)
        params = [nn.Parameter(rng.normal(size=n)) for n in (3, 5, 2, 4)]
        plain = copy.deepcopy(params)
        for params_, make in (
            (params, lambda g: ZeroRedundancyOptimizer(g, optim.SGD, lr=1.0)),
            (plain, lambda g: optim.SGD(g, lr=1.0)),
        ):
            optimizer = make([{"params": params_[:2]}, {"params": params_[2:3], "lr": 0.5}])
            optimizer.add_param_group({"params": params_[3:], "momentum": 0.9})
            for step in range(3):
                optimizer.param_groups[0]["lr"] = 0.1 * step
                for parameter in params_:
                    parameter.grad = np.full(parameter.shape, 1.0 + step)
                optimizer.step()
        for mine, reference in zip(params, plain, strict=True):
            np.testing.assert_array_equal(mine.data, reference.data)

    run_ranks(job, 2)


# State


@pytest.mark.parametrize("to", [0, 1, None])
def test_a_consolidated_state_fits_the_optimizer_itself_and_other_numbers_of_ranks(to):
    def begin(world):
        model = DistributedDataParallel(make_model())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.01)
        return model, optimizer

    def first():
        rank = dist.get_rank()
        model, optimizer = begin(2)
        train(model, optimizer, rank, 2, steps=3)
        with pytest.raises(RuntimeError, match="call consolidate_state_dict"):
            optimizer.state_dict()
        optimizer.consolidate_state_dict(to)
        if to not in (None, rank):
            with pytest.raises(RuntimeError, match="on the rank `to`"):
                optimizer.state_dict()
            state = None
        else:
            state = copy.deepcopy(optimizer.state_dict())
        saved = copy.deepcopy(model.module.state_dict())
        return saved, state, train(model, optimizer, rank, 2, steps=3, first=3)

    results = run_ranks(first, 2)
    saved, state, expected = results[to or 0]
    if to is None:
        np.testing.assert_equal(results[1][1], state)
    assert sorted(state) == ["param_groups", "state"]
    assert sorted(state["state"]) == list(range(8))

    def resume(rank, world):
        model, optimizer = begin(world)
        model.module.load_state_dict(saved)
        optimizer.load_state_dict(state)
        return train(model, optimizer, rank, world, steps=3, first=3)

    for world in (1, 3):
        got = run_ranks(lambda world=world: resume(dist.get_rank(), world), world)
        assert_close(got, expected, 1e-12)
    model = make_model()
    model.load_state_dict(saved)
    optimizer = optim.AdamW(model.parameters())
    optimizer.load_state_dict(state)
    assert_close([train(model, optimizer, steps=3, first=3)], expected, 1e-12)


def test_bad_use():
    def job():
        rank = dist.get_rank()
        params = [nn.Parameter(np.zeros(3)), nn.Parameter(np.zeros(4 + rank))]
        with pytest.raises(ValueError, match=r"rank 1: has parameter 1 float64\[5\] where rank 0"):
            ZeroRedundancyOptimizer(params, optim.SGD)
        optimizer = ZeroRedundancyOptimizer(params[:1], optim.SGD)
        with pytest.raises(TypeError, match="call step"):
            optimizer.update(params[0], {})
        with pytest.raises(TypeError, match=r"optimizer_class must make an optimizer.* got 5"):
            ZeroRedundancyOptimizer(params[:1], 5)
        with pytest.raises(ValueError, match="lr must be at least 0, got -1"):
            ZeroRedundancyOptimizer(params[:1], optim.SGD, lr=-1)
        with pytest.raises(ValueError, match=r"state has groups of \[2\] parameters"):
            optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})

    run_ranks(job, 2)


# Uneven inputs


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_ranks_without_inputs_go_on_updating_what_they_own(view, find_unused):
    """And are ready to go on in the next epoch: momenta are where they belong."""
    epochs = [(2, 5, 3), (4, 4, 4), (3, 0, 1)]

    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(make_model(), find_unused_parameters=find_unused)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, parameters_as_bucket_view=view, lr=0.01
        )
        loss = nn.CrossEntropyLoss()
        for epoch, counts in enumerate(epochs):
            with model.join(divide_by_initial_world_size=False, optimizer=optimizer):
                for step in range(counts[rank]):
                    x, y = (part[rank::3] for part in batch(10 * epoch + step))
                    optimizer.zero_grad()
                    loss(model(x), y)
                    model.backward(loss.backward())
                    optimizer.step()
        return parameters(model)

    model = make_model()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss()
    for epoch, counts in enumerate(epochs):
        for step in range(max(counts)):
            ranks = [rank for rank, count in enumerate(counts) if step < count]
            x, y = (
                np.concatenate([part[rank::3] for rank in ranks])
                for part in batch(10 * epoch + step)
            )
            optimizer.zero_grad()
            loss(model(x), y)
            model.backward(loss.backward())
            optimizer.step()
    results = run_ranks(job, 3)
    assert_close(results, parameters(model), 1e-12)
    for other in results[1:]:
        for path, value in results[0].items():
            np.testing.assert_array_equal(value, other[path])


def test_it_joins_as_its_own_joinable():
    def job():
        model = DistributedDataParallel(make_model())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
        with pytest.raises(RuntimeError, match="rank 1: begins step of ZeroRedundancyOptimizer"):
            run(model, optimizer)

    def run(model, optimizer):
        rank = dist.get_rank()
        with Join([model, optimizer]):
            if rank == 0:
                model(np.zeros((1, 6)))
                model.backward(np.zeros((1, 4)))
            else:
                optimizer.step()

    run_ranks(job, 2)
