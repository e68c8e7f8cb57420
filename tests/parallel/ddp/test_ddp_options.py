"""DistributedDataParallel's further options: precision, freezing, stepping in backward, logs."""

import logging

import ml_dtypes
import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import run_ranks
from parallel import DistributedDataParallel, MixedPrecision, nn, optim
from parallel._core.passes import Stopwatch
from parallel.comm_hooks import allreduce_hook, noop_hook
from tests.support.parallel.training import assert_close, batch, make_model, parameters, train

TINY = 0.0005  # MiB: several buckets


def step(model, rank, world, number=0, dtype="f8"):
    x, y = (part[rank::world] for part in batch(number, dtype))
    loss = nn.CrossEntropyLoss()
    loss(model(x), y)
    model.backward(loss.backward())


def equal_everywhere(results):
    for other in results[1:]:
        for path, value in results[0].items():
            np.testing.assert_array_equal(value, other[path])


# Mixed precision


@pytest.mark.parametrize("view", [False, True])
def test_computing_in_float32_while_training_in_float64(view):
    """Masters and gradients stay in float64; the result is near the one of float64."""

    def job():
        model = DistributedDataParallel(
            make_model(),
            bucket_cap_mb=TINY,
            gradient_as_bucket_view=view,
            mixed_precision=MixedPrecision(param_dtype="float32"),
        )
        seen = []
        forward = model.module[0].forward
        model.module[0].forward = lambda x: (
            (seen.append((x.dtype, model.module[0].weight.data)),) and forward(x)
        )
        output = model(batch(0)[0])
        model.discard_saved()
        assert output.dtype == np.float64
        ((inside, weight),) = seen
        assert inside == weight.dtype == np.float32
        train(model, dist.get_rank(), 2, steps=10)
        for parameter in model.parameters():
            assert parameter.data.dtype == parameter.grad.dtype == np.float64
        return parameters(model)

    results = run_ranks(job, 2)
    equal_everywhere(results)
    expected = parameters(train(make_model(), steps=10))
    assert_close(results, expected, 1e-4)
    assert any((results[0][path] != value).any() for path, value in expected.items())


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_training_in_16_bits(dtype):
    def job():
        model = DistributedDataParallel(
            make_model(dtype="f4"),
            mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype),
        )
        return parameters(train(model, dist.get_rank(), 2, steps=5, dtype="f4"))

    results = run_ranks(job, 2)
    equal_everywhere(results)
    assert_close(results, parameters(train(make_model(dtype="f4"), steps=5, dtype="f4")), 0.1)


def test_a_part_may_compute_in_another_dtype():
    def job():
        rng = np.random.default_rng(0)
        norm, seen = nn.LayerNorm(8), []
        inner = norm.forward
        norm.forward = lambda x: (seen.append((x.dtype, norm.weight.data.dtype)),) and inner(x)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(6, 8, rng=rng), nn.ComputeIn(norm, "float32")),
            mixed_precision=MixedPrecision(param_dtype="float16"),
        )
        model(batch(0, "f4")[0])
        model.backward(np.ones((12, 8), "f4"))
        assert seen == [(np.float32, np.float32)]
        assert {p.grad.dtype for p in model.parameters()} == {np.dtype("f4")}

    run_ranks(job, 1)


def test_compute_in_by_itself():
    """The gradient is that of the function in lower precision; integers pass untouched."""
    rng = np.random.default_rng(0)
    embedding = nn.ComputeIn(nn.Embedding(5, 3, rng=rng, dtype="f8"), "float32")
    layer = nn.ComputeIn(nn.Linear(3, 2, rng=rng, dtype="f8"), "float32")
    tokens = np.array([[0, 4, 4]])
    x = embedding(tokens)
    y = layer(x)
    assert x.dtype == y.dtype == np.float64
    weight, bias = (p.data.astype("f4") for p in layer.parameters())
    np.testing.assert_array_equal(y, (x.astype("f4") @ weight.T + bias).astype("f8"))
    grad = layer.backward(np.ones_like(y))
    embedding.backward(grad)
    assert grad.dtype == np.float64
    table = embedding.module.weight
    assert table.grad.dtype == table.data.dtype == np.float64
    np.testing.assert_array_equal(table.grad[4], 2 * grad[0, 1])
    with pytest.raises(RuntimeError, match="without a matching forward"):
        layer.backward(np.ones_like(y))


