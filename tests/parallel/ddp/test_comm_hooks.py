"""Communication hooks: what they send, how exact it is, and that training still works."""

import pickle

import ml_dtypes
import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import run_ranks
from parallel import DistributedDataParallel, nn, optim
from parallel.averaging import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
)
from parallel.comm_hooks import (
    PostLocalSGDState,
    PowerSGDState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    post_localSGD_hook,
    powerSGD_hook,
)
from tests.support.parallel.training import assert_close, batch, make_model, parameters, train


def wrapped(hook, state=None, **options):
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0005, **options)
    model.register_comm_hook(model.process_group if state is None else state(), hook)
    return model


def set_gradient(model, value):
    """Run a backward pass in which the weight of a bias-free Linear gets the gradient ``value``."""
    weight = model.module.weight
    weight.grad = None
    model(np.eye(value.shape[1], dtype=value.dtype))
    model.backward(np.ascontiguousarray(value.T))
    return weight.grad


def linear(n, m, dtype="f8"):
    return nn.Linear(m, n, bias=False, rng=np.random.default_rng(0), dtype=dtype)


def gradient(rank, step=0, shape=(6, 5), dtype="f8"):
    return np.random.default_rng([rank, step]).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("hook", "bits"),
    [
        (fp16_compress_hook, 11),
        (bf16_compress_hook, 8),
        (fp16_compress_wrapper(allreduce_hook), 11),
        (bf16_compress_wrapper(allreduce_hook), 8),
    ],
)
def test_compression_rounds_each_gradient_once_and_the_average_once(hook, bits, view):
    def job():
        model = DistributedDataParallel(linear(6, 5), gradient_as_bucket_view=view)
        model.register_comm_hook(model.process_group, hook)
        grad = set_gradient(model, gradient(dist.get_rank()))
        assert grad.dtype == np.float64
        return grad.copy()

    first, second = run_ranks(job, 2)
    np.testing.assert_array_equal(first, second)
    narrow = np.float16 if bits == 11 else ml_dtypes.bfloat16
    halves = [gradient(rank).astype(narrow).astype("f4") for rank in range(2)]
    np.testing.assert_array_equal(first, ((halves[0] + halves[1]) / 2).astype(narrow).astype("f8"))


@pytest.mark.parametrize("hook", [fp16_compress_hook, bf16_compress_hook])
def test_training_with_compression_stays_near(hook):
    def job():
        return parameters(train(wrapped(hook), dist.get_rank(), 2, steps=10))

    results = run_ranks(job, 2)
    assert_close(results, parameters(train(make_model(), steps=10)), 0.05)
    for path, value in results[0].items():
        np.testing.assert_array_equal(value, results[1][path])


def test_bytes_on_the_wire_are_halved():
    def job():
        model = DistributedDataParallel(linear(6, 5, "f4"))
        model.register_comm_hook(model.process_group, fp16_compress_hook)
        set_gradient(model, gradient(0, dtype="f4"))
        records = call_queue_of(model.process_group).context.recorder.records(
            model.process_group.id
        )
        return [record.nbytes for record in records if record.kind == "all_reduce"]

    assert run_ranks(job, 2) == [[60], [60]]


@pytest.mark.parametrize("state", ["none", "group", "mesh"])
def test_the_ranks_of_a_stock_hook_may_be_left_out_or_be_a_mesh(state):
    def job():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = DistributedDataParallel(linear(6, 5), mesh["dp"])
        given = {"none": None, "group": model.process_group, "mesh": mesh["dp"]}[state]
        model.register_comm_hook(given, fp16_compress_hook)
        return float(set_gradient(model, np.full((6, 5), float(dist.get_rank())))[0, 0])

    # None is the wrapper's own group, not that of all ranks.
    assert run_ranks(job, 4) == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (powerSGD_hook, "the state of powerSGD_hook must be a PowerSGDState"),
        (post_localSGD_hook, "the state of post_localSGD_hook must be a PostLocalSGDState"),
        (allreduce_hook, "the hook's process_group must be a DeviceMesh or a ProcessGroup"),
    ],
)
def test_a_hook_with_another_state_says_so(hook, message):
    def job():
        with pytest.raises(TypeError, match=message):
            set_gradient(wrapped_linear(hook, "dp"), np.ones((6, 5)))

    def wrapped_linear(hook, state):
        model = DistributedDataParallel(linear(6, 5))
        model.register_comm_hook(state, hook)
        return model

    run_ranks(job, 1)


# PowerSGD


@pytest.mark.parametrize(
    "wrapper", [lambda hook: hook, fp16_compress_wrapper], ids=["plain", "fp16"]
)
def test_powersgd_of_full_rank_is_the_average(wrapper):
    def job():
        model = DistributedDataParallel(linear(6, 5))
        state = PowerSGDState(
            matrix_approximation_rank=5, start_powerSGD_iter=0, min_compression_rate=0.1
        )
        model.register_comm_hook(state, wrapper(powerSGD_hook))
        return set_gradient(model, gradient(dist.get_rank()))

    first, second = run_ranks(job, 2)
    np.testing.assert_array_equal(first, second)
    exact = (gradient(0) + gradient(1)) / 2
    tolerance = 1e-12 if wrapper is not fp16_compress_wrapper else 0.01
    np.testing.assert_allclose(first, exact, rtol=0, atol=tolerance)


