"""Fully sharded modules: parts, accumulation, frozen, shared and unused parameters."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import nn
from parallel.fsdp import FSDPModule, fully_shard
from tests.support.parallel.fsdp_training import (
    MODELS,
    Unembed,
    assert_equal,
    backward,
    expected_gradients,
    gradients,
    make_mlp,
    mlp_batch,
    on_mesh,
    shard,
    train,
    whole,
)


def test_each_rank_keeps_its_rows_and_nothing_else():
    def program(mesh):
        model = shard(make_mlp(), mesh)
        assert isinstance(model, FSDPModule)
        assert isinstance(model, nn.Sequential)
        assert type(model).__name__ == "FSDPSequential"
        before = dict(make_mlp().named_parameters())
        for path, p in model.named_parameters():
            whole = before[path].data
            assert p.global_part.sharding == dist.Sharding(mesh, dist.P("dp_shard"))
            mine = p.global_part.sharding.slices(whole.shape)
            np.testing.assert_array_equal(p.data, whole[mine])
            assert p.data.base is None  # a part of its own, not a view that keeps the whole
        return [p.data.shape[0] for p in model.parameters()]

    rows = on_mesh(program, 4)
    assert rows[0] == [5, 5, 5, 5, 5, 5, 1, 1]
    assert rows[3] == [2, 2, 2, 2, 3, 3, 0, 0]


def test_parameters_are_whole_only_while_their_module_computes():
    def program(mesh):
        seen = []

        class Spy(nn.Module):
            def forward(self, x):
                seen.append([p.data.shape[0] for p in model.parameters()])
                return x

            def backward(self, grad):
                seen.append([p.data.shape[0] for p in model.parameters()])
                return grad

        rng = np.random.default_rng(0)
        layers = [nn.Linear(4, 4, rng=rng, bias=False) for _ in range(3)]
        model = nn.Sequential(layers[0], nn.Sequential(layers[1], Spy()), layers[2])
        for layer in model:
            fully_shard(layer, mesh, reshard_after_forward=True)
        fully_shard(model, mesh)
        x = np.ones((2, 4), np.float32)
        model.backward(model(x))
        return seen

    for seen in on_mesh(program, 2):
        assert seen == [[2, 4, 2], [2, 4, 2]]


@pytest.mark.parametrize("names", [("dp_shard",), ("dp_replicate", "dp_shard")])
@pytest.mark.parametrize("how", ["no_sync", "flag", "sharded", "no_all_reduce", "kept whole"])
def test_accumulation(how, names):
    """With whole gradients, with parts, with parts that are averaged over the replicas once."""

    def program(mesh):
        model = shard(make_mlp(), mesh)
        rank, world = dist.get_rank(), dist.get_world_size()

        def one(micro):
            backward(model, rank, world, micro, scale=1 / 3)

        for micro in range(2):
            if how == "no_sync":
                with model.no_sync():
                    one(micro)
                assert all(p.grad is None for p in model.parameters())
                continue
            if how == "flag":
                model.set_requires_gradient_sync(False)
            elif how == "no_all_reduce":
                model.set_requires_all_reduce(False)
            elif how == "kept whole":
                model.set_reshard_after_backward(False)
            one(micro)
            if how == "sharded":
                assert all(p.grad.shape == p.data.shape for p in model.parameters())
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        model.set_reshard_after_backward(True)
        one(2)
        assert all(p.grad.shape == p.data.shape for p in model.parameters())
        return gradients(model)

    shape = (2, 2) if len(names) == 2 else None
    for got in on_mesh(program, 4, names, shape):
        assert_equal(got, expected_gradients(3))


def test_a_setting_for_this_module_alone():
    def program(mesh):
        inner = fully_shard(nn.Linear(4, 4, rng=np.random.default_rng(0)), mesh)
        outer = nn.Linear(4, 4, rng=np.random.default_rng(1))
        model = fully_shard(nn.Sequential(inner, outer), mesh)
        model.set_requires_gradient_sync(False, recurse=False)
        model.backward(model(np.ones((2, 4), np.float32)))
        return inner.weight.grad is None, outer.weight.grad is None

    assert on_mesh(program, 2) == [(False, True)] * 2


def test_zero_grad_forgets_gradients_that_were_not_reduced():
    def program(mesh):
        model = shard(make_mlp(), mesh)
        with model.no_sync():
            backward(model, dist.get_rank(), 2, micro=9)
        model.zero_grad()
        backward(model, dist.get_rank(), 2)
        return gradients(model)

    for got in on_mesh(program, 2):
        assert_equal(got, expected_gradients())


def test_several_forward_passes_at_once():
    """As a pipeline has them: all but the last backward do not reduce."""

    def program(mesh):
        model = shard(make_mlp(), mesh)
        losses = []
        for micro in range(2):
            losses.append(nn.CrossEntropyLoss())
            x, y = mlp_batch(0, dist.get_rank(), 2, micro)
            losses[-1](model(x), y)
        grad = losses[1].backward(1 / 2)
        with pytest.raises(RuntimeError, match="1 other forward passes still wait"):
            model.backward(grad)
        with model.no_sync():
            model.backward(grad)
        model.backward(losses[0].backward(1 / 2))
        return gradients(model)

    for got in on_mesh(program, 2):
        assert_equal(got, expected_gradients(2))


def test_a_forward_that_was_not_meant_for_training():
    def program(mesh):
        model = shard(make_mlp(), mesh)
        model(mlp_batch(0)[0])
        model.discard_saved()
        model.eval()(mlp_batch(0)[0])
        assert not any(p.global_part.lent for p in model.parameters())
        model.train()
        backward(model, dist.get_rank(), 2)
        return gradients(model)

    for got in on_mesh(program, 2):
        assert_equal(got, expected_gradients())


def test_after_an_error_of_all_ranks_training_goes_on():
    def program(mesh):
        model = shard(make_mlp(), mesh)
        for _ in range(2):
            with pytest.raises(ValueError, match="Linear expects an input"):
                model(np.ones((2, 7)))
            x, _ = mlp_batch(0, dist.get_rank(), 2)
            model(x)
            with pytest.raises(ValueError, match="must have its shape and dtype"):
                model.backward(np.ones((3, 9)))
        backward(model, dist.get_rank(), 2)
        return gradients(model)

    for got in on_mesh(program, 2):
        assert_equal(got, expected_gradients())


def test_frozen_parameters_are_gathered_and_not_reduced():
    def program(mesh):
        model = make_mlp()
        model[0].requires_grad_(False)
        shard(model, mesh)
        backward(model, dist.get_rank(), 2)
        assert all(p.grad is None for p in model[0].parameters())
        model[0].requires_grad_(True)
        model[1].requires_grad_(False)
        model.zero_grad()
        backward(model, dist.get_rank(), 2)
        assert all(p.grad is None for p in model[1].parameters())
        model[1].requires_grad_(True)
        model.zero_grad()
        backward(model, dist.get_rank(), 2)
        return gradients(model)

    for got in on_mesh(program, 2):
        assert_equal(got, expected_gradients())


@pytest.mark.parametrize("first", ["embedding", "last"])
def test_a_parameter_that_two_sharded_modules_share(first):
    make, batches = MODELS["transformer"]
    expected = make()
    train(expected, batches)

    def program(mesh):
        model = make()
        order = list(model) if first == "embedding" else list(reversed(list(model)))
        for layer in order:
            fully_shard(layer, mesh)
        fully_shard(model, mesh)
        assert isinstance(model[-1], Unembed)
        assert model[-1].weight is model[0].weight
        train(model, batches, dist.get_rank(), 2)
        return whole(model.state_dict())

    for got in on_mesh(program, 2):
        assert_equal(got, expected.state_dict())


def test_a_parameter_that_is_not_used_has_no_gradient_or_zeros():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            rng = np.random.default_rng(0)
            self.used = nn.Linear(3, 4, rng=rng, dtype="f8")
            self.unused = nn.Linear(3, 4, rng=rng, dtype="f8")
            self.group = nn.Linear(3, 4, rng=rng, dtype="f8")

        def forward(self, x):
            self.group(x)  # what it gives is used by nobody
            return self.used(x)

        def backward(self, grad):
            return self.used.backward(grad)

    def program(mesh):
        model = Sometimes()
        fully_shard(model.group, mesh)
        fully_shard(model, mesh)
        for _ in range(2):
            model.zero_grad()
            model(np.ones((2, 3)))
            model.backward(np.ones((2, 4)))
        assert model.used.weight.grad.any()
        assert not model.unused.weight.grad.any()
        assert all(p.grad is None for p in model.group.parameters())

    on_mesh(program, 2)


def test_ignored_parameters_stay_whole_and_are_not_reduced():
    def program(mesh):
        model = make_mlp()
        ignored = [model[0][0].weight, model[3].bias]
        for layer in (model[0], model[1]):
            fully_shard(layer, mesh, ignored_params=ignored)
        fully_shard(model, mesh, ignored_params=ignored)
        backward(model, dist.get_rank(), 2)
        own = make_mlp()
        backward(own, dist.get_rank(), 2)
        for path, p in model.named_parameters():
            assert (p.global_part is None) == (p in ignored)
            if p in ignored:
                np.testing.assert_array_equal(p.grad, dict(own.named_parameters())[path].grad)
        return gradients(model)

    ignored = {"0.0.weight", "3.bias"}
    for got in on_mesh(program, 2):
        expected = expected_gradients()
        assert_equal(
            {path: value for path, value in got.items() if path not in ignored},
            {path: value for path, value in expected.items() if path not in ignored},
        )


def test_inside_of_a_meshs_block_the_mesh_may_be_left_out():
    def rank():
        model, x = nn.Linear(4, 4, rng=np.random.default_rng(0)), np.ones((2, 4), np.float32)
        expected = model(x)
        with pytest.raises(ValueError, match="inside a `with mesh:` block"):
            fully_shard(model)
        with dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)) as mesh:
            fully_shard(model)
        assert model.weight.data.shape == (2, 4)
        assert model.weight.global_part.sharding.mesh == mesh
        np.testing.assert_array_equal(model(x), expected)

    run_ranks(rank, 2)


@pytest.mark.parametrize("dtype", ["float64", "int64", "float16"])
@pytest.mark.parametrize("own", ["float32", "float64"])
def test_a_sharded_layer_takes_and_refuses_the_input_that_it_did_before(own, dtype):
    def answer(layer):
        try:
            y = layer(np.ones((2, 4), dtype))
        except TypeError as error:
            return str(error).replace("FSDP", "")
        layer.backward(np.ones_like(y))
        return y.dtype, layer.weight.grad.dtype

    def rank():
        mesh = dist.init_device_mesh("cpu", (2,))
        plain, sharded = (nn.Linear(4, 4, rng=np.random.default_rng(0), dtype=own) for _ in "ab")
        assert answer(fully_shard(sharded, mesh)) == answer(plain)

    run_ranks(rank, 2)
