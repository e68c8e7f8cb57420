"""A program in the idioms of torch.distributed.

`test_typing.py` has pyright check it in basic mode, as editors do, and runs it.

Each line is right on the ranks that come to it. No checker may refuse one because another rank, one
outside of the mesh or the group, would get None.
"""

import numpy as np

import meshlib as dist


def main() -> list[float]:
    """Run on 4 ranks."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    i, j = mesh.get_coordinate()
    assert mesh.rank_at(i * 2 + j) == dist.get_rank()
    for place in mesh.get_coordinate():
        assert place < 2

    x = np.ones(3)
    neighbour = dist.get_rank() ^ 1
    work = dist.isend(x, neighbour)
    received = dist.irecv(np.empty(3), neighbour)
    work.wait()
    assert received.result().sum() == 3
    ops = [dist.P2POp(dist.isend, x, neighbour), dist.P2POp(dist.irecv, np.empty(3), neighbour)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()

    dist.all_reduce(x, dist.ReduceOp.SUM, None, True).wait()
    dist.broadcast(x, 0, None, True).wait()
    mesh["tp"].all_reduce(x, dist.ReduceOp.AVG, True).wait()
    boxes = [np.empty(3) for _ in range(4)]
    dist.all_gather(boxes, x, None, True).wait()
    rows = np.empty((4, 3))
    dist.all_gather(rows, x)
    dist.scatter(x, rows if dist.get_rank() == 0 else None, src=0)
    dist.all_to_all(np.empty((4, 3)), rows)
    dist.barrier(None, True).wait()
    found = dist.all_gather_object([None] * 4, {"rank": dist.get_rank()})
    assert [each["rank"] for each in found] == [0, 1, 2, 3]
    return x.tolist()
