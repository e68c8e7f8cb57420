"""A GPT over split sequences learns what it learns on one process, with tensor parallel beside."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import (
    DistributedDataParallel,
    VocabParallelCrossEntropyLoss,
    fully_shard,
    parallelize,
)
from parallel.context import context_parallel, split_sequence
from parallel.state import global_state
from tests.support.parallel.small_gpt import (
    GPT,
    assert_close,
    sequence_parallel_plan,
    tensor_parallel_plan,
    train,
)

METHODS = {
    "ring": {"method": "ring"},
    "ring in a row": {"method": "ring", "zigzag": False},
    "all_to_all": {"method": "all_to_all"},
}


@pytest.fixture(scope="module")
def alone():
    model = GPT()
    return train(model), model.state_dict()


def check(results, alone):
    losses, expected = alone
    for got, state in results:
        np.testing.assert_allclose(got, losses, rtol=0, atol=1e-9)
        assert_close(state, expected)


def part(mesh, options):
    zigzag = options == METHODS["ring"]
    return lambda x: split_sequence(x, mesh, zigzag=zigzag)


@pytest.mark.parametrize(
    ("n", "method", "sharded"),
    [
        (2, "ring", False),
        (2, "ring", True),
        (2, "ring in a row", False),
        (2, "all_to_all", False),
        (4, "ring", False),
        (4, "all_to_all", False),
    ],
)
def test_training_equals_one_process(n, method, sharded, alone):
    options = METHODS[method]

    def program():
        cp = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))["cp"]
        model = context_parallel(GPT(), cp, **options)
        wrapped = fully_shard(model, cp) if sharded else DistributedDataParallel(model, cp)
        losses = train(wrapped, part=part(cp, options))
        state = global_state(model)["model"]
        whole = {p: x.full_array() if hasattr(x, "full_array") else x for p, x in state.items()}
        return cp.all_reduce(np.array(losses), op=dist.ReduceOp.AVG), whole

    check(run_ranks(program, n), alone)


PLANS = {"sequence": sequence_parallel_plan, "tensor": tensor_parallel_plan}


@pytest.mark.parametrize(
    ("method", "plan"), [("ring", "sequence"), ("all_to_all", "sequence"), ("ring", "tensor")]
)
def test_with_tensor_parallel(method, plan, alone):
    options = METHODS[method]

    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        model = parallelize(GPT(), mesh["tp"], PLANS[plan]())
        context_parallel(model, mesh["cp"], **options)
        wrapped = DistributedDataParallel(model, mesh["cp"])
        loss = VocabParallelCrossEntropyLoss(mesh["tp"])
        losses = train(wrapped, loss, part(mesh["cp"], options))
        state = {
            path: x.full_array() if isinstance(x, dist.DArray) else x
            for path, x in global_state(model)["model"].items()
        }
        return mesh["cp"].all_reduce(np.array(losses), op=dist.ReduceOp.AVG), state

    check(run_ranks(program, 4), alone)


def test_with_data_and_tensor_parallel_on_eight_ranks(alone):
    def program():
        names = ("dp_shard", "cp", "tp")
        mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        model = parallelize(GPT(), mesh["tp"], sequence_parallel_plan())
        context_parallel(model, mesh["cp"])
        over = mesh["dp_shard", "cp"].flatten("dp_shard_cp")
        wrapped = fully_shard(model, over)
        row = mesh.get_local_rank("dp_shard")
        losses = train(
            wrapped,
            VocabParallelCrossEntropyLoss(mesh["tp"]),
            lambda x: split_sequence(x[row::2], mesh["cp"]),
        )
        state = {path: x.full_array() for path, x in global_state(model)["model"].items()}
        return over.all_reduce(np.array(losses), op=dist.ReduceOp.AVG), state

    check(run_ranks(program, 8), alone)


def test_heads_must_divide_by_both_dims():
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("cp", "tp"))
        model = parallelize(GPT(), mesh["tp"], tensor_parallel_plan())
        with pytest.raises(ValueError, match=r"1 kv_heads in 'blocks\.0\.attention', which do not"):
            context_parallel(model, mesh["cp"], method="all_to_all")

    run_ranks(program, 8)
