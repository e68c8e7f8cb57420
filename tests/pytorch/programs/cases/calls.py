"""Cases of single calls: collectives, messages, objects and dtypes."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from registry import RANKS, backend, case, seeded
from torch.distributed.device_mesh import init_device_mesh


@case
def reduce_with_every_op():
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16):
            x = (torch.arange(1, 7) + dist.get_rank()).to(dtype)
            dist.all_reduce(x, op)
            results.append(x)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        x = torch.arange(8) + dist.get_rank()
        dist.all_reduce(x, op)
        results.append(x)
    return results


@case
def to_one_and_from_one():
    rank, size = dist.get_rank(), dist.get_world_size()
    x = seeded(5)
    dist.broadcast(x, src=2)
    y = seeded(3)
    dist.reduce(y, dst=1)
    parts = [torch.zeros(2, 2) for _ in range(size)] if rank == 3 else None
    dist.gather(seeded(2, 2), parts, dst=3)
    mine = torch.zeros(4)
    dist.scatter(mine, [seeded(4, rank=i) for i in range(size)] if rank == 0 else None, src=0)
    return [x, *([y] if rank == 1 else []), *(parts or []), mine]


@case
def gather_into_one_tensor():
    """PyTorch has it from 2.15 on, and Gloo not: there the parts of a list, which are the same."""
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    for root, shape, out in ((2, (2, 3), (size, 2, 3)), (0, (5,), (size * 5,))):
        whole = torch.zeros(out) if rank == root else None
        if hasattr(dist, "gather_single") and dist.get_backend() != "gloo":
            work = dist.gather_single(seeded(*shape), whole, dst=root, async_op=root == 0)
            if work is not None:
                work.wait()
        else:
            parts = None if whole is None else list(whole.view(size, *shape))
            dist.gather(seeded(*shape), parts, dst=root)
        results += [] if whole is None else [whole]
    return results


@case
def gather_and_scatter_of_all():
    size = dist.get_world_size()
    parts = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(parts, seeded(3))
    flat = torch.zeros(size * 3)
    dist.all_gather_single(flat, seeded(3))
    share = torch.zeros(2)
    dist.reduce_scatter_single(share, seeded(size * 2))
    listed = torch.zeros(2)
    dist.reduce_scatter(listed, list(seeded(size, 2)))
    return [*parts, flat, share, listed]


@case
def averages_of_integers():
    """Gloo has no averages: there the sum, divided as NCCL does it."""
    size, results = dist.get_world_size(), []

    def average(call, x):
        if dist.get_backend() == "gloo":
            call(dist.ReduceOp.SUM)
            x.copy_(torch.div(x, size, rounding_mode="trunc"))
        else:
            call(dist.ReduceOp.AVG)
        results.append(x)

    for async_op in (False, True):
        x = torch.tensor([-7, -1, 0, 1, 5]) * (dist.get_rank() + 1)

        def all_reduce(op, x=x, async_op=async_op):
            work = dist.all_reduce(x, op, async_op=async_op)
            if async_op:
                work.wait()

        average(all_reduce, x)
    y, share = torch.arange(size) - 5 * dist.get_rank(), torch.zeros(1, dtype=torch.int64)
    average(lambda op: dist.reduce_scatter_single(share, y, op=op), share)
    count = torch.tensor(dist.get_rank())  # as Lightning's logs have it
    average(lambda op: dist.all_reduce(count, op), count)
    return results


@case
def one_buffer_for_all_that_is_gathered():
    size, results = dist.get_world_size(), []
    for async_op in (False, True):
        buffer = torch.zeros(3)
        work = dist.all_gather([buffer] * size, seeded(3), async_op=async_op)
        if async_op:
            work.wait()
        results.append(buffer)
    return results


@case
def all_to_all_with_splits():
    rank, size = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(size * (rank + 1), 2)
    dist.all_to_all_single(
        out, seeded(sum(range(1, size + 1)), 2), [rank + 1] * size, list(range(1, size + 1))
    )
    even = torch.zeros(size)
    dist.all_to_all_single(even, seeded(size))
    return [out, even]


@case
def messages_in_a_ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    got = torch.zeros(4)
    works = [
        dist.isend(seeded(4), (rank + 1) % size, tag=7),
        dist.irecv(got, (rank - 1) % size, tag=7),
    ]
    for work in works:
        work.wait()
    pairs = torch.zeros(2)
    ops = [
        dist.P2POp(dist.isend, seeded(2), (rank + 1) % size),
        dist.P2POp(dist.irecv, pairs, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [got, pairs]


@case
def message_from_anybody():
    got, sources = [], []
    if dist.get_rank() == 0:
        for _ in range(dist.get_world_size() - 1):
            x = torch.zeros(1)
            sources.append(dist.recv(x))
            got.append((sources[-1], x))
    else:
        dist.send(torch.tensor([float(dist.get_rank())]), dst=0)
    assert all(source == int(x) for source, x in got)
    return [torch.tensor(sorted(sources))]


@case
def objects():
    size = dist.get_world_size()
    everybody = [None] * size
    dist.all_gather_object(everybody, {"rank": dist.get_rank(), "text": "x" * dist.get_rank()})
    sent = [{"from": 0}] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(sent, src=0)
    return [torch.tensor([one["rank"] for one in everybody]), torch.tensor([sent[0]["from"]])]


@case
def coalesced_calls():
    size = dist.get_world_size()
    xs = [seeded(3), seeded(2, 2)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    wholes = [torch.zeros(size * 3), torch.zeros(size * 2)]
    with dist.distributed_c10d._coalescing_manager():
        dist.all_gather_single(wholes[0], seeded(3))
        dist.all_gather_single(wholes[1], seeded(2))
    shares = [torch.zeros(3), torch.zeros(2)]
    with dist.distributed_c10d._coalescing_manager():
        dist.reduce_scatter_single(shares[0], seeded(size * 3))
        dist.reduce_scatter_single(shares[1], seeded(size * 2))
    return [*xs, *wholes, *shares]


@case
def futures_that_continue():
    x = seeded(3)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)

    def again(done):
        y = done.value().clone()
        # Waits, in a continuation, for a later call of the same group.
        return dist.all_reduce(y, async_op=True).get_future().wait()[0]

    return [doubled.then(again).wait()]


@case
def functional_collectives():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = seeded(4, 2)
    results = [
        fc.all_reduce(x, "sum", (mesh, 0)),
        fc.all_gather_single(x, 0, (mesh, 1)),
        fc.reduce_scatter_single(x, "sum", 0, (mesh, 1)),
        fc.all_to_all_single(x, None, None, (mesh, 0)),
        fc.broadcast(x, 0, (mesh, 0)) if dist.get_rank() in (0, 2) else x,
        *fc.all_reduce_coalesced([x, x * 2], "avg" if backend() == "meshlib" else "sum", (mesh, 1)),
    ]
    if backend() == "meshlib":
        results[-2:] = [y * 2 for y in results[-2:]]
    compiled = torch.compile(lambda y: fc.all_reduce(y, "sum", (mesh, 0)) + 1, backend="eager")
    results.append(compiled(x))
    return [fc.wait_tensor(y) + 0 for y in results]


# What Gloo has not: compared with what is known.


@case
def small_floats():
    results = []
    for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"):
        x = torch.ones(2, 3).to(getattr(torch, name))
        if backend() == "meshlib":
            dist.all_reduce(x)
        else:
            x = (torch.ones(2, 3) * RANKS).to(x.dtype)
        results.append(x.float())
    return results


@case
def strided_tensors():
    base, out = seeded(3, 4), torch.zeros(4, RANKS).t()
    if backend() == "meshlib":
        dist.all_reduce(base.t()[::2])
        dist.all_gather_single(out, seeded(8)[::2])
    else:
        taken = base.t()[::2].contiguous()
        dist.all_reduce(taken)
        base.t()[::2] = taken
        rows = [torch.zeros(4) for _ in range(RANKS)]
        dist.all_gather(rows, seeded(8)[::2].contiguous())
        out.copy_(torch.stack(rows))
    return [base, out]


@case
def averages():
    x = seeded(3)
    mine, share = x.clone(), torch.zeros(1)
    if backend() == "meshlib":
        dist.all_reduce(mine, dist.ReduceOp.AVG)
        dist.reduce_scatter_single(share, seeded(RANKS), dist.ReduceOp.AVG)
    else:
        dist.all_reduce(mine)
        dist.reduce_scatter_single(share, seeded(RANKS))
        mine, share = mine / RANKS, share / RANKS
    return [mine, share]


# The last: after it not all ranks have made as many groups.
