"""Wrong input is named, on all ranks, before any byte of a batch has moved."""

import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import RankError, run_ranks
from parallel import nn
from parallel.pipeline import (
    PipelineSchedule,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleTable,
    ScheduleZBVZeroBubble,
    gpipe,
    one_f_one_b,
)
from tests.support.parallel.pipeline_training import make_layers, part


def stage(index=None, total=2, **options):
    index = dist.get_rank() if index is None else index
    return PipelineStage(part(make_layers(), index, total)[1], index, total, **options)


def raised_on_all(make, message, ranks=2):
    """Run ``make`` on all ranks, and expect this ValueError on each of them."""

    def job():
        with pytest.raises(ValueError, match=message):
            make()
        dist.barrier()  # the group is as usable as before

    run_ranks(job, ranks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Schedule1F1B(stage(total=4), 4),
            r"1F1B has one stage per rank, got 2",
        ),
        (
            lambda: ScheduleInterleaved1F1B(stage(total=3), 4),
            r"num_stages is 3, which is not divisible by the 2 ranks of",
        ),
        (
            lambda: ScheduleInterleaved1F1B([stage(total=4), stage(2 + dist.get_rank(), 4)], 5),
            r"microbatches is 5, which is not divisible by the 2 rounds",
        ),
        (
            lambda: ScheduleZBVZeroBubble([stage(total=4), stage(2 + dist.get_rank(), 4)], 4),
            r"rank \d has the stages \[\d, \d\]; ZB-V expects \[\d, \d\]",
        ),
        (
            lambda: ScheduleGPipe(stage(0), 4),
            r"rank 1 has the stages \[0\]; GPipe expects \[1\]",
        ),
        (
            lambda: ScheduleGPipe(stage(), 4 + dist.get_rank()),
            r"rank 1: has option n_microbatches=5 where rank 0 has option n_microbatches=4",
        ),
        (
            lambda: PipelineSchedule(stage(), [gpipe, one_f_one_b][dist.get_rank()](2, 4)),
            r"rank 1: has option schedule=1F1B where rank 0 has option schedule=GPipe",
        ),
        (
            lambda: ScheduleGPipe(stage(), 4, [None, nn.CrossEntropyLoss()][dist.get_rank()]),
            r"rank 1: has option loss_fn=given where rank 0 has option loss_fn=none",
        ),
        (
            lambda: PipelineSchedule(stage(), gpipe(4, 4)),
            r"stage \d of 2, but GPipe has 4 stages",
        ),
        (
            lambda: PipelineSchedule(stage(), ScheduleTable.from_csv("0F0,1F0,1B0,0B0")),
            r"the table is for 1 ranks",
        ),
        (
            lambda: ScheduleGPipe(
                stage(shared={"w": ["0.weight", "3.weight"][dist.get_rank()]}), 4
            ),
            r"shared parameter 'w' differs between stages: float64\[12, 6\] at stage 0, flo",
        ),
    ],
)
def test_what_does_not_fit_is_raised_on_all_ranks(make, message):
    raised_on_all(make, message)


def test_one_ranks_mistake_is_raised_on_all_ranks():
    raised_on_all(
        lambda: Schedule1F1B(stage(total=2 if dist.get_rank() else 4), 4),
        r"1F1B has one stage per rank, got 2",
    )


def test_arguments_of_another_type():
    def job():
        module = nn.ReLU()
        for make, error, message in [
            (lambda: PipelineStage(3, 0, 1), TypeError, "submodule must be a Module"),
            (lambda: PipelineStage(module, 1, 1), ValueError, "stage_index is 1; expected 0 to 0"),
            (lambda: PipelineStage(module, 0.5, 1), TypeError, "stage_index"),
            (lambda: PipelineStage(module, 0, 0), ValueError, "num_stages must be at least 1"),
            (lambda: PipelineStage(module, 0, 1, "pp"), TypeError, "mesh must be a DeviceMesh"),
            (lambda: PipelineStage(module, 0, 1, shared=["w"]), TypeError, "shared must be a dict"),
            (
                lambda: PipelineStage(module, 0, 1, shared={"w": "0.weight"}),
                KeyError,
                r"shared\['w'\] is '0.weight'",
            ),
            (lambda: ScheduleGPipe([], 4), TypeError, "stages must be a PipelineStage"),
            (lambda: ScheduleGPipe([module], 4), TypeError, r"stages\[0\] must be a Stage"),
            (
                lambda: ScheduleGPipe(PipelineStage(module, 0, 1), 0),
                ValueError,
                "n_microbatches must be at least 1",
            ),
            (
                lambda: ScheduleGPipe(PipelineStage(module, 0, 1), 1, lambda y, t: 0),
                TypeError,
                "loss_fn must be a Module",
            ),
            (
                lambda: PipelineSchedule(PipelineStage(module, 0, 1), "1F1B"),
                TypeError,
                "table must be a ScheduleTable",
            ),
        ]:
            with pytest.raises(error, match=message):
                make()

    run_ranks(job, 1)


