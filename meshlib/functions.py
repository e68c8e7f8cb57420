"""c10d's functions. Each finds the group and calls its method, where the documentation is."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from meshlib.collectives import Collectives
from meshlib.work import Work
from meshlib.world import current_world
from transport.reduce_op import ReduceOp

Group = Collectives | None
"""A ProcessGroup, a DeviceMesh, or None for the default group."""


def resolve_group(group: Group) -> Collectives:
    """Return ``group``, or the default group for None. Raises TypeError for anything else."""
    if group is None:
        return current_world().default_group
    if not isinstance(group, Collectives):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}"
        )
    return group


def all_reduce(
    tensor: Any, op: ReduceOp = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """See ``Collectives.all_reduce``."""
    return resolve_group(group).all_reduce(tensor, op, async_op)


def all_reduce_coalesced(
    tensors: Sequence[Any],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """See ``Collectives.all_reduce_coalesced``."""
    return resolve_group(group).all_reduce_coalesced(tensors, op, async_op)


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """See ``Collectives.broadcast``."""
    return resolve_group(group).broadcast(tensor, src, async_op, group_src)


def reduce(
    tensor: Any,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """See ``Collectives.reduce``."""
    return resolve_group(group).reduce(tensor, dst, op, async_op, group_dst)


def all_gather(
    tensor_list: Sequence[Any], tensor: Any, group: Group = None, async_op: bool = False
) -> Any:
    """See ``Collectives.all_gather``."""
    return resolve_group(group).all_gather(tensor_list, tensor, async_op)


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Group = None, async_op: bool = False
) -> Any:
    """See ``Collectives.all_gather_into_tensor``."""
    return resolve_group(group).all_gather_into_tensor(output_tensor, input_tensor, async_op)


def all_gather_single(
    output_tensor: Any, input_tensor: Any, group: Group = None, async_op: bool = False
) -> Any:
    """See ``Collectives.all_gather_into_tensor``, of which this is another name."""
    return resolve_group(group).all_gather_single(output_tensor, input_tensor, async_op)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """See ``Collectives.all_gather_coalesced``."""
    return resolve_group(group).all_gather_coalesced(
        output_tensor_lists, input_tensor_list, async_op
    )


def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """See ``Collectives.reduce_scatter``."""
    return resolve_group(group).reduce_scatter(output, input_list, op, async_op)


def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """See ``Collectives.reduce_scatter_tensor``."""
    return resolve_group(group).reduce_scatter_tensor(output, input, op, async_op)


def reduce_scatter_single(
    output: Any,
    input: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """See ``Collectives.reduce_scatter_tensor``, of which this is another name."""
    return resolve_group(group).reduce_scatter_single(output, input, op, async_op)


def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """See ``Collectives.gather``."""
    return resolve_group(group).gather(tensor, gather_list, dst, async_op, group_dst)


def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """See ``Collectives.scatter``."""
    return resolve_group(group).scatter(tensor, scatter_list, src, async_op, group_src)


def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """See ``Collectives.all_to_all``."""
    return resolve_group(group).all_to_all(output_tensor_list, input_tensor_list, async_op)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """See ``Collectives.all_to_all_single``."""
    return resolve_group(group).all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, async_op
    )


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: float | timedelta | None = None,
) -> Any:
    """See ``Collectives.barrier``. ``device_ids`` is accepted for c10d's sake."""
    return resolve_group(group).barrier(async_op, timeout)


def monitored_barrier(
    group: Group = None,
    timeout: float | timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """See ``Collectives.monitored_barrier``."""
    resolve_group(group).monitored_barrier(timeout, wait_all_ranks)


def send(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """See ``Collectives.send``."""
    resolve_group(group).send(tensor, dst, tag, group_dst)


def recv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """See ``Collectives.recv``."""
    return resolve_group(group).recv(tensor, src, tag, group_src)


def isend(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """See ``Collectives.isend``."""
    return resolve_group(group).isend(tensor, dst, tag, group_dst)


def irecv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """See ``Collectives.irecv``."""
    return resolve_group(group).irecv(tensor, src, tag, group_src)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """See ``Collectives.broadcast_object_list``."""
    resolve_group(group).broadcast_object_list(object_list, src, device, group_src)


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """See ``Collectives.all_gather_object``."""
    resolve_group(group).all_gather_object(object_list, obj)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """See ``Collectives.gather_object``."""
    resolve_group(group).gather_object(obj, object_gather_list, dst, group_dst)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """See ``Collectives.scatter_object_list``."""
    resolve_group(group).scatter_object_list(
        scatter_object_output_list, scatter_object_input_list, src, group_src
    )


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
) -> None:
    """See ``Collectives.send_object_list``."""
    resolve_group(group).send_object_list(object_list, dst, device, group_dst)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
) -> int:
    """See ``Collectives.recv_object_list``."""
    return resolve_group(group).recv_object_list(object_list, src, device, group_src)
