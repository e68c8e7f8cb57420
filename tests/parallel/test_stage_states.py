"""The state of a model whose stages are on different ranks: one tree on all of them."""

import numpy as np
import pytest

import meshlib as dist
from meshlib._mesh.spec import MeshDimError
from meshlib.checkpoint import load, save
from meshlib.testing import RankError, run_ranks
from parallel import fully_shard, nn, optim
from parallel.nn._parameter import as_global
from parallel.pipeline import split
from parallel.stage_states import StageStates

PATHS = ["0.weight", "0.bias", "1.weight", "2.weight", "2.bias"]


def make_model(seed):
    rng = np.random.default_rng(seed)
    return nn.Sequential(
        nn.Linear(4, 6, rng=rng, dtype="f8"),
        nn.RMSNorm(6, dtype="f8"),
        nn.Linear(6, 3, rng=rng, dtype="f8"),
    )


def make_stage(mesh, cuts, seed):
    """Return this rank's stage, its optimizer after a step, and their states."""
    part = split(make_model(seed), cuts)[mesh["pp"].get_local_rank()]
    if "dp_shard" in mesh.mesh_dim_names:
        fully_shard(part, mesh["dp_shard"])
    optimizer = optim.AdamW(part.parameters(), lr=0.1)
    for parameter in part.parameters():
        parameter.grad = parameter.data * 0.5
    optimizer.step()
    return part, optimizer, StageStates(part, optimizer, mesh)


def whole(part, optimizer):
    """Return all arrays of a stage, whole, by path."""
    found = {}
    for path, p in part.named_parameters():
        arrays = {"": p.data} | {
            name: value for name, value in optimizer.state[p].items() if np.ndim(value)
        }
        for name, array in arrays.items():
            value = as_global(p, array)
            found[path, name] = value.full_array() if isinstance(value, dist.DArray) else value
    return found


def test_all_ranks_have_the_same_tree_and_parts_of_their_own_stage_alone():
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
        part, _, states = make_stage(mesh, ["2"], seed=0)
        state = states.state()
        own = {path for path, _ in part.named_parameters()}
        assert list(state["model"]) == list(state["optimizer"]) == PATHS
        for path, array in state["model"].items():
            assert (array.to_local() is not None) == (path in own)
            moments = state["optimizer"][path]
            assert moments["step"] == 1
            assert moments["exp_avg"].sharding == array.sharding
        shapes = {path: array.shape for path, array in state["model"].items()}
        assert shapes == {path: p.shape for path, p in make_model(0).named_parameters()}

    run_ranks(program, 4)


@pytest.mark.parametrize(
    ("shape", "names", "cuts"),
    [
        ((2, 2), ("pp", "dp_shard"), ["1"]),
        ((3,), ("pp",), ["1", "2"]),
        ((1, 2), ("pp", "dp_shard"), []),
        ((1,), ("pp",), []),
    ],
)
def test_a_checkpoint_loads_on_other_stages(shape, names, cuts, tmp_path):
    def saving():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
        part, optimizer, states = make_stage(mesh, ["2"], seed=0)
        save(tmp_path, states.state(), step=1)
        return whole(part, optimizer)

    def loading():
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        part, optimizer, states = make_stage(mesh, cuts, seed=1)
        states.restore(load(tmp_path, states.layout()))
        assert all(state["step"] == 1 for state in optimizer.state.values())
        return whole(part, optimizer)

    saved = {}
    for some in run_ranks(saving, 4):
        saved |= some
    assert len(saved) == 3 * len(PATHS)
    loaded = {}
    for some in run_ranks(loading, int(np.prod(shape))):
        for key, array in some.items():
            np.testing.assert_array_equal(array, saved[key], err_msg=str(key))
        loaded |= some
    assert loaded.keys() == saved.keys()


def test_restoring_a_state_without_moments_leaves_none():
    def program():
        mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        fresh = make_model(1)
        saved = StageStates(fresh, optim.AdamW(fresh.parameters()), mesh).state()
        part, optimizer, states = make_stage(mesh, [], seed=0)
        before = part.state_dict()["0.weight"].copy()
        with pytest.raises(KeyError, match="optimizer"):
            states.restore({"model": saved["model"]})
        np.testing.assert_array_equal(part.state_dict()["0.weight"], before)
        states.restore(saved)
        np.testing.assert_array_equal(part.state_dict()["0.weight"], fresh.state_dict()["0.weight"])
        return len(optimizer.state)

    assert run_ranks(program, 1) == [0]


def test_a_mesh_without_the_dim_is_named():
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = make_model(0)
        StageStates(model, optim.SGD(model.parameters(), lr=0.1), mesh)

    with pytest.raises(RankError, match="'pp'") as raised:
        run_ranks(program, 2)
    assert isinstance(raised.value.__cause__, MeshDimError)
