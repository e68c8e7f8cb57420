"""A step besides training: outputs, losses, evaluation, order, one synchronisation."""

import time

import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import run_ranks
from parallel import nn
from parallel.pipeline import (
    ActionKind,
    PipelineSchedule,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleTable,
    ScheduleZBVZeroBubble,
    get_schedule_class,
    most_held,
)
from tests.support.parallel.pipeline_training import BATCH, ddp, fsdp, make_layers, make_mesh, part


def of_two(module=None, kind=Schedule1F1B, microbatches=4, loss=None):
    """Return this rank's schedule of a pipeline of two stages of the usual layers."""
    rank = dist.get_rank()
    stage = PipelineStage(module or part(make_layers(), rank, 2)[1], rank, 2)
    return kind(stage, microbatches, loss)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(BATCH, 6)), rng.integers(0, 4, BATCH)


def test_outputs_and_losses_come_where_the_last_stage_is():
    x, y = batch()
    whole = nn.Sequential(*make_layers())
    expected = whole(x)

    def job():
        schedule = of_two(loss=nn.CrossEntropyLoss())
        losses = [1.0, 2.0]
        output = schedule.step(x, target=y, losses=losses)
        assert schedule.step(x, target=y, return_outputs=False) is None
        return output, losses

    (none, no_losses), (output, losses) = run_ranks(job, 2)
    assert none is None
    assert no_losses == []
    np.testing.assert_allclose(output, expected, atol=1e-14)
    for i, loss in enumerate(losses):
        rows = slice(4 * i, 4 * i + 4)
        assert loss == pytest.approx(nn.CrossEntropyLoss()(expected[rows], y[rows]), abs=1e-13)


@pytest.mark.parametrize("kind", [ScheduleGPipe, ScheduleZBVZeroBubble])
def test_eval_runs_forward_alone(kind):
    x, y = batch()
    whole = nn.Sequential(*make_layers())
    expected = whole(x)

    def job():
        rank = dist.get_rank()
        indices = [rank, 3 - rank] if kind is ScheduleZBVZeroBubble else [rank]
        total = 2 * len(indices)
        parts = [part(make_layers(), i, total)[1] for i in indices]
        stages = [PipelineStage(p, i, total) for i, p in zip(indices, parts, strict=True)]
        schedule = kind(stages, 4, nn.CrossEntropyLoss())
        losses = []
        output = schedule.eval(x, target=y, losses=losses)
        assert all(p.training and not p.outstanding for one in parts for p in one.modules())
        assert all(p.grad is None for one in parts for p in one.parameters())
        forwards = [span.action.kind for span in schedule.timeline().spans]
        assert forwards == [ActionKind.FORWARD] * 4 * total
        schedule.step(x, target=y)
        return output, losses, all(p.grad is not None for one in parts for p in one.parameters())

    results = run_ranks(job, 2)
    output, losses, _ = results[0 if kind is ScheduleZBVZeroBubble else 1]
    np.testing.assert_allclose(output, expected, atol=1e-14)
    assert np.mean(losses) == pytest.approx(nn.CrossEntropyLoss()(expected, y))
    assert all(trained for *_, trained in results)


def test_without_a_loss_step_runs_forward_alone():
    def job():
        module = part(make_layers(), dist.get_rank(), 2)[1]
        output = of_two(module).step(batch()[0])
        assert not any(m.outstanding for m in module.modules())
        return output

    expected = nn.Sequential(*make_layers())(batch()[0])
    np.testing.assert_allclose(run_ranks(job, 2)[1], expected, atol=1e-14)