def test_bad_dtypes():
    with pytest.raises(ValueError, match="param_dtype must be floating, got int32"):
        MixedPrecision(param_dtype="int32")
    with pytest.raises(ValueError, match="reduce_dtype must be floating, got bool"):
        MixedPrecision(reduce_dtype=bool)
    with pytest.raises(ValueError, match="dtype must be floating, got int8"):
        nn.ComputeIn(nn.ReLU(), "int8")


def test_reduce_dtype_wraps_the_users_hook():
    def job():
        model = DistributedDataParallel(
            make_model(), mixed_precision=MixedPrecision(reduce_dtype="float32")
        )
        seen = []

        def hook(group, bucket):
            seen.append(bucket.buffer().dtype)
            return allreduce_hook(group, bucket)

        model.register_comm_hook(model.process_group, hook)
        step(model, dist.get_rank(), 2)
        assert {p.grad.dtype for p in model.parameters()} == {np.dtype("f8")}
        return set(seen)

    assert run_ranks(job, 2) == [{np.dtype("f4")}] * 2


# Freezing


def test_frozen_and_unfrozen_later():
    """Each phase equals one process that freezes the same."""
    phases = [(), ("0.weight", "0.bias", "3.weight"), ("0.weight",), (), ("5.bias",)]

    def run(model, rank, world):
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        buckets = []
        for number, frozen in enumerate(phases * 2):
            for path, parameter in inner.named_parameters():
                parameter.requires_grad = path not in frozen
            for i in range(2):
                optimizer.zero_grad()
                step(model, rank, world, 10 * number + i)
                optimizer.step()
                for path, parameter in inner.named_parameters():
                    assert (parameter.grad is None) == (path in frozen), path
            if inner is not model:
                buckets.append({path for bucket in model.buckets for path in bucket})
        for seen, frozen in zip(buckets, phases * 2, strict=False):
            assert seen == {path for path, _ in inner.named_parameters()} - set(frozen)
        return parameters(model)

    for view in (False, True):

        def job(view=view):
            made = make_model()
            made[0].weight.requires_grad = False  # at construction, too
            model = DistributedDataParallel(made, bucket_cap_mb=TINY, gradient_as_bucket_view=view)
            return run(model, dist.get_rank(), 2)

        assert_close(run_ranks(job, 2), run(make_model(), 0, 1), 1e-12)


def test_all_frozen():
    def job():
        model = DistributedDataParallel(make_model())
        model.requires_grad_(False)
        step(model, dist.get_rank(), 2)
        assert model.buckets == []
        model.requires_grad_()
        step(model, dist.get_rank(), 2)
        return parameters(model)

    run_ranks(job, 2)


def test_freezing_other_parameters_on_other_ranks_is_an_error_that_names_them():
    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(make_model())
        step(model, rank, 3)
        model.module[0].weight.requires_grad = False
        model.module[5].bias.requires_grad = rank == 0
        with pytest.raises(ValueError, match="not the same on all ranks") as raised:
            step(model, rank, 3)
        return str(raised.value)

    for text in run_ranks(job, 3):
        assert "rank 1: has 5.bias (frozen) where rank 0 has 5.bias" in text
        assert "rank 2: has 5.bias (frozen)" in text


# After a failure


def test_after_a_failure_it_says_what_to_do_and_that_helps():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4, rng=np.random.default_rng(0), dtype="f8")
            self.fails = False

        def forward(self, x):
            return self.layer(x)

        def backward(self, grad):
            grad = self.layer.backward(grad)
            if self.fails:
                raise FloatingPointError("overflow")
            return grad

    def job():
        rank = dist.get_rank()
        module = Failing()
        model = DistributedDataParallel(module)
        step(model, rank, 2)
        module.fails = True
        with pytest.raises(FloatingPointError) as raised:
            step(model, rank, 2)
        (note,) = raised.value.__notes__
        assert "ended here before its gradients were reduced" in note
        module.fails = False
        with pytest.raises(RuntimeError, match="earlier backward pass failed") as raised:
            step(model, rank, 2)
        text = str(raised.value)
        assert "FloatingPointError: overflow" in text
        for advice in ("make a new group", "wrap the module in a new Distributed", "checkpoint"):
            assert advice in note
            assert advice in text
        # Do as it says.
        module.zero_grad()
        model = DistributedDataParallel(module, dist.new_group([0, 1]))
        step(model, rank, 2)
        return module.layer.weight.grad

    first, second = run_ranks(job, 2)
    np.testing.assert_array_equal(first, second)
    reference = nn.Sequential(nn.Linear(6, 4, rng=np.random.default_rng(0), dtype="f8"))
    step(reference, 0, 1)
    np.testing.assert_allclose(first, reference[0].weight.grad, atol=1e-14)


