"""States of sharded modules and their optimizers."""

import numpy as np

import meshlib as dist
from parallel import optim
from parallel.fsdp import fully_shard
from tests.support.parallel.fsdp_training import (
    MODELS,
    assert_equal,
    backward,
    expected_gradients,
    gradients,
    make_mlp,
    make_transformer,
    mlp_batch,
    on_mesh,
    shard,
    train,
    whole,
)


def test_states_are_global_arrays_that_load_on_another_mesh():
    make, batches = MODELS["transformer"]
    uncut = make()
    optimizer = optim.AdamW(uncut.parameters(), lr=0.01)
    train(uncut, batches, optimizer=optimizer, steps=4)

    def first(mesh):
        model = shard(make(), mesh)
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        train(model, batches, dist.get_rank(), 4, steps=2, optimizer=optimizer)
        model_state, state = model.state_dict(), optimizer.state_dict()
        assert all(isinstance(value, dist.DArray) for value in model_state.values())
        assert isinstance(state["state"][0]["exp_avg"], dist.DArray)
        state["state"] = {n: whole_of(values) for n, values in state["state"].items()}
        return whole(model_state), state

    saved, state = on_mesh(first, 4)[0]

    def second(mesh):
        model = shard(make_transformer(tp=mesh["tp"]), mesh["dp_shard"])
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        model.load_state_dict(saved)
        optimizer.load_state_dict(state)

        def rest(step, rank, world):
            return batches(step + 2, rank, world)

        train(model, rest, mesh.get_local_rank("dp_shard"), 2, steps=2, optimizer=optimizer)
        return whole(model.state_dict())

    expected = uncut.state_dict()
    for got in on_mesh(second, 4, ("dp_shard", "tp"), (2, 2)):
        assert_equal(got, expected)


def whole_of(values):
    return {
        name: value.full_array() if isinstance(value, dist.DArray) else value
        for name, value in values.items()
    }


def test_states_load_from_global_arrays_in_another_sharding():
    def program(mesh):
        model = shard(make_mlp(), mesh)
        other = {
            path: value.redistribute(dist.P(None, "dp_shard") if value.ndim == 2 else dist.P())
            for path, value in make_sharded(mesh, seed=5).state_dict().items()
        }
        model.unshard()  # and what was gathered before does not stay
        model.load_state_dict(other)
        x, _ = mlp_batch(0)
        return model(x)

    expected = make_mlp(seed=5)(mlp_batch(0)[0])
    for got in on_mesh(program, 2):
        np.testing.assert_allclose(got, expected, atol=1e-12)


def make_sharded(mesh, seed):
    return shard(make_mlp(seed=seed), mesh)


def test_replicas_begin_as_the_first():
    def program(mesh):
        model = shard(make_mlp(seed=dist.get_rank() // 2), mesh)
        return whole(model.state_dict())

    for got in on_mesh(program, 4, ("dp_replicate", "dp_shard"), (2, 2)):
        assert_equal(got, make_mlp(seed=0).state_dict(), 0)


def test_unshard_and_reshard_by_hand():
    def program(mesh):
        model = fully_shard(make_mlp(), mesh)
        model.unshard(async_op=True)
        model.unshard()
        assert [p.data.shape for p in model.parameters()] == [
            p.shape for p in make_mlp().parameters()
        ]
        model.reshard()
        model.reshard()
        assert not any(p.global_part.lent for p in model.parameters())
        model.unshard(async_op=True)
        model.reshard()
        backward(model, dist.get_rank(), 2)
        return gradients(model)

    for got in on_mesh(program, 2):
        assert_equal(got, expected_gradients())