class Residual(nn.Module):
    """Takes and returns two arrays and integers; its second output has no gradient in backward."""

    def __init__(self, last):
        super().__init__()
        self.weight = nn.Parameter(np.full(3, 2.0))
        self.last = last

    def forward(self, x, skip, ids, scale=1.0):
        assert ids.dtype == np.int32
        self.save_for_backward((x, scale))
        y = x * self.weight.data * scale
        return y + skip if self.last else (y, skip, ids)

    def backward(self, *grads):
        x, scale = self.saved()
        grad = grads[0]
        self.weight.accumulate_grad((grad * x * scale).sum(axis=0))
        if self.last:
            return grad * self.weight.data * scale, None, None
        skip, ids = grads[1:]
        assert ids is None
        np.testing.assert_array_equal(skip, 0)
        return grad * self.weight.data * scale, skip, None


class Sum(nn.Module):
    def forward(self, output, target):
        self.save_for_backward(output.shape)
        return float((output * target["weight"]).sum())

    def backward(self, grad):
        return np.full(self.saved(), grad)


def test_stages_may_pass_on_several_arrays():
    x, ids = np.arange(24.0).reshape(8, 3), np.arange(8, dtype=np.int32)

    def job():
        module = Residual(last=dist.get_rank() == 1)
        schedule = PipelineSchedule(
            PipelineStage(module, dist.get_rank(), 2),
            ScheduleGPipe.make_table(2, 4, 1),
            Sum(),
            scale_grads=False,
        )
        weight = {"weight": np.ones((8, 3))}
        output = schedule.step(x, -x, ids, target=weight, scale=0.5)
        return output, module.weight.grad

    (_, first), (output, second) = run_ranks(job, 2)
    np.testing.assert_array_equal(output, x - x)
    np.testing.assert_array_equal(first, (0.5 * x).sum(axis=0))
    np.testing.assert_array_equal(second, (0.5 * x).sum(axis=0))


def test_gradients_are_added_to_what_there_is_and_scaled_if_wanted():
    x, y = batch()

    def job():
        module = part(make_layers(), dist.get_rank(), 2)[1]
        schedule = of_two(module, loss=nn.CrossEntropyLoss())
        schedule.step(x, target=y)
        once = [p.grad.copy() for p in module.parameters()]
        schedule.step(x, target=y)
        for p, grad in zip(module.parameters(), once, strict=True):
            np.testing.assert_allclose(p.grad, 2 * grad, atol=1e-14)
        table, stage = schedule.table, PipelineStage(module, dist.get_rank(), 2)
        unscaled = PipelineSchedule(stage, table, nn.CrossEntropyLoss(), scale_grads=False)
        module.zero_grad()
        unscaled.step(x, target=y)
        for p, grad in zip(module.parameters(), once, strict=True):
            np.testing.assert_allclose(p.grad, 4 * grad, atol=1e-14)

    run_ranks(job, 2)


@pytest.mark.parametrize("wrap", [ddp, fsdp])
@pytest.mark.parametrize("kind", [ScheduleGPipe, ScheduleInterleavedZeroBubble])
def test_gradients_are_reduced_once_a_step(wrap, kind):
    x, y = batch()

    def job():
        mesh = make_mesh(2, 2)
        rank = mesh["pp"].get_local_rank()
        module = wrap(part(make_layers(), rank, 2)[1], mesh)
        schedule = kind(PipelineStage(module, rank, 2, mesh["pp"]), 4, nn.CrossEntropyLoss())
        schedule.step(x, target=y)
        group = mesh["dp"].process_group
        before = len(call_queue_of(group).context.recorder.records(group.id))
        schedule.step(x, target=y)
        kinds = [r.kind for r in call_queue_of(group).context.recorder.records(group.id)][before:]
        model = module.module if wrap is ddp else module
        return kinds, sum(any(True for _ in layer.parameters()) for layer in model)

    for kinds, groups in run_ranks(job, 4):
        if wrap is ddp:
            assert kinds.count("all_reduce") == 1  # all gradients are one bucket
        else:
            assert kinds.count("reduce_scatter") == groups


