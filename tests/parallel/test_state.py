"""States of tensor-parallel models as global arrays: saved on one mesh, gone on with on another."""

import numpy as np
import pytest

import meshlib as dist
from meshlib import extend
from meshlib.checkpoint import Checkpointer, load, save
from meshlib.checkpoint._pieces import ChunkWrite
from meshlib.testing import run_ranks
from parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    ZeroRedundancyOptimizer,
    nn,
    optim,
    parallelize,
)
from parallel.fsdp import fully_shard
from parallel.state import global_layout, global_state, restore

STEPS = 8
BATCH = 8


def train(folder, shape, begin, end, zero=False):
    """Train steps ``begin`` to ``end`` on a (dp, tp) mesh, and save; return the mean losses."""
    mesh = dist.DeviceMesh.from_shape("cpu", shape, mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    rng = np.random.default_rng(0)
    wide = nn.Linear(5, 8, rng=rng, dtype="f8")
    narrow = nn.Linear(8, 3, rng=rng, dtype="f8")
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize(nn.Sequential(wide, nn.Tanh(), narrow), tp, plan)
    ddp = DistributedDataParallel(model, dp)
    optimizer = (
        ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, dp, lr=0.05)
        if zero
        else optim.AdamW(model.parameters(), lr=0.05)
    )
    loss = nn.CrossEntropyLoss()
    with Checkpointer(folder, sync=False) as checkpoints:
        if begin:
            restore(checkpoints.load(global_layout(model, optimizer)), model, optimizer)
        losses = []
        for step in range(begin, end):
            data = np.random.default_rng(step)
            x, y = data.normal(size=(BATCH, 5)), data.integers(0, 3, BATCH)
            own = slice(dp.get_local_rank(), None, dp.size())
            optimizer.zero_grad()
            losses.append(loss(ddp(x[own]), y[own]))
            ddp.backward(loss.backward())
            optimizer.step()
        checkpoints.save(global_state(model, optimizer), step=end)
    return dp.all_reduce(np.array(losses), op=dist.ReduceOp.AVG)


@pytest.mark.parametrize(
    ("before", "after"), [((4, 1), (2, 2)), ((1, 4), (2, 1)), ((1, 2), (2, 4))]
)
def test_a_run_goes_on_on_another_mesh(tmp_path, before, after):
    (uncut, *_) = run_ranks(train, before[0] * before[1], tmp_path / "uncut", before, 0, STEPS)
    (cut, *_) = run_ranks(train, before[0] * before[1], tmp_path / "cut", before, 0, 3)
    resumed = run_ranks(train, after[0] * after[1], tmp_path / "cut", after, 3, STEPS)
    for losses in resumed:
        np.testing.assert_allclose([*cut, *losses], uncut, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("before", "after", "zero"),
    [
        ((4, 1), (2, 2), (True, True)),
        ((2, 2), (8, 1), (True, True)),
        ((2, 4), (1, 1), (True, False)),
        ((1, 2), (4, 1), (False, True)),
    ],
)
def test_states_that_each_owner_keeps_go_on_elsewhere(tmp_path, before, after, zero):
    def run(folder, shape, *args):
        return run_ranks(train, shape[0] * shape[1], tmp_path / folder, shape, *args)

    (uncut, *_) = run("uncut", (1, 1), 0, STEPS)
    (cut, *_) = run("cut", before, 0, 3, zero[0])
    for losses in run("cut", after, 3, STEPS, zero[1]):
        np.testing.assert_allclose([*cut, *losses], uncut, rtol=0, atol=1e-9)
    whole, alone = load(tmp_path / "cut"), load(tmp_path / "uncut")
    states = [(whole["optimizer"]["state"][n], alone["optimizer"]["state"][n]) for n in range(4)]
    for got, expected in [(whole["model"], alone["model"]), *states]:
        assert got.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=1e-9)


def test_no_array_moves_where_owners_keep_states(tmp_path):
    def program():
        mesh = dist.DeviceMesh.from_shape("cpu", (2,), mesh_dim_names=("dp",))
        rng = np.random.default_rng(0)
        model = nn.Sequential(*(nn.Linear(300, 300, rng=rng) for _ in range(2)))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, mesh, lr=0.05)
        model.backward(model(np.ones((2, 300), "f4")))
        optimizer.step()
        most = []

        def observe(group, header, device, run):
            most.append(header.elements)
            return run

        with extend.observe(mesh.process_group, observe):
            state = global_state(model, optimizer)
            save(tmp_path, state, step=1, sync=False)
            again = load(tmp_path, global_layout(model, optimizer))
            restore(again, model, optimizer)
        here = [
            x.to_local() is not None
            for values in state["optimizer"]["state"].values()
            for x in values.values()
            if isinstance(x, dist.DArray)
        ]
        return max(most), sum(here), len(here)

    for most, here, all_of_them in run_ranks(program, 2):
        assert most < 90_000  # elements of a weight
        assert (here, all_of_them) == (4, 8)


