"""DistributedDataParallel: equality with one process, what is unused, hooks, bad input."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import RankError, run_ranks
from parallel import DistributedDataParallel, ZeroRedundancyOptimizer, nn, optim
from parallel._core.comm_hooks import noop_hook
from tests.support.parallel.training import assert_close, make_model, parameters, train


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_with_shares_equal_one_process_with_all(world, view, micro):
    def job():
        model = DistributedDataParallel(
            # Each rank begins elsewhere: construction must make them equal. A tiny cap makes
            # several buckets of this small model.
            make_model(seed=dist.get_rank()),
            gradient_as_bucket_view=view,
            bucket_cap_mb=0.0001,
        )
        train(model, dist.get_rank(), world, micro=micro)
        assert len(model.buckets) > 3
        return parameters(model)

    expected = parameters(train(make_model(), micro=micro))
    results = run_ranks(job, world)
    assert_close(results, expected, 1e-12)
    for path, value in results[0].items():
        for other in results[1:]:
            np.testing.assert_array_equal(value, other[path])


def test_float32_equality():
    def job():
        model = DistributedDataParallel(make_model(dtype="f4"))
        return parameters(train(model, dist.get_rank(), 2, dtype="f4"))

    assert_close(run_ranks(job, 2), parameters(train(make_model(dtype="f4"), dtype="f4")), 1e-5)


def test_equality_over_real_sockets():
    def job():
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.0001)
        return parameters(train(model, dist.get_rank(), 2, steps=10))

    expected = parameters(train(make_model(), steps=10))
    assert_close(run_ranks(job, 2, backend="tcp"), expected, 1e-12)


def test_the_group_may_be_a_mesh_dimension():
    def job():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = DistributedDataParallel(make_model(), mesh["dp"])
        train(model, mesh["dp"].get_local_rank(), 2, steps=5)
        return parameters(model)

    assert_close(run_ranks(job, 4), parameters(train(make_model(), steps=5)), 1e-12)


def test_accumulating_into_synchronised_gradients():
    """Without zero_grad a second step adds its average to the first one's."""

    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(nn.Linear(2, 1, bias=False, rng=np.random.default_rng(0)))
        for x in ([1.0, 2.0], [3.0, -1.0]):
            model(np.array([x], "f4") * (rank + 1))
            model.backward(np.ones((1, 1), "f4"))
        return model.module.weight.grad

    for grad in run_ranks(job, 2):
        np.testing.assert_allclose(grad, [[6.0, 1.5]])


# Unused parameters