def test_the_timeline_has_every_action_in_its_order():
    def job():
        schedule = of_two(loss=nn.CrossEntropyLoss())
        x, y = batch()
        schedule.step(x, target=y)
        return schedule.timeline(), schedule.pipeline_order

    (timeline, order), (again, _) = run_ranks(job, 2)
    assert timeline == again
    ends = {span.action: span.end for span in timeline.spans}
    for rank in (0, 1):
        assert [s.action for s in timeline.spans if s.rank == rank] == order[rank]
    for span in timeline.spans:
        for need in ScheduleGPipe.make_table(2, 4, 1).needs(span.action):
            assert ends[need] <= span.begin
    assert 0 < timeline.bubble < 1


def test_classes_by_name():
    assert get_schedule_class("1f1b") is Schedule1F1B
    assert get_schedule_class("ScheduleGPipe") is ScheduleGPipe
    with pytest.raises(ValueError, match=r"'2F2B'; expected one of GPipe, 1F1B, Eager1F1B, Interl"):
        get_schedule_class("2F2B")
    with pytest.raises(TypeError, match="schedule_name"):
        get_schedule_class(3)


def test_a_users_own_table_from_a_file(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("0F0,0F1,,0B1,0B0\n1F0,1F1,1I1,1B0,1W1\n")
    x, y = batch()

    def job():
        module = part(make_layers(), dist.get_rank(), 2)[1]
        stage = PipelineStage(module, dist.get_rank(), 2)
        PipelineSchedule(stage, ScheduleTable.from_csv(file), nn.CrossEntropyLoss()).step(
            x, target=y
        )
        return [p.grad for p in module.parameters()]

    whole = nn.Sequential(*make_layers())
    loss = nn.CrossEntropyLoss()
    loss(whole(x), y)
    whole.backward(loss.backward())
    grads = [grad for rank in run_ranks(job, 2) for grad in rank]
    for got, parameter in zip(grads, whole.parameters(), strict=True):
        np.testing.assert_allclose(got, parameter.grad, atol=1e-13)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "InterleavedZeroBubble"])
def test_no_more_activations_are_held_than_the_table_says(name):
    class Counting(nn.Sequential):
        held = most = 0

        def take_saved(self):
            self.held += 1
            self.most = max(self.most, self.held)
            return super().take_saved()

        def backward(self, grad):
            grad = super().backward(grad)
            self.defer(self.let_go)
            return grad

        def let_go(self):
            self.held -= 1

    def job():
        rank = dist.get_rank()
        module = Counting(*part(make_layers(), rank, 2)[1])
        schedule = of_two(module, get_schedule_class(name), loss=nn.CrossEntropyLoss())
        x, y = batch()
        schedule.step(x, target=y)
        assert module.held == 0
        return module.most, most_held(schedule.table)

    results = run_ranks(job, 2)
    assert [most for most, _ in results] == results[0][1]


def test_messages_come_while_a_rank_computes(monkeypatch):
    """The second stage ends its first forward only when the second one's input has arrived."""

    class Waiting(nn.Sequential):
        came = 0

        def forward(self, x):
            deadline = time.monotonic() + 50
            records = call_queue_of(dist.group.WORLD).context.recorder.records
            before = self.came
            while self.came < before + 2 and time.monotonic() < deadline and not before:
                done = [r for r in records() if r.kind == "recv" and r.nbytes == x.nbytes]
                self.came = sum(bool(r.ended and not r.error) for r in done)
                time.sleep(0.001)
            return super().forward(x)

    monkeypatch.setattr("parallel._core.pipeline.messages.SMALL", 0)

    def job():
        rank = dist.get_rank()
        kind = nn.Sequential if rank == 0 else Waiting
        module = kind(*part(make_layers(), rank, 2)[1])
        x, y = batch()
        of_two(module, loss=nn.CrossEntropyLoss()).step(x, target=y)
        return getattr(module, "came", 2)

    assert run_ranks(job, 2) == [2, 2]
