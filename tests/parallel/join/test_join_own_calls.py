"""Uneven inputs and the user's own calls: what a rank without inputs contributes to them."""

from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import RankError, run_ranks
from parallel import DistributedDataParallel, nn
from parallel.join._shadow import neutral
from tests.support.parallel.training import make_model, share


def test_the_users_own_collectives():
    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(make_model())
        group = model.process_group
        seen = []
        with model.join() as join:
            for step in range((1, 3, 2)[rank]):
                x, y = share(rank, step)
                loss = nn.CrossEntropyLoss()
                loss(model(x), y)
                model.backward(loss.backward())
                mine = np.array([rank + 1.0, -1.0])
                work = group.all_reduce(mine.copy(), async_op=True)
                counts = [int(group.all_reduce(np.array(1)))]
                group.barrier()
                counts.append(work.result().tolist())
                counts.append(group.all_reduce(mine.copy(), op=dist.ReduceOp.MIN).tolist())
                counts.append(group.all_reduce(mine.copy(), op=dist.ReduceOp.PRODUCT).tolist())
                counts.append(group.broadcast(mine.copy(), group_src=1).tolist())
                got = group.reduce(mine.copy(), group_dst=1)
                counts.append(got.tolist() if rank == 1 else None)
                group.all_reduce_coalesced([np.ones(2), np.ones(3)])
                seen.append((*counts, join.num_active))
        return seen

    one, two, three = run_ranks(job, 3)
    all_three = (3, [6, -3], [1, -1], [6, -1], [2, -1], None, 3)
    last_two = (2, [5, -2], [2, -1], [6, 1], [2, -1], [5, -2], 2)
    last = (1, [2, -1], [2, -1], [2, -1], [2, -1], [2, -1], 1)
    assert one == [all_three]
    assert two == [(*all_three[:5], [6, -3], 3), last_two, last]
    assert three == [all_three, (*last_two[:5], None, 2)]


def test_averages_are_of_the_ranks_with_inputs():
    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(make_model())
        group, seen = model.process_group, []
        with model.join():
            for _ in range((1, 3, 2)[rank]):
                mine = np.array([rank + 1.0, 1j])
                work = group.all_reduce(mine.copy(), op=dist.ReduceOp.AVG, async_op=True)
                small = group.all_reduce(np.full(2, rank, "f2"), op=dist.ReduceOp.AVG)
                got = group.reduce(mine.copy(), op=dist.ReduceOp.AVG, group_dst=1)
                seen.append((*work.result().tolist(), *small.tolist()))
                np.testing.assert_allclose(got, work.result() if rank == 1 else mine)
        return seen

    steps = [(2, 1j, 1, 1), (2.5, 1j, 1.5, 1.5), (2, 1j, 1, 1)]
    for rank, seen in enumerate(run_ranks(job, 3)):
        np.testing.assert_allclose(seen, steps[: (1, 3, 2)[rank]])


def test_calls_on_the_whole_mesh_and_on_another_group_of_the_same_ranks():
    def job():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
        mesh.barrier()
        model = DistributedDataParallel(make_model(), mesh["dp"])
        second = dist.new_group(mesh["dp"].process_group.ranks)
        seen = []
        with model.join():
            for step in range((1, 3)[dp]):
                total = mesh.all_reduce(np.ones(1))[0]
                x, y = share(dp, step)
                nn_loss = nn.CrossEntropyLoss()
                nn_loss(model(x), y)
                model.backward(nn_loss.backward())
                extreme = second.all_reduce(np.full(1, dp), op=dist.ReduceOp.MIN)[0]
                # Global rank 2 is the one with dp = 1 and tp = 0.
                sent = mesh.broadcast(np.full(1, 10 * dp + tp), src=2)[0]
                seen.append((total, extreme, sent))
        return seen

    both, late = (4, 0, 10), (2, 1, 10)
    assert run_ranks(job, 4) == [[both]] * 2 + [[both, late, late]] * 2