def test_powersgd_feeds_back_what_it_left_out():
    """The values applied in all steps plus the kept error are the sum of all averages."""
    steps = 7

    def job():
        model = DistributedDataParallel(linear(20, 15))
        state = PowerSGDState(start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
        applied = []
        for step in range(steps):
            mine = gradient(dist.get_rank(), step, (20, 15))
            applied.append(set_gradient(model, mine).copy())
        kept = dist.all_reduce(state.state_dict()["errors"]["weight"], op=dist.ReduceOp.AVG)
        assert state.bytes_before == steps * 300 * 8
        assert state.bytes_sent == (2 * 300 + (steps - 2) * 35) * 8
        return applied, kept

    results = run_ranks(job, 3)
    applied, kept = results[0]
    averages = [sum(gradient(r, s, (20, 15)) for r in range(3)) / 3 for s in range(steps)]
    np.testing.assert_allclose(applied[1], averages[1], atol=1e-13)
    assert np.linalg.matrix_rank(applied[2]) == 1
    np.testing.assert_allclose(sum(applied) + kept, sum(averages), atol=1e-12)
    for other, _ in results[1:]:
        np.testing.assert_array_equal(applied, other)


@pytest.mark.parametrize("warm", [True, False])
def test_powersgd_resumes_exactly(warm):
    """The resumed run begins with other buckets; and each rank has errors of its own."""

    def made():
        state = PowerSGDState(
            matrix_approximation_rank=2,
            start_powerSGD_iter=2,
            min_compression_rate=1,
            warm_start=warm,
        )
        return state, wrapped(powerSGD_hook, lambda: state)

    def steps(model, first, last):
        loss = nn.CrossEntropyLoss()
        for step in range(first, last):
            x, y = (part[dist.get_rank() :: 2] for part in batch(step))
            model.zero_grad()
            loss(model(x), y)
            model.backward(loss.backward())
            for parameter in model.parameters():
                parameter.data -= 0.1 * parameter.grad

    def job():
        state, model = made()
        steps(model, 0, 5)
        saved = pickle.dumps((state.state_dict(), model.module.state_dict()))
        steps(model, 5, 8)
        hook, values = pickle.loads(saved)
        resumed, again = made()
        again.module.load_state_dict(values)
        resumed.load_state_dict(hook)
        steps(again, 5, 8)
        for path, value in parameters(model).items():
            np.testing.assert_array_equal(value, parameters(again)[path], path)
        whole, other = state.state_dict(), resumed.state_dict()
        assert whole.keys() == other.keys()
        for kind in ("errors", "factors"):
            assert whole[kind].keys() == other[kind].keys()
            for path, value in whole.pop(kind).items():
                np.testing.assert_array_equal(value, other[kind][path])
            other.pop(kind)
        assert whole == other
        return hook["errors"]

    first, second = run_ranks(job, 2)
    assert any((first[path] != second[path]).any() for path in first)


def test_powersgds_state_of_another_run_is_refused():
    def job():
        state = PowerSGDState(start_powerSGD_iter=0)
        with pytest.raises(ValueError, match="matrix_approximation_rank was 2 and is now 1"):
            state.load_state_dict(PowerSGDState(None, 2).state_dict())
        model = DistributedDataParallel(linear(20, 15))
        model.register_comm_hook(state, powerSGD_hook)
        other = {"errors": {"weight": np.zeros((20, 14))}, "factors": {}}
        state.load_state_dict(state.state_dict() | other)
        message = r"the error of weight has shape \[20, 14\]; expected \[20, 15\]"
        with pytest.raises(ValueError, match=message):
            set_gradient(model, gradient(0, 0, (20, 15)))

    run_ranks(job, 1)


def test_powersgds_warm_start_is_a_power_iteration():
    """The same gradient again and again: the best approximation of rank 1 is found."""

    def job(warm):
        model = DistributedDataParallel(linear(20, 15))
        state = PowerSGDState(
            start_powerSGD_iter=0, use_error_feedback=False, warm_start=warm, random_seed=3
        )
        model.register_comm_hook(state, powerSGD_hook)
        for _ in range(60):
            last = set_gradient(model, gradient(0, 0, (20, 15)))
        return last.copy()

    u, s, vt = np.linalg.svd(gradient(0, 0, (20, 15)))
    best = s[0] * np.outer(u[:, 0], vt[0])
    np.testing.assert_allclose(run_ranks(job, 2, True)[0], best, atol=1e-6)
    assert np.abs(run_ranks(job, 2, False)[0] - best).max() > 0.01


def test_powersgd_of_no_gradient():
    def job():
        model = DistributedDataParallel(linear(20, 15))
        model.register_comm_hook(PowerSGDState(start_powerSGD_iter=0), powerSGD_hook)
        return set_gradient(model, np.zeros((20, 15)))

    for grad in run_ranks(job, 2):
        np.testing.assert_array_equal(grad, np.zeros((20, 15)))


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_training_with_powersgd(backend):
    """Several buckets, biases beside matrices, and buckets that are rebuilt."""

    def job():
        model = wrapped(
            powerSGD_hook,
            lambda: PowerSGDState(
                matrix_approximation_rank=4, start_powerSGD_iter=3, min_compression_rate=1
            ),
            gradient_as_bucket_view=True,
        )
        train(model, dist.get_rank(), 2, steps=20)
        assert len(model.buckets) > 2
        return parameters(model)

    results = run_ranks(job, 2, backend=backend)
    for path, value in results[0].items():
        np.testing.assert_array_equal(value, results[1][path])
    assert_close(results, parameters(train(make_model(), steps=20)), 0.1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"matrix_approximation_rank": 0}, "matrix_approximation_rank must be at least 1, got 0"),
        ({"start_powerSGD_iter": -1}, "start_powerSGD_iter must be at least 0, got -1"),
        ({"min_compression_rate": 0}, "min_compression_rate must be positive, got 0"),
    ],
)
def test_powersgds_bad_options(options, text):
    def job():
        with pytest.raises(ValueError, match=text):
            PowerSGDState(**options)

    run_ranks(job, 1)