def test_what_is_no_model_and_another_optimizers_state():
    model = nn.Sequential(nn.Linear(3, 2, rng=np.random.default_rng(0)))
    adam, sgd = optim.AdamW(model.parameters()), optim.SGD(model.parameters(), momentum=0.5)
    for call in (global_state, global_layout, lambda *given: restore({}, *given)):
        with pytest.raises(TypeError, match="model must be a Module, got 3 of type int"):
            call(3)
        with pytest.raises(TypeError, match="optimizer must be an Optimizer, such as"):
            call(model, 3)
    with pytest.raises(KeyError, match=r"state lacks \['optimizer'\]"):
        restore(global_state(model), model, adam)
    saved = global_state(model, adam)
    before = model.state_dict()["0.weight"].copy()
    saved["model"] = {path: value + 1 for path, value in saved["model"].items()}
    with pytest.raises(ValueError, match=r"'eps', 'lr'.*but no \['momentum', .*state of a SGD"):
        restore(saved, model, sgd)
    np.testing.assert_array_equal(model.state_dict()["0.weight"], before)


def test_the_arrays_are_those_of_the_whole_layers():
    def program():
        mesh = dist.DeviceMesh.from_shape("cpu", (2,), mesh_dim_names=("tp",))
        layer = nn.Linear(4, 2, rng=np.random.default_rng(0))
        parallelize(layer, mesh, {"": ColwiseParallel()})
        return {path: x.full_array() for path, x in global_state(layer)["model"].items()}

    whole = nn.Linear(4, 2, rng=np.random.default_rng(0))
    for state in run_ranks(program, 2):
        np.testing.assert_array_equal(state["weight"], whole.weight.data)
        np.testing.assert_array_equal(state["bias"], whole.bias.data)


def test_parts_of_fully_shard_load_on_another_number_of_ranks(tmp_path):
    def program(begin):
        mesh = dist.DeviceMesh.from_shape("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        rng = np.random.default_rng(0)
        model = fully_shard(nn.Sequential(nn.Linear(5, 7, rng=rng, dtype="f8")), mesh)
        optimizer, loss = optim.AdamW(model.parameters(), lr=0.05), nn.CrossEntropyLoss()
        with Checkpointer(tmp_path, sync=False) as checkpoints:
            if begin:
                restore(checkpoints.load(global_layout(model, optimizer)), model, optimizer)
            for step in range(begin, begin + 2):
                data = np.random.default_rng(step)  # the same on all ranks
                optimizer.zero_grad()
                loss(model(data.normal(size=(4, 5))), data.integers(0, 7, 4))
                model.backward(loss.backward())
                optimizer.step()
            if not begin or dist.get_world_size() == 1:
                checkpoints.save(global_state(model, optimizer), step=begin + 2)
            return {path: x.full_array() for path, x in model.state_dict().items()}

    run_ranks(program, 3, 0)
    two, one = run_ranks(program, 2, 2), run_ranks(program, 1, 2)
    for path, array in one[0].items():
        np.testing.assert_allclose(two[0][path], array, rtol=0, atol=1e-12)


def test_a_parameter_that_all_tp_ranks_have_is_written_once(tmp_path, monkeypatch):
    written = []
    write = ChunkWrite.write

    def noted(self, *args):
        written.append((self.array, self.index))
        return write(self, *args)

    monkeypatch.setattr(ChunkWrite, "write", noted)

    def program():
        names = ("dp_shard", "tp")
        mesh = dist.DeviceMesh.from_shape("cpu", (2, 2), mesh_dim_names=names)
        rng, tp = np.random.default_rng(0), mesh["tp"]
        wide, narrow = nn.Linear(6, 12, rng=rng), nn.Linear(12, 6, rng=rng)
        model = nn.Sequential(nn.LayerNorm(6), wide, narrow)
        parallelize(model, tp, {"1": ColwiseParallel(), "2": RowwiseParallel()})
        # The LayerNorm lies on dp_shard alone, with nothing said of tp.
        fully_shard(model, mesh["dp_shard"])
        optimizer = optim.AdamW(model.parameters(), lr=0.05)
        x = np.random.default_rng(dist.get_rank() // 2).normal(size=(4, 6)).astype("f4")
        model.backward(model(x))
        optimizer.step()
        state = global_state(model, optimizer)
        assert state["model"]["0.weight"].mesh == mesh["dp_shard"]
        save(tmp_path, state, step=1, sync=False)
        again = load(tmp_path, global_layout(model, optimizer))
        restore(again, model, optimizer)
        return {path: value.full_array() for path, value in model.state_dict().items()}

    (kept, *others) = run_ranks(program, 4)
    assert len(set(written)) == len(written) == len(list(tmp_path.rglob("c.*")))
    whole = load(tmp_path)["model"]
    assert whole.keys() == kept.keys()
    for path, array in kept.items():
        np.testing.assert_array_equal(whole[path], array)
        for other in others:
            np.testing.assert_array_equal(other[path], array)
