"""The arguments that fully_shard refuses, and its error messages."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import nn
from parallel.fsdp import MixedPrecisionPolicy, fully_shard
from tests.support.parallel.fsdp_training import (
    make_mlp,
    mlp_batch,
    on_mesh,
    shard,
)


def raised(function):
    try:
        function()
    except (TypeError, ValueError) as error:
        return error
    return None


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (
            {"module": 3},
            TypeError,
            "rank 1: module must be a parallel.nn.Module, got 3 of type int",
        ),
        (
            {"mesh": "dp"},
            TypeError,
            "mesh must be a DeviceMesh, such as mesh['dp_shard'], got 'dp'",
        ),
        ({"mesh": (1, 1, 2)}, ValueError, "has 3 dims; expected one to shard over, or two"),
        ({"reshard_after_forward": 3}, ValueError, "rank 1: reshard_after_forward is 3; expected"),
        ({"reshard_after_forward": 0}, ValueError, "rank 1: reshard_after_forward is 0; expected"),
        ({"reshard_after_forward": 1.5}, TypeError, "rank 1: reshard_after_forward"),
        ({"ignored_params": ["w"]}, TypeError, "rank 1: ignored_params[0] must be a Parameter"),
        ({"mp_policy": "float16"}, TypeError, "rank 1: mp_policy must be a MixedPrecisionPolicy"),
    ],
)
def test_bad_arguments(change, kind, text):
    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        arguments = {"module": make_mlp(), "mesh": mesh} | change
        if isinstance(arguments["mesh"], tuple):
            arguments["mesh"] = dist.init_device_mesh("cpu", arguments["mesh"])
        return raised(lambda: fully_shard(**arguments))

    error = run_ranks(program, 2)[1]
    assert type(error) is kind
    assert text in str(error)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"module": 3}, TypeError, "module must be a parallel.nn.Module, got 3 of type int"),
        ({"reshard_after_forward": 3}, ValueError, "reshard_after_forward is 3; expected"),
        ({"mp_policy": "float16"}, TypeError, "mp_policy must be a MixedPrecisionPolicy"),
    ],
)
def test_a_bad_argument_of_one_rank_is_named_on_all(bad, change, kind, text):
    def program(mesh):
        arguments = {"module": make_mlp(), "mesh": mesh}
        if dist.get_rank() == bad:
            arguments |= change
        error = raised(lambda: fully_shard(**arguments))
        assert type(error) is kind
        assert f"rank {bad}: {text}" in str(error)
        return mesh.all_reduce(np.ones(1))[0]

    assert on_mesh(program, 2) == [2.0, 2.0]


def test_a_module_that_was_sharded_before_and_numbers():
    def program(mesh):
        model = fully_shard(make_mlp(), mesh)
        with pytest.raises(ValueError, match="module FSDPSequential is fully sharded already"):
            fully_shard(model, mesh)
        scalar = nn.LayerNorm(3)
        scalar.weight = nn.Parameter(np.float32(1) * np.ones(()))
        with pytest.raises(ValueError, match=r"rank \d: parameter weight is a single number"):
            fully_shard(scalar, mesh)
        with pytest.raises(TypeError, match=r"modules\[0\] must be an? FSDPModule"):
            model.set_modules_to_forward_prefetch([nn.ReLU()])
        with pytest.raises(ValueError, match="param_dtype must be floating"):
            MixedPrecisionPolicy("int32")

    on_mesh(program, 2)


def test_models_that_differ_are_named_on_every_rank():
    def program(mesh):
        rng = np.random.default_rng(0)
        model = nn.Linear(4, 4 + dist.get_rank(), rng=rng)
        return str(raised(lambda: fully_shard(model, mesh)))

    for text in on_mesh(program, 2):
        assert (
            "rank 1: has parameter weight float32[5, 4] where rank 0 has parameter weight" in text
        )


def test_a_part_that_ran_before_its_root():
    def program(mesh):
        model = shard(make_mlp(), mesh)
        model[0](mlp_batch(0)[0])
        with pytest.raises(
            RuntimeError, match="ran a forward pass by itself before FSDPSequential"
        ):
            model(mlp_batch(0)[0])

    on_mesh(program, 2)