def test_batches_that_do_not_fit():
    x, y = np.ones((8, 6)), np.zeros(8, int)

    def job():
        rank = dist.get_rank()
        schedule = Schedule1F1B(stage(), 4, nn.CrossEntropyLoss())
        records = call_queue_of(dist.group.WORLD).context.recorder.records
        before = len(records())
        for first, last, error, message in [
            ((x[:6],), y, ValueError, r"args\[0\] has 6 rows, which is not divisible by 4 micro"),
            ((x[:0],), y, ValueError, r"args\[0\] has 0 rows"),
            ((3,), y, TypeError, r"args\[0\] must be an array whose first dim .* got int"),
            ((), y, ValueError, "step needs the batch on the rank of the first stage"),
            ((x,), y[:7], ValueError, "target has 7 rows, which is not divisible by 4"),
            ((x,), None, ValueError, "step needs the target on the rank of the last stage"),
            ((x,), [y, y[:3]], ValueError, r"target\[1\] has 3 rows"),
        ]:
            is_mine = (last is y) == (rank == 0)
            if is_mine:
                with pytest.raises(error, match=message):
                    schedule.step(*first, target=last)
        with pytest.raises(ValueError, match=r"kwargs\['mask'\] has 3 rows"):
            schedule.step(x, target=y, mask=np.ones(3))
        assert len(records()) == before
        schedule.step(x, target=y)
        if rank == 0:
            with pytest.raises(ValueError, match=r"a microbatch is float64\[4, 6\]; expected"):
                schedule.step(np.ones((16, 6)), target=y)
            with pytest.raises(ValueError, match=r"a microbatch is float32\[2, 6\]; expected"):
                schedule.step(x.astype("f4"), target=y)
        dist.barrier()
        schedule.step(x, target=y)

    run_ranks(job, 2)


class Wrong(nn.Module):
    def __init__(self, output=lambda x: x, grad=lambda g: g):
        super().__init__()
        self.output, self.grad = output, grad

    def forward(self, x):
        return self.output(x)

    def backward(self, grad):
        return self.grad(grad)


@pytest.mark.parametrize(
    ("module", "rank", "message"),
    [
        (lambda: Wrong(lambda x: [x, "y"]), 0, r"the output of stage 0 of 2 must be an array or a"),
        (
            lambda: Wrong(lambda x: x[: int(x[0, 0])]),
            0,
            r"output of stage 0 of 2 for microbatch 1 is float64\[1, 6\]; expected float64\[2, 6\]",
        ),
        (
            lambda: Wrong(grad=lambda g: g.astype("f4")),
            1,
            r"the gradient of input 0 of stage 1 of 2 is float32\[2, 6\]; expected float64\[2, 6\]",
        ),
        (lambda: Wrong(grad=lambda g: (g, g)), 1, "stage 1 of 2 returned 2 gradients for 1 inputs"),
    ],
)
def test_stages_that_break_their_word(module, rank, message):
    x = np.repeat([2.0, 2.0, 1.0, 1.0], 6).reshape(4, 6)

    def job():
        own = module() if dist.get_rank() == rank else Wrong()
        schedule = ScheduleGPipe(PipelineStage(own, dist.get_rank(), 2), 2, nn.CrossEntropyLoss())
        try:
            schedule.step(x, target=np.zeros(4, int))
        except (ValueError, TypeError):
            with pytest.raises(RuntimeError, match="an earlier step of this pipeline failed"):
                schedule.step(x, target=np.zeros(4, int))
            raise

    with pytest.raises(RankError, match=message) as caught:
        run_ranks(job, 2)
    assert caught.value.rank == rank