# Post-local SGD


def test_post_local_sgd_averages_all_then_the_subgroup():
    def job(inside):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        model = DistributedDataParallel(linear(6, 5), mesh["dp_replicate", "dp_shard"])
        state = PostLocalSGDState(mesh["dp_replicate", "dp_shard"], mesh["dp_shard"], 2, inside)
        model.register_comm_hook(state, post_localSGD_hook)
        return [set_gradient(model, gradient(dist.get_rank(), s)).copy() for s in range(3)]

    for inside in (True, False):
        results = run_ranks(job, 4, inside)
        for step in range(3):
            own = [gradient(rank, step) for rank in range(4)]
            for rank in range(4):
                pair = own[rank // 2 * 2 : rank // 2 * 2 + 2]
                late = sum(pair) / 2 if inside else own[rank]
                expected = sum(own) / 4 if step < 2 else late
                np.testing.assert_allclose(results[rank][step], expected, atol=1e-15)


def test_model_averaging_every_few_steps():
    def job():
        rank = dist.get_rank()
        weight = nn.Parameter(np.zeros(3))
        small = nn.Parameter(np.zeros((2, 1), "f4"))
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        optimizer = PostLocalSGDOptimizer(optim.SGD([weight, small], lr=1.0), averager)
        seen = []
        for step in range(6):
            weight.grad = np.full(3, -(rank + 1.0))
            small.grad = np.full((2, 1), rank, "f4")
            optimizer.step()
            optimizer.zero_grad()
            assert weight.grad is None
            seen.append(float(weight.data[0]))
            if step == 3:  # resume: the count goes on
                state = optimizer.state_dict()
                optimizer.averager = PeriodicModelAverager(period=2, warmup_steps=1)
                optimizer.load_state_dict(state)
        return seen, float(small.data[1, 0])

    # Steps 1, 3 and 5 average; the others drift apart by one.
    assert run_ranks(job, 2) == [([1, 3, 4, 6, 7, 9], -3.0), ([2, 3, 5, 6, 8, 9], -3.0)]


def test_hierarchical_model_averaging():
    def job():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        averager = HierarchicalModelAverager(
            {2: mesh["dp_shard"], 4: mesh["dp_replicate", "dp_shard"]}, warmup_steps=1
        )
        weight = nn.Parameter(np.array([10.0 ** dist.get_rank()]))
        seen = []
        for _ in range(6):
            averager.average_parameters([weight])
            seen.append(float(weight.data[0]))
            weight.data += dist.get_rank()
        return seen

    results = run_ranks(job, 4)
    own = np.array([1.0, 10.0, 100.0, 1000.0])
    for step in range(6):
        if step in (1, 5):
            own[:] = own.mean()
        elif step == 3:
            own = own.reshape(2, 2).mean(axis=1).repeat(2)
        np.testing.assert_allclose([seen[step] for seen in results], own, rtol=1e-14)
        own += np.arange(4)


def test_bad_hierarchies():
    def job():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for periods, text in (
            ({}, "period_group_dict is empty"),
            ({0: mesh}, "period must be at least 1, got 0"),
            ({4: mesh["a"], 2: mesh}, r"increasing periods, got \[4, 2\]"),
            ({2: mesh["a"], 4: mesh["b"]}, r"lacks ranks \[\d\] of"),
        ):
            with pytest.raises(ValueError, match=text):
                HierarchicalModelAverager(periods)

    run_ranks(job, 4)


def test_bad_numbers_for_local_sgd():
    def job():
        with pytest.raises(ValueError, match="period must be at least 1, got 0"):
            PeriodicModelAverager(0)
        with pytest.raises(ValueError, match="warmup_steps must be at least 0, got -1"):
            PeriodicModelAverager(1, -1)
        with pytest.raises(ValueError, match="start_localSGD_iter must be at least 0, got -1"):
            PostLocalSGDState(None, None, -1)

    run_ranks(job, 1)