# Statistics and log


def test_statistics():
    def job():
        model = DistributedDataParallel(make_model(), bucket_cap_mb=TINY)
        assert model.statistics is None
        with model.no_sync():
            step(model, 0, 1)
        assert model.statistics is None
        step(model, 0, 1)
        seen = model.statistics
        assert seen.forward > 0
        assert seen.backward > 0
        assert seen.communication > 0
        assert 0 <= seen.exposed <= seen.communication
        assert seen.hidden == 1 - seen.exposed / seen.communication
        model.register_comm_hook(None, noop_hook)
        step(model, 0, 1)
        assert model.statistics is not seen
        assert model.statistics.communication < 0.05

    run_ranks(job, 2)


def test_the_stopwatch_adds_up_what_was_under_way(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("parallel._core.passes.time.perf_counter", lambda: now[0])
    watch = Stopwatch()
    watch.add_forward(-1.0)
    watch.add_forward(-0.5)
    watch.begin()
    futures = [dist.Future() for _ in range(4)]
    for launch, future in zip((1, 2, 6, 7), futures, strict=True):
        now[0] = launch
        watch.watch(future)
    watch.add_backward(1.0)
    for landing, future in zip((3, 4, 8, 11), futures, strict=True):
        now[0] = landing
        future.set_result(None)
    # Under way from 1 to 4 and from 6 to 11; the backward pass ends at 7.
    seen = watch.finish()
    assert (seen.forward, seen.backward) == (1.5, 6.0)
    assert (seen.communication, seen.exposed) == (8.0, 4.0)
    assert seen.hidden == 0.5
    assert watch.finish().forward == 0


def test_the_construction_log(caplog):
    def job():
        DistributedDataParallel(make_model(), bucket_cap_mb=TINY, static_graph=True)

    with caplog.at_level(logging.INFO, "meshlib"):
        run_ranks(job, 2)
    lines = [(r.rank, r.getMessage()) for r in caplog.records if "DistributedData" in r.message]
    assert sorted(rank for rank, _ in lines) == [0, 1]
    text = lines[0][1]
    assert "8 parameters, 0.0 MiB of gradients in" in text
    assert "bucket_cap_mb=0.0005" in text
    assert "static_graph=True" in text


# Memory


@pytest.mark.parametrize("view", [False, True])
def test_buckets_are_in_symmetric_memory(view):
    """As often as they are made: at construction, and when they are rebuilt."""

    def job():
        model = DistributedDataParallel(
            make_model(), bucket_cap_mb=TINY, gradient_as_bucket_view=view
        )
        group = model.process_group

        def allocated():
            return [
                r.nbytes
                for r in call_queue_of(group).context.recorder.records(group.id)
                if r.kind == "allocate"
            ]

        total = sum(p.data.nbytes for p in model.parameters())
        assert sum(allocated()) == total
        train(model, dist.get_rank(), 2, steps=10)
        assert sum(allocated()) == 2 * total
        return parameters(model)

    results = run_ranks(job, 2, backend="shm")
    assert_close(results, parameters(train(make_model(), steps=10)), 1e-12)


# Meshes


def test_two_mesh_dimensions_are_one_group():
    def job():
        mesh = dist.init_device_mesh(
            "cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp")
        )
        both = mesh["dp_replicate", "dp_shard"]
        model = DistributedDataParallel(make_model(), both, bucket_cap_mb=TINY)
        assert model.process_group is both.process_group
        assert model.process_group.size() == 4
        return parameters(train(model, both.process_group.rank(), 4, steps=10))

    assert_close(run_ranks(job, 8), parameters(train(make_model(), steps=10)), 1e-12)
