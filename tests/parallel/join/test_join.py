"""Uneven inputs: equality with one process, the context itself, and what cannot be done."""

from contextlib import nullcontext

import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import RankError, run_ranks
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
    fp16_compress_wrapper,
    noop_hook,
    post_localSGD_hook,
    powerSGD_hook,
)
from parallel.join import Join, Joinable, JoinHook
from tests.support.parallel.training import assert_close, make_model, parameters, share

STEPS = (20, 50, 33)  # of the three ranks
TINY = 0.0005  # MiB: several buckets


def expected_model(divide_by_all, steps=STEPS, micros=1, dtype="f8"):
    """One process: in each step the shares of the ranks that still have some."""
    model = make_model(dtype=dtype)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    for step in range(max(steps)):
        ranks = [rank for rank, count in enumerate(steps) if step < count]
        optimizer.zero_grad()
        for micro in range(micros):
            parts = [share(rank, step, micro, dtype) for rank in ranks]
            x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
            loss(model(x), y)
            weight = len(ranks) / len(steps) if divide_by_all else 1
            model.backward(loss.backward(weight / micros))
        optimizer.step()
    return parameters(model)


def train_share(model, optimizer, steps, micros=1, dtype="f8", after=None):
    loss = nn.CrossEntropyLoss()
    for step in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        for micro in range(micros):
            x, y = share(dist.get_rank(), step, micro, dtype)
            with nullcontext() if micro == micros - 1 else model.no_sync():
                loss(model(x), y)
                model.backward(loss.backward(1 / micros))
        if optimizer is not None:
            optimizer.step()
        if after is not None:
            after(step)


def uneven(divide_by_all=True, micros=1, dtype="f8", steps=STEPS, hook=None, **options):
    """Train on ``steps`` of inputs; return what each rank ends with."""

    def job():
        model = DistributedDataParallel(make_model(dtype=dtype), bucket_cap_mb=TINY, **options)
        if hook is not None:
            state, function = hook(model)
            model.register_comm_hook(state, function)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with model.join(divide_by_initial_world_size=divide_by_all):
            train_share(model, optimizer, steps[dist.get_rank()], micros, dtype)
        assert model.join_context is None
        return parameters(model)

    results = run_ranks(job, len(steps))
    for other in results[1:]:
        for path, value in results[0].items():
            np.testing.assert_array_equal(value, other[path])
    return results


@pytest.mark.parametrize("divide_by_all", [True, False])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("view", [False, True])
def test_uneven_inputs_equal_one_process(view, micros, divide_by_all):
    results = uneven(divide_by_all, micros, gradient_as_bucket_view=view)
    assert_close(results, expected_model(divide_by_all, micros=micros), 1e-12)


def test_uneven_inputs_in_float32():
    assert_close(uneven(False, dtype="f4"), expected_model(False, dtype="f4"), 1e-5)


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("steps", [STEPS, (0, 7, 3), (5, 0, 5), (0, 0, 0)])
def test_with_every_rule_about_unused_parameters_and_ranks_without_any_input(steps, options):
    results = uneven(steps=steps, **options)
    if max(steps):
        assert_close(results, expected_model(True, steps), 1e-12)


def test_with_custom_hooks():
    def summing(model):
        def hook(group, bucket):
            future = group.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: done.value() / group.size())

        return model.process_group, hook

    assert_close(uneven(hook=summing), expected_model(True), 1e-12)


def test_with_compressing_hooks_replicas_stay_equal():
    def power(model):
        state = PowerSGDState(
            matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
        )
        return state, powerSGD_hook

    uneven(hook=power)
    uneven(hook=lambda model: (model.process_group, fp16_compress_wrapper(allreduce_hook)))