class Heads(nn.Module):
    """Uses the heads that it is told to; ``body`` always."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.body = nn.Linear(2, 2, bias=False, rng=rng, dtype="f8")
        self.left = nn.Linear(2, 2, bias=False, rng=rng, dtype="f8")
        self.right = nn.Linear(2, 2, bias=False, rng=rng, dtype="f8")
        self.use = ("left", "right")

    def forward(self, x):
        y = self.body(x)
        return sum(getattr(self, name)(y) for name in self.use)

    def backward(self, grad):
        total = sum(getattr(self, name).backward(grad) for name in reversed(self.use))
        return self.body.backward(total)


def step_heads(model, use, x=1.0):
    model.module.use = use
    model(np.full((1, 2), x))
    model.backward(np.ones((1, 2)))


def test_unused_parameters_are_an_error_that_names_each():
    def job():
        step_heads(DistributedDataParallel(Heads()), ("left",))

    with pytest.raises(RankError, match=r"no gradient on rank \d.*: right\.weight\. Use them"):
        run_ranks(job, 2)


@pytest.mark.parametrize("view", [False, True])
def test_unused_parameters_differ_by_rank_and_step(view):
    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(
            Heads(), find_unused_parameters=True, gradient_as_bucket_view=view
        )
        heads = model.module
        seen = []
        for use in (("left",), ("left", "right")) if rank else (("left",), ("left",)):
            model.zero_grad()
            step_heads(model, use)
            seen.append([None if p.grad is None else p.grad.copy() for p in heads.parameters()])
        body = heads.body.weight.data
        return seen, np.ones((2, 1)) * (np.ones((1, 2)) @ body.T)

    for seen, one in run_ranks(job, 2):
        assert seen[0][2] is None  # used by nobody
        np.testing.assert_allclose(seen[0][1], one)
        np.testing.assert_allclose(seen[1][1], one)
        np.testing.assert_allclose(seen[1][2], one / 2)  # used by one of two ranks


def test_unused_in_the_last_microbatch_still_counts():
    def job():
        model = DistributedDataParallel(Heads(), find_unused_parameters=True)
        with model.no_sync():
            step_heads(model, ("left", "right"), x=dist.get_rank() + 1.0)
        step_heads(model, ("left",))
        return model.module.right.weight.grad, model.module.body.weight.data

    for grad, body in run_ranks(job, 2):
        np.testing.assert_allclose(grad, np.ones((2, 1)) * (np.full((1, 2), 1.5) @ body.T))


def test_static_graph_learns_what_is_unused_and_holds_to_it():
    def job():
        model = DistributedDataParallel(Heads(), static_graph=True)
        for _ in range(3):
            step_heads(model, ("left",))
        assert model.module.right.weight.grad is None
        step_heads(model, ("left", "right"))

    with pytest.raises(RankError, match=r"static_graph=True.*another on rank \d.*: right\.weight"):
        run_ranks(job, 2)


def test_a_part_of_the_forward_that_the_loss_ignores():
    class Ignoring(Heads):
        def backward(self, grad):
            return self.body.backward(self.left.backward(grad))

    def job():
        model = DistributedDataParallel(Ignoring(), find_unused_parameters=True)
        for _ in range(2):
            model.zero_grad()
            step_heads(model, ("left", "right"))
        assert model.module.right.outstanding == 0
        return model.module.right.weight.grad

    assert run_ranks(job, 2) == [None, None]


# Construction, buffers, hooks


def test_models_that_differ_are_refused_on_all_ranks_by_name():
    def job():
        rank, rng = dist.get_rank(), np.random.default_rng(0)
        model = nn.Sequential(
            nn.Linear(3, 3, rng=rng), nn.Linear(3, 5 if rank == 2 else 4, rng=rng)
        )
        with pytest.raises(ValueError, match="not the same on all ranks") as raised:
            DistributedDataParallel(model)
        return str(raised.value)

    texts = run_ranks(job, 3)
    assert len(set(texts)) == 1
    assert (
        "rank 2: has parameter 1.weight float32[5, 3] where rank 0 has parameter 1.weight "
        in (texts[0])
    )
    assert "rank 1" not in texts[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m[1].bias.__init__(m[1].bias.data, requires_grad=False), r"\(frozen\)"),
        (lambda m: m.map_arrays(lambda a: a.astype("f8")), r"float64\[3, 3\] where rank 0"),
        (lambda m: setattr(m[1], "bias", None), "rank 1: lacks parameter 1.bias"),
        (lambda m: setattr(m[1], "extra", nn.Buffer(np.zeros(1))), "buffer 1.extra"),
    ],
)
def test_every_kind_of_difference(change, text):
    def job():
        rng = np.random.default_rng(0)
        model = nn.Sequential(nn.Linear(3, 3, rng=rng), nn.Linear(3, 3, rng=rng))
        if dist.get_rank() == 1:
            change(model)
        with pytest.raises(ValueError, match=text):
            DistributedDataParallel(model)

    run_ranks(job, 2)


class Averaging(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.linear = nn.Linear(2, 2, rng=np.random.default_rng(0))
        self.mean = nn.Buffer(np.full(2, value))
        self.count = nn.Buffer(np.array(value, "i8"))

    def forward(self, x):
        return self.linear(x)

    def backward(self, grad):
        return self.linear.backward(grad)


@pytest.mark.parametrize("enabled", [True, False])
def test_buffers_follow_rank_0(enabled):
    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(Averaging(rank + 5.0), broadcast_buffers=enabled)
        inner = model.module
        seen = [float(inner.mean.data[0]), int(inner.count.data)]
        inner.mean.data[:] = rank
        model.eval()(np.ones((1, 2), "f4"))
        seen.append(float(inner.mean.data[0]))
        model.train()(np.ones((1, 2), "f4"))
        seen.append(float(inner.mean.data[0]))
        return seen

    assert run_ranks(job, 2) == [[5, 5, 0, 0], [5, 5, 1, 0 if enabled else 1]]


def test_a_hook_replaces_the_average():
    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False, rng=np.random.default_rng(0)))
        seen = []

        def halved(state, bucket):
            seen.append((state, bucket.is_last(), [p.shape for p in bucket.parameters()]))
            assert bucket.gradients()[0].shape == (1, 1)
            bucket.set_buffer(bucket.buffer() / 2)
            work = model.process_group.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda future: future.value() * 10)

        model.register_comm_hook("state", halved)
        with pytest.raises(RuntimeError, match="already"):
            model.register_comm_hook(None, halved)
        model(np.full((1, 1), rank + 1.0, "f4"))
        model.backward(np.ones((1, 1), "f4"))
        return seen, float(model.module.weight.grad[0, 0])

    assert run_ranks(job, 2) == [([("state", True, [(1, 1)])], 15.0)] * 2


def test_noop_hook_leaves_each_rank_its_own():
    def job():
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False, rng=np.random.default_rng(0)))
        model.register_comm_hook(None, noop_hook)
        model(np.full((1, 1), dist.get_rank(), "f4"))
        model.backward(np.ones((1, 1), "f4"))
        return float(model.module.weight.grad[0, 0])

    assert run_ranks(job, 2) == [0.0, 1.0]


def failed(hook):
    def job():
        model = DistributedDataParallel(nn.Linear(2, 2, rng=np.random.default_rng(0)))
        model.register_comm_hook(None, hook)
        x = np.ones((1, 2), "f4")
        model(x)
        with pytest.raises((ValueError, TypeError)) as raised:
            model.backward(x)
        model.discard_saved()
        model(x)
        with pytest.raises(RuntimeError, match="earlier backward pass failed"):
            model.backward(x)
        return str(raised.value)

    return run_ranks(job, 1)[0]


def test_hooks_that_return_nonsense_are_named():
    def short(_, bucket):
        bucket.set_buffer(np.zeros(6, "f4"))
        return noop_hook(None, bucket).then(lambda future: future.value()[:-1])

    assert "result for bucket 0: expected float32[6], got float32[5]" in failed(short)
    assert "must return a Future, got ndarray for bucket 0" in failed(lambda _, b: b.buffer())
    assert "set_buffer: expected float32[6], got float32[5]" in failed(
        lambda _, b: b.set_buffer(np.zeros(5, "f4"))
    )
    assert "set_buffer: expected float32[6], got list" in failed(lambda _, b: b.set_buffer([1]))

    def wide(_, bucket):
        bucket.set_buffer(np.zeros(6))
        return noop_hook(None, bucket)

    assert "result for bucket 0: expected float32[6], got float64[6]" in failed(wide)


def test_backward_needs_its_forward_and_no_other_outstanding():
    def job():
        model = DistributedDataParallel(nn.Linear(2, 2, rng=np.random.default_rng(0)))
        x = np.ones((1, 2), "f4")
        model(x)
        model(x)
        with pytest.raises(RuntimeError, match=r"1 other forward passes.*no_sync"):
            model.backward(x)
        with model.no_sync():
            model.backward(x)
        model.backward(x)
        with pytest.raises(RuntimeError, match="without a matching forward"):
            model.backward(x)

    run_ranks(job, 2)


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_options_that_differ_are_refused_on_all_ranks(option):
    def job():
        given = {option: dist.get_rank() == 1}
        with pytest.raises(
            ValueError, match=f"rank 1: has option {option}=True where rank 0 has .*=False"
        ):
            DistributedDataParallel(nn.Linear(2, 2, rng=np.random.default_rng(0)), **given)

    run_ranks(job, 3)


@pytest.mark.parametrize("bad", [0, 2])
def test_a_bad_argument_of_one_rank_is_named_on_all(bad):
    def job():
        def model():
            return nn.Linear(2, 2, rng=np.random.default_rng(0))

        for change, kind, text in [
            ({"module": 3}, TypeError, "module must be a parallel.nn.Module, got 3"),
            ({"module": nn.ReLU()}, RuntimeError, "the module has no parameter that requires"),
            ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb must be positive and finite, got 0"),
        ]:
            own = dist.get_rank() == bad
            with pytest.raises(kind) as error:
                DistributedDataParallel(**({"module": model()} | (change if own else {})))
            assert text in str(error.value)
            assert own or f"rank {bad} of" in str(error.value)
        for options in ({"optimizer_class": 5}, {"optimizer_class": optim.SGD, "lr": -1}):
            given = options if dist.get_rank() == bad else {"optimizer_class": optim.SGD}
            with pytest.raises((TypeError, ValueError), match=r"optimizer_class must|lr must"):
                ZeroRedundancyOptimizer(model().parameters(), **given)
        assert dist.all_reduce(np.ones(1))[0] == 3

    run_ranks(job, 3)


def test_bad_arguments():
    def job():
        model = nn.Linear(2, 2, rng=np.random.default_rng(0))
        with pytest.raises(ValueError, match="bucket_cap_mb must be positive and finite, got 0"):
            DistributedDataParallel(model, bucket_cap_mb=0)
        with pytest.raises(TypeError, match=r"bucket_cap_mb must be .*'25' of type str"):
            DistributedDataParallel(model, bucket_cap_mb="25")
        with pytest.raises(TypeError, match=r"mixed_precision must be a Mixed.* got 'float16'"):
            DistributedDataParallel(model, mixed_precision="float16")
        with pytest.raises(TypeError, match=r"process_group must be a DeviceMesh or .* got 'dp'"):
            DistributedDataParallel(model, "dp")
        with pytest.raises(RuntimeError, match="no parameter"):
            DistributedDataParallel(nn.ReLU())
        with pytest.raises(TypeError, match="hook must be callable, got NoneType"):
            DistributedDataParallel(model).register_comm_hook(None, None)

    run_ranks(job, 1)