def test_a_group_with_some_of_the_ranks_is_refused():
    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(make_model())
        group = dist.new_group([0, 1])
        alone = dist.new_group([rank])

        def loop():
            with model.join():
                alone.all_reduce(np.ones(1))
                if rank == 2:
                    raise RuntimeError("leaves")
                group.all_reduce(np.ones(1))

        text = "leaves" if rank == 2 else r"has some ranks of .*, but not \[2\]"
        with pytest.raises(RuntimeError, match=text):
            loop()

    run_ranks(job, 3)


def test_a_call_of_another_thread_is_refused():
    def job():
        model = DistributedDataParallel(make_model())
        with model.join(), ThreadPoolExecutor(1) as pool:
            call = pool.submit(model.process_group.all_reduce, np.ones(1))
            with pytest.raises(RuntimeError, match="calls from another thread than the loop's"):
                call.result()

    run_ranks(job, 2)


def test_a_group_that_a_rank_without_inputs_does_not_know_is_said():
    def job():
        model = DistributedDataParallel(make_model())
        with model.join():
            if dist.get_rank() == 0:
                dist.new_group([0, 1]).all_reduce(np.ones(1))

    with pytest.raises(RankError, match=r"ranks \[0\] call all_reduce on a group that rank 1, "):
        run_ranks(job, 2)


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f4", ml_dtypes.bfloat16, "c8"])
def test_neutral_elements(dtype):
    dtype = np.dtype(dtype)
    values = np.array([0, 1, 1], dtype) if dtype.kind == "b" else np.array([0, 1, 100], dtype)
    ops = ["SUM", "PRODUCT"]
    ops += ["MIN", "MAX"] if dtype.kind != "c" else []
    ops += ["BAND", "BOR", "BXOR"] if dtype.kind in "biu" else []
    for name in ops:
        op = getattr(dist.ReduceOp, name)
        nothing = np.full(3, neutral(op, dtype), dtype)
        out = np.empty(3, dtype)
        op.combine(values, nothing, out)
        np.testing.assert_array_equal(out, values)


def test_a_minimum_without_infinities():
    dtype = np.dtype(ml_dtypes.float8_e4m3fn)
    assert neutral(dist.ReduceOp.MIN, dtype) == 448
    assert neutral(dist.ReduceOp.MAX, dtype) == -448


def own_call(call):
    """Run ``call`` in a loop that is longer on rank 1; return the errors of both ranks."""

    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(nn.Linear(2, 2, rng=np.random.default_rng(0)))

        def loop():
            with model.join():
                for _ in range(1 + rank):
                    call(model.process_group)

        with pytest.raises(RuntimeError) as raised:
            loop()
        return str(raised.value)

    return run_ranks(job, 2)


def test_calls_to_which_nothing_can_be_contributed():
    for text in own_call(lambda group: group.all_gather_object([None] * 2, 1)):
        assert "all_gather on" in text
        assert "Use all_reduce, reduce, broadcast or barrier" in text
    for text in own_call(lambda group: group.broadcast(np.zeros(1), group_src=0)):
        assert "its source, group rank 0, is out of inputs; expected one of [1]" in text


def test_ranks_that_do_different_things_are_told_apart():
    def job():
        rank = dist.get_rank()
        model = DistributedDataParallel(make_model())

        def loop():
            with model.join():
                if rank == 0:
                    model.process_group.all_reduce(np.zeros(3, "f4"))
                if rank == 1:
                    model(share(rank, 0)[0])
                    model.backward(np.zeros((4, 4)))

        with pytest.raises(RuntimeError, match="make different calls") as raised:
            loop()
        return str(raised.value)

    texts = run_ranks(job, 3)
    assert len(set(texts)) == 1
    for row in (
        "rank 0: begins all_reduce dtype=float32 count=3 op=SUM",
        "rank 1: begins backward of DistributedDataParallel",
        "rank 2: is out of inputs",
    ):
        assert row in texts[0]
