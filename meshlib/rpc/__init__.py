"""Remote calls, which run functions and hold objects on other ranks, with the names of
``torch.distributed.rpc``.
"""

from meshlib._calls.future import Future
from meshlib.rpc import functions
from meshlib.rpc._api import (
    RpcBackendOptions,
    Worker,
    add_carrier,
    cancelled,
    differentiate,
    differentiate_by,
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    pickled_for,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from meshlib.rpc._calling.futures import PreparedCall, wait_all
from meshlib.rpc._carriers import Carrier, Differentiating
from meshlib.rpc._errors import (
    RemoteError,
    RpcConnectionError,
    RpcTimeoutError,
    RRefLostError,
    WaitCycleError,
    WorkerLostError,
)
from meshlib.rpc._membership.directory import WorkerInfo
from meshlib.rpc._references.rref import RRef

__all__ = [
    "Carrier",
    "Differentiating",
    "Future",
    "PreparedCall",
    "RRef",
    "RRefLostError",
    "RemoteError",
    "RpcBackendOptions",
    "RpcConnectionError",
    "RpcTimeoutError",
    "WaitCycleError",
    "Worker",
    "WorkerInfo",
    "WorkerLostError",
    "add_carrier",
    "cancelled",
    "differentiate",
    "differentiate_by",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "pickled_for",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_all",
]
