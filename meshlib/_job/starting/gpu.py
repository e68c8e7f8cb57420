"""The choice of this rank's GPU, and of the backend for its arrays.

Experimental, not run on a GPU (``docs/run/gpu.md``).
"""

from __future__ import annotations

import operator
import os
import warnings
from typing import Any

import numpy as np

from meshlib._groups.nccl_splits import connect
from meshlib._job.world import World
from transport import _environment as environment
from transport._cuda.driver import Driver, cuda_driver
from transport._errors import DistBackendError
from transport._launch_environments import launched_local_rank
from transport._operands.reduce_op import ReduceOp

NCCL_BACKEND = "cpu:auto,cuda:nccl"


def choose_cuda_device(world: World, driver: Driver | None = None) -> str | None:
    """Make this rank's GPU the calling thread's current one. Every rank of ``world`` calls.

    Returns the backends for a mesh of GPUs, the same on all ranks: NCCL if each rank has its own
    GPU, otherwise None (via the host). Warns if ranks of this host share a GPU. Raises
    DistBackendError on every rank if one rank has no GPU.
    """
    from transport._nccl.library import has_provider  # a job without GPUs does not load it

    trouble: DistBackendError | None = None
    shares = True
    try:
        shares = _choose(driver or cuda_driver(), world.cuda_device)
    except DistBackendError as error:
        trouble = error
    state = np.array([trouble is None, not shares and has_provider()], np.int8)
    world.default_group.all_reduce(state, ReduceOp.MIN)
    if trouble is not None:
        raise trouble
    if not state[0]:
        raise DistBackendError(
            "device_type is 'cuda', but another rank has no usable GPU (see its own error);"
            " expected a GPU on every rank, or device_type='cpu'"
        )
    return NCCL_BACKEND if state[1] else None


def bind_cuda_device(world: World, device_id: Any, driver: Driver | None = None) -> None:
    """Make ``device_id`` this rank's GPU, and connect all ranks if the default backend is NCCL.

    Every rank of ``world`` calls. ``"cpu"`` binds nothing. Raises ValueError for a value that is
    not a device, or not a device of this process.
    """
    device = _number_of(device_id)
    if device is None:
        return
    driver = driver or cuda_driver()
    count = driver.device_count()
    if device >= count:
        raise ValueError(
            f"device_id is {device_id!r}, but rank {world.rank} sees {count} GPUs; expected one of"
            f" cuda:0 to cuda:{count - 1} (see CUDA_VISIBLE_DEVICES and LOCAL_RANK)"
        )
    driver.choose_device(device)
    world.cuda_device = device
    connect(world.default_group, driver, device)


def _number_of(device_id: Any) -> int | None:
    """Return the number of the GPU ``device_id``, or None for the CPU."""
    if isinstance(device_id, str):
        if device_id == "cpu":
            return None
        kind, _, text = device_id.partition(":")
        number = int(text) if kind == "cuda" and text.isdecimal() else None
    else:
        # CuPy's devices have an ``id``, torch's an ``index``.
        given = getattr(device_id, "id", getattr(device_id, "index", device_id))
        try:
            number = operator.index(given)
        except TypeError:
            number = None
    if number is None or number < 0:
        raise ValueError(
            f"device_id is {device_id!r}; expected the number of a GPU, 'cuda:NUMBER', 'cpu', or"
            " an object with id or index"
        )
    return number


def _choose(driver: Driver, bound: int | None) -> bool:
    """Choose the device ``bound``, or one by LOCAL_RANK; return whether ranks of this host share
    it."""
    count = driver.device_count()
    if count == 0:
        raise DistBackendError(
            "device_type is 'cuda', but this process sees no GPU (CUDA_VISIBLE_DEVICES is"
            f" {os.environ.get('CUDA_VISIBLE_DEVICES')!r}); expected one, or device_type='cpu'"
        )
    local_rank = launched_local_rank() or 0
    ranks = int(os.environ.get(environment.LOCAL_WORLD_SIZE, local_rank + 1))
    driver.choose_device(local_rank % count if bound is None else bound)
    # With Slurm's --gpus-per-task, each rank sees only its own GPU. Otherwise a single visible GPU
    # is the same for all ranks.
    own = count == 1 and "SLURM_GPUS_PER_TASK" in os.environ
    if ranks > count and not own:
        warnings.warn(
            f"{ranks} ranks of this host share {count} GPU{'s' if count > 1 else ''}; NCCL cannot"
            " do that, so their arrays are sent through the host. For speed, start as many ranks"
            " as there are GPUs",
            stacklevel=4,
        )
        return True
    return False