@pytest.mark.parametrize("divide_by_all", [True, False])
@pytest.mark.parametrize("local", [True, False], ids=["post-local", "noop"])
def test_hooks_over_some_of_the_ranks_leave_out_those_without_inputs(local, divide_by_all):
    steps = (3, 1, 2, 1)  # of which ranks 0 and 1 average, and ranks 2 and 3

    def job():
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = DistributedDataParallel(
            nn.Linear(1, 1, bias=False, rng=np.random.default_rng(0), dtype="f8")
        )
        if local:
            state = PostLocalSGDState(None, pairs[rank // 2], start_localSGD_iter=0)
            model.register_comm_hook(state, post_localSGD_hook)
        else:
            model.register_comm_hook(None, noop_hook)
        seen = []
        with model.join(divide_by_initial_world_size=divide_by_all):
            for _ in range(steps[rank]):
                model.zero_grad()
                model(np.full((1, 1), rank + 1.0))
                model.backward(np.ones((1, 1)))
                seen.append(float(model.module.weight.grad[0, 0]))
        return seen

    if not local:
        expected = [[1.0] * 3, [2.0], [3.0] * 2, [4.0]]
    elif divide_by_all:
        expected = [[1.5, 0.5, 0.5], [1.5], [3.5, 1.5], [3.5]]
    else:
        expected = [[1.5, 1.0, 1.0], [1.5], [3.5, 3.0], [3.5]]
    assert run_ranks(job, 4) == expected


def test_over_a_mesh_dimension_and_real_sockets():
    def job():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        replica = mesh["dp"].get_local_rank()
        model = DistributedDataParallel(make_model(), mesh["dp"])
        with model.join():
            loss = nn.CrossEntropyLoss()
            for step in range((3, 5)[replica]):
                x, y = share(replica, step)
                model.zero_grad()
                loss(model(x), y)
                model.backward(loss.backward())
                for parameter in model.parameters():
                    parameter.data -= 0.1 * parameter.grad
                # Members of this group run out of inputs together.
                assert mesh["tp"].all_reduce(np.ones(1)) == 2
        return parameters(model)

    results = run_ranks(job, 4, backend="tcp")
    for other in results[1:]:
        for path, value in results[0].items():
            np.testing.assert_array_equal(value, other[path])


def test_an_optimizer_that_takes_over_the_state_goes_on_as_one_process():
    steps = (3, 6)

    def job():
        model = DistributedDataParallel(make_model())
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with model.join(divide_by_initial_world_size=False, optimizer=optimizer):
            train_share(model, optimizer, steps[dist.get_rank()])
        train_share(model, optimizer, 4)
        return parameters(model)

    assert_close(run_ranks(job, 2), one_process_two_epochs(steps, 4), 1e-12)


def one_process_two_epochs(steps, more):
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    epochs = [(step, steps) for step in range(max(steps))]
    epochs += [(step, (more,) * len(steps)) for step in range(more)]
    for step, counts in epochs:
        parts = [share(rank, step) for rank, count in enumerate(counts) if step < count]
        x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss(model(x), y)
        model.backward(loss.backward())
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("hierarchical", [False, True])
def test_parameters_are_averaged_over_the_ranks_with_inputs(hierarchical):
    def job():
        rank = dist.get_rank()
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = DistributedDataParallel(make_model())
        model.register_comm_hook(None, noop_hook)
        averager = (
            HierarchicalModelAverager({1: groups[rank // 2], 2: model.process_group})
            if hierarchical
            else PeriodicModelAverager(2)
        )
        optimizer = PostLocalSGDOptimizer(optim.SGD(model.parameters(), lr=0.0), averager)
        seen = []

        def after(_):
            flat = np.concatenate([p.data.reshape(-1) for p in model.parameters()])
            assert np.ptp(flat) == 0
            seen.append(float(flat[0]))
            for parameter in model.parameters():
                parameter.data[...] = rank + 1.0

        after_first = (1, 4, 3, 2)
        with model.join(optimizer=optimizer):
            for parameter in model.parameters():
                parameter.data[...] = rank + 1.0
            train_share(model, optimizer, after_first[rank], after=after)
        return seen, averager.step, float(model.module[0].bias.data[0])

    # All; then the near ranks (rank 1 alone, 2 and 3), or none; then 1 and 2; then 1.
    second = [2, 3.5, 3.5] if hierarchical else [2, 3, 4]
    expected = [
        [2.5],
        [2.5, second[0], 2.5, 2],
        [2.5, second[1], 2.5],
        [2.5, second[2]],
    ]
    assert run_ranks(job, 4) == [(seen, 4, 2.0) for seen in expected]


class Counting(nn.Module):
    """Counts its training forwards in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4, rng=np.random.default_rng(0), dtype="f8")
        self.count = nn.Buffer(np.zeros(1))

    def forward(self, x):
        self.count.data += 1
        return self.linear(x)

    def backward(self, grad):
        return self.linear.backward(grad)


def test_buffers_come_from_a_rank_that_has_inputs():
    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(Counting())
        with model.join():
            for step in range((2, 5, 4)[rank]):
                model(share(rank, step)[0])
                model.backward(np.ones((4, 4)))
        return float(model.module.count.data[0])

    assert run_ranks(job, 3) == [5, 5, 5]


# The context itself


def test_early_termination_is_raised_on_all_ranks():
    def job():
        model = DistributedDataParallel(make_model())
        with (
            pytest.raises(RuntimeError, match=r"ranks \[1\] of .* are out of inputs"),
            model.join(throw_on_early_termination=True),
        ):
            train_share(model, None, (9, 2, 9)[dist.get_rank()])
        with model.join(throw_on_early_termination=True):
            train_share(model, None, 2)

    run_ranks(job, 3)


def test_disabled_it_does_nothing():
    def job():
        model = DistributedDataParallel(make_model())
        before = call_queue_of(model.process_group).state.order.sequence
        with model.join(enable=False):
            assert model.join_context is None
        return call_queue_of(model.process_group).state.order.sequence - before

    assert run_ranks(job, 2) == [0, 0]


def test_what_it_costs():
    """One small all-reduce for each phase, and nothing in a step that does not synchronise."""

    def job():
        model = DistributedDataParallel(make_model())
        group = model.process_group
        loss = nn.CrossEntropyLoss()
        with model.join():
            before = call_queue_of(group).state.order.sequence
            with model.no_sync():
                loss(model(share(0, 0)[0]), share(0, 0)[1])
                model.backward(loss.backward())
            middle = call_queue_of(group).state.order.sequence
            loss(model(share(0, 0)[0]), share(0, 0)[1])
            model.backward(loss.backward())
            return middle - before, call_queue_of(group).state.order.sequence - middle

    # Without buffers: the announcement of the backward pass, and one bucket.
    assert run_ranks(job, 2) == [(0, 2), (0, 2)]


def test_an_error_in_the_loop_passes_through():
    def job():
        model = DistributedDataParallel(make_model())
        with pytest.raises(KeyError), model.join():
            raise KeyError("mine")
        with model.join():
            train_share(model, None, 1)

    run_ranks(job, 2)


class Ticker(Joinable):
    """A user's own joinable: one all-reduce a tick; out of inputs it adds a hundredth."""

    def __init__(self, group):
        self.group, self.total, self.ends = group, 0.0, []

    @property
    def join_process_group(self):
        return self.group

    def tick(self, value, phase=7):
        with Join.notify_join_context(self, phase):
            self.total = float(self.group.all_reduce(np.array(value)))
        return self.total

    def join_hook(self, **kwargs):
        ticker = self

        class Hook(JoinHook):
            def main_hook(self, phase):
                assert phase == 7
                ticker.group.all_reduce(np.array(kwargs["share"]))

            def post_hook(self, is_last_joiner, source):
                ticker.ends.append((is_last_joiner, source))

        return Hook()


def test_a_joinable_of_ones_own_beside_a_model():
    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(make_model())
        ticker = Ticker(model.process_group)
        with Join([model, ticker], share=0.01):
            for step in range((1, 2, 2)[rank]):
                model.zero_grad()
                model(share(rank, step)[0])
                model.backward(np.zeros((4, 4)))
                ticker.tick(1.0)
        return ticker.total, ticker.ends

    results = run_ranks(job, 3)
    assert results == [(3.0, [(False, 1)]), (2.01, [(True, 1)]), (2.01, [(True, 1)])]


def test_bad_contexts():
    def job():
        model = DistributedDataParallel(make_model())
        other = DistributedDataParallel(make_model(), dist.new_group([0]))
        with pytest.raises(ValueError, match="joinables is empty"):
            Join([])
        with pytest.raises(ValueError, match=r"joinables must share one group: Dist.*, Dist.* has"):
            Join([model, other])
        with model.join(), pytest.raises(ValueError, match="in another Join already"):
            model.join().__enter__()
        second = DistributedDataParallel(make_model())
        with model.join(), pytest.raises(RuntimeError, match="already has an observer"):
            second.join().__enter__()
        assert second.join_context is None

    run_ranks(job, 1)


def test_a_hook_that_fails_on_a_rank_without_inputs_is_seen():
    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(make_model())

        def hook(_, bucket):
            if rank == 0 and model.join_context.num_active == 1:
                raise ZeroDivisionError("in the hook")
            return noop_hook(None, bucket)

        model.register_comm_hook(None, hook)
        with model.join():
            train_share(model, None, 1 + rank)

    with pytest.raises(RankError, match="ZeroDivisionError: in the hook"):
        run_ranks(job, 2)
