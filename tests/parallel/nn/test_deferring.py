"""Backward in two halves gives the gradients of backward in one."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import ColwiseParallel, RowwiseParallel, fully_shard, nn, parallelize
from parallel.nn._module import do_all


def make_model(dtype="f8"):
    rng = np.random.default_rng(0)
    options = {"rng": rng, "dtype": dtype}
    return nn.Sequential(
        nn.Embedding(7, 6, **options),
        nn.Linear(6, 8, **options),
        nn.LayerNorm(8, dtype=dtype),
        nn.ComputeIn(nn.Sequential(nn.Linear(8, 8, **options), nn.Tanh()), "f4"),
        nn.Linear(8, 3, False, **options),
    )


def grads(model):
    return {path: p.grad.copy() for path, p in model.named_parameters()}


def test_halves_are_the_whole_bit_for_bit():
    x, grad = np.arange(6), np.random.default_rng(1).normal(size=(6, 3))
    whole, halves = make_model(), make_model()
    whole(x)
    whole.backward(grad)
    halves(x)
    with halves.deferring() as later:
        halves.backward(grad)
    assert [p.grad for p in halves.parameters()] == [None] * 8
    assert len(later) == 5
    assert [p.uses for p in halves.parameters()] == [1] * 8
    do_all(later)
    expected = grads(whole)
    for path, got in grads(halves).items():
        np.testing.assert_array_equal(got, expected[path], err_msg=path)
    halves(x)
    halves.backward(grad)  # at once again
    np.testing.assert_array_equal(halves[1].weight.grad, 2 * whole[1].weight.grad)


def test_several_passes_and_halves_in_another_order():
    model, expected = make_model(), make_model()
    rng = np.random.default_rng(1)
    inputs = [(rng.integers(0, 7, 4), rng.normal(size=(4, 3))) for _ in range(3)]
    for x, grad in inputs:
        expected(x)
        expected.backward(grad)
    contexts = []
    for x, _ in inputs:
        model(x)
        contexts.append(model.take_saved())
    works = []
    for (_, grad), context in zip(inputs, contexts, strict=True):
        model.put_saved(context)
        with model.deferring() as later:
            model.backward(grad)
        works.append(later)
    for later in reversed(works):
        do_all(later)
    for path, got in grads(model).items():
        np.testing.assert_allclose(
            got, grads(expected)[path], atol=1e-6 if path[0] == "3" else 1e-14
        )


def test_the_input_gradient_is_the_same_and_hooks_fire_in_the_second_half():
    model = nn.Sequential(*list(make_model())[1:])
    fired = []
    for path, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, path=path: fired.append(path))
    x, grad = np.ones((2, 6)), np.ones((2, 3))
    model(x)
    expected = model.backward(grad)
    count = len(fired)
    model(x)
    with model.deferring() as later:
        got = model.backward(grad)
    np.testing.assert_array_equal(got, expected)
    assert len(fired) == count
    do_all(later)
    assert fired[count:] == fired[:count]


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel()])
def test_of_split_layers(style):
    def job():
        model = nn.Sequential(nn.Linear(4, 4, rng=np.random.default_rng(0), dtype="f8"))
        parallelize(model, None, {"0": style})
        x = np.ones((3, model[0].in_features))
        y = model(x)
        expected = model.backward(y)
        once = grads(model)
        model.zero_grad()
        model(x)
        with model.deferring() as later:
            np.testing.assert_array_equal(model.backward(y), expected)
        assert model[0].weight.grad is None
        do_all(later)
        for path, got in grads(model).items():
            np.testing.assert_array_equal(got, once[path])

    run_ranks(job, 2)


@pytest.mark.parametrize("reshard", [True, False])
def test_of_fully_sharded_modules(reshard):
    def job():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x, grad = np.arange(6), np.random.default_rng(1).normal(size=(6, 3))
        results = []
        for halves in (False, True):
            model = make_model()
            for layer in model:
                fully_shard(layer, mesh["dp"], reshard_after_forward=reshard)
            fully_shard(model, mesh["dp"])
            for last in (False, True):
                model(x)
                model.set_requires_gradient_sync(last and not halves)
                if halves:
                    with model.deferring() as later:
                        model.backward(grad)
                    assert all(p.grad is None for p in model.parameters())
                    model.set_requires_gradient_sync(last)
                    do_all(later)
                else:
                    model.backward(grad)
            results.append(grads(model))
        once, twice = results
        for path, got in twice.items():
            np.testing.assert_array_equal(got, once[path], err_msg=path)

    run_ranks(job, 2)
