"""Meshes, groups and collectives on plain arrays: ``import meshlib as dist``.

``_HOMES`` lists the public names. Each is imported at its first use (PEP 562), because the launcher
in this package needs neither these names nor NumPy.
"""

import os as _os
import sys as _sys
import typing as _typing


def _check_package(name: str) -> None:
    """Raise ImportError if Python finds another module in place of our package ``name``.

        The program's folder, which Python searches first, may have a ``transport.py``, or another
    distribution may have a package of that name.
    """
    from importlib.util import find_spec

    there = _sys.modules.get(name)
    spec = there.__spec__ if there is not None else find_spec(name)
    file = spec.origin if spec is not None else getattr(there, "__file__", None)
    here = _os.path.dirname(_os.path.dirname(__file__))
    ours = _os.path.join(here, name, "__init__.py")
    if file not in (None, ours) and _os.path.realpath(file) != _os.path.realpath(ours):
        raise ImportError(
            f"{file} is in the way of meshlib's package {name!r}, which has the same name:"
            " rename that file, start from another folder, or use an environment without it",
            name=name,
            path=file,
        )


if _sys.platform == "win32":
    raise ImportError("meshlib does not run on native Windows: use it in WSL, which is Linux")
_check_package("transport")

__version__ = "0.1.0"

if _typing.TYPE_CHECKING:  # the same names again, for type checkers and editors
    from meshlib._arrays.ignored import ResultIgnoredWarning as ResultIgnoredWarning
    from meshlib._c10d.availability import get_node_local_rank as get_node_local_rank
    from meshlib._c10d.availability import is_available as is_available
    from meshlib._c10d.availability import is_gloo_available as is_gloo_available
    from meshlib._c10d.availability import is_mpi_available as is_mpi_available
    from meshlib._c10d.availability import is_nccl_available as is_nccl_available
    from meshlib._c10d.availability import is_torchelastic_launched as is_torchelastic_launched
    from meshlib._c10d.availability import supports_complex as supports_complex
    from meshlib._c10d.batch import P2POp as P2POp
    from meshlib._c10d.batch import batch_isend_irecv as batch_isend_irecv
    from meshlib._c10d.debugger import breakpoint as breakpoint
    from meshlib._c10d.deprecated import reduce_op as reduce_op
    from meshlib._c10d.functions.arrays import all_reduce as all_reduce
    from meshlib._c10d.functions.arrays import broadcast as broadcast
    from meshlib._c10d.functions.arrays import exscan as exscan
    from meshlib._c10d.functions.arrays import reduce as reduce
    from meshlib._c10d.functions.arrays import scan as scan
    from meshlib._c10d.functions.barriers import barrier as barrier
    from meshlib._c10d.functions.barriers import monitored_barrier as monitored_barrier
    from meshlib._c10d.functions.coalesced import all_gather_coalesced as all_gather_coalesced
    from meshlib._c10d.functions.coalesced import (
        all_gather_into_tensor_coalesced as all_gather_into_tensor_coalesced,
    )
    from meshlib._c10d.functions.coalesced import all_reduce_coalesced as all_reduce_coalesced
    from meshlib._c10d.functions.coalesced import (
        reduce_scatter_tensor_coalesced as reduce_scatter_tensor_coalesced,
    )
    from meshlib._c10d.functions.gather_single import gather_into_tensor as gather_into_tensor
    from meshlib._c10d.functions.gather_single import gather_single as gather_single
    from meshlib._c10d.functions.gathered import all_gather as all_gather
    from meshlib._c10d.functions.gathered import all_gather_into_tensor as all_gather_into_tensor
    from meshlib._c10d.functions.gathered import all_gather_single as all_gather_single
    from meshlib._c10d.functions.gathered import reduce_scatter as reduce_scatter
    from meshlib._c10d.functions.gathered import reduce_scatter_single as reduce_scatter_single
    from meshlib._c10d.functions.gathered import reduce_scatter_tensor as reduce_scatter_tensor
    from meshlib._c10d.functions.messages import irecv as irecv
    from meshlib._c10d.functions.messages import isend as isend
    from meshlib._c10d.functions.messages import recv as recv
    from meshlib._c10d.functions.messages import send as send
    from meshlib._c10d.functions.objects import all_gather_object as all_gather_object
    from meshlib._c10d.functions.objects import broadcast_object_list as broadcast_object_list
    from meshlib._c10d.functions.objects import gather_object as gather_object
    from meshlib._c10d.functions.objects import recv_object_list as recv_object_list
    from meshlib._c10d.functions.objects import scatter_object_list as scatter_object_list
    from meshlib._c10d.functions.objects import send_object_list as send_object_list
    from meshlib._c10d.functions.personalized import all_to_all as all_to_all
    from meshlib._c10d.functions.personalized import all_to_all_single as all_to_all_single
    from meshlib._c10d.functions.personalized import gather as gather
    from meshlib._c10d.functions.personalized import scatter as scatter
    from meshlib._c10d.grad_bucket import GradBucket as GradBucket
    from meshlib._c10d.groups import GroupMember as GroupMember
    from meshlib._c10d.groups import get_backend as get_backend
    from meshlib._c10d.groups import get_backend_config as get_backend_config
    from meshlib._c10d.groups import get_global_rank as get_global_rank
    from meshlib._c10d.groups import get_group_rank as get_group_rank
    from meshlib._c10d.groups import get_process_group_ranks as get_process_group_ranks
    from meshlib._c10d.groups import get_rank as get_rank
    from meshlib._c10d.groups import get_world_size as get_world_size
    from meshlib._c10d.groups import group as group
    from meshlib._c10d.groups import new_group as new_group
    from meshlib._c10d.groups import set_timeout as set_timeout
    from meshlib._c10d.profiler import profile as profile
    from meshlib._c10d.profiler import record_comm as record_comm
    from meshlib._c10d.shrink import shrink_group as shrink_group
    from meshlib._c10d.subgroups import new_subgroups as new_subgroups
    from meshlib._c10d.subgroups import new_subgroups_by_enumeration as new_subgroups_by_enumeration
    from meshlib._c10d.subgroups import split_group as split_group
    from meshlib._calls.future import Future as Future
    from meshlib._calls.future import WaitTimeoutError as WaitTimeoutError
    from meshlib._calls.work import Work as Work
    from meshlib._calls.work import WorkResult as WorkResult
    from meshlib._calls.work import collect_all as collect_all
    from meshlib._collectives.windows.window import Window as Window
    from meshlib._groups.backend import Backend as Backend
    from meshlib._groups.backend import (
        get_default_backend_for_device as get_default_backend_for_device,
    )
    from meshlib._groups.backend import is_backend_available as is_backend_available
    from meshlib._groups.process_group import ProcessGroup as ProcessGroup
    from meshlib._job.preemption import request_stop as request_stop
    from meshlib._job.preemption import should_stop as should_stop
    from meshlib._job.starting.init import destroy_process_group as destroy_process_group
    from meshlib._job.starting.init import init_process_group as init_process_group
    from meshlib._job.starting.init import is_initialized as is_initialized
    from meshlib._launcher.spawn import spawn as spawn
    from meshlib._launcher.spawned_rank import ProcessException as ProcessException
    from meshlib._launcher.spawned_rank import ProcessExitedException as ProcessExitedException
    from meshlib._launcher.spawned_rank import ProcessRaisedException as ProcessRaisedException
    from meshlib._mesh.config import MeshConfig as MeshConfig
    from meshlib._mesh.device_mesh import DeviceMesh as DeviceMesh
    from meshlib._mesh.device_mesh import current_mesh as current_mesh
    from meshlib._mesh.init import init_device_mesh as init_device_mesh
    from meshlib._mesh.layout import Layout as Layout
    from meshlib._mesh.spec import MeshDimError as MeshDimError
    from meshlib._recording.log import DebugLevel as DebugLevel
    from meshlib._recording.log import get_debug_level as get_debug_level
    from meshlib._recording.log import set_debug_level as set_debug_level
    from meshlib._recording.log import set_debug_level_from_env as set_debug_level_from_env
    from meshlib.notebook import local_ranks as local_ranks
    from meshlib.sharding import DArray as DArray
    from meshlib.sharding import P as P
    from meshlib.sharding import Partial as Partial
    from meshlib.sharding import Replicate as Replicate
    from meshlib.sharding import Shard as Shard
    from meshlib.sharding import Sharding as Sharding
    from meshlib.sharding import ShardingError as ShardingError
    from meshlib.sharding import distribute_array as distribute_array
    from transport._errors import CollectiveMismatchError as CollectiveMismatchError
    from transport._errors import CollectiveTimeoutError as CollectiveTimeoutError
    from transport._errors import DistBackendError as DistBackendError
    from transport._errors import DistError as DistError
    from transport._errors import DistNetworkError as DistNetworkError
    from transport._errors import DistStoreError as DistStoreError
    from transport._errors import QueueEmptyError as QueueEmptyError
    from transport._errors import RankFailedError as RankFailedError
    from transport._operands.compression import Compression as Compression
    from transport._operands.reduce_op import ReduceOp as ReduceOp
    from transport._operands.reduce_op import error_feedback as error_feedback
    from transport._operands.reduce_op import premul_sum as premul_sum
    from transport._rendezvous import register_rendezvous_handler as register_rendezvous_handler
    from transport._rendezvous import rendezvous as rendezvous
    from transport._store import FileStore as FileStore
    from transport._store import HashStore as HashStore
    from transport._store import PrefixStore as PrefixStore
    from transport._store import Store as Store
    from transport._store import TCPStore as TCPStore

_HOMES = {
    "meshlib._arrays.ignored": "ResultIgnoredWarning",
    "meshlib._c10d.availability": (
        "get_node_local_rank is_available is_gloo_available is_mpi_available is_nccl_available "
        "is_torchelastic_launched supports_complex"
    ),
    "meshlib._c10d.batch": "P2POp batch_isend_irecv",
    "meshlib._c10d.debugger": "breakpoint",
    "meshlib._c10d.deprecated": "reduce_op",
    "meshlib._c10d.functions.arrays": "all_reduce broadcast exscan reduce scan",
    "meshlib._c10d.functions.barriers": "barrier monitored_barrier",
    "meshlib._c10d.functions.coalesced": (
        "all_gather_coalesced all_gather_into_tensor_coalesced all_reduce_coalesced "
        "reduce_scatter_tensor_coalesced"
    ),
    "meshlib._c10d.functions.gather_single": "gather_into_tensor gather_single",
    "meshlib._c10d.functions.gathered": (
        "all_gather all_gather_into_tensor all_gather_single reduce_scatter reduce_scatter_single "
        "reduce_scatter_tensor"
    ),
    "meshlib._c10d.functions.messages": "irecv isend recv send",
    "meshlib._c10d.functions.objects": (
        "all_gather_object broadcast_object_list gather_object recv_object_list "
        "scatter_object_list send_object_list"
    ),
    "meshlib._c10d.functions.personalized": "all_to_all all_to_all_single gather scatter",
    "meshlib._c10d.grad_bucket": "GradBucket",
    "meshlib._c10d.groups": (
        "GroupMember get_backend get_backend_config get_global_rank get_group_rank "
        "get_process_group_ranks get_rank get_world_size group new_group set_timeout"
    ),
    "meshlib._c10d.profiler": "profile record_comm",
    "meshlib._c10d.shrink": "shrink_group",
    "meshlib._c10d.subgroups": "new_subgroups new_subgroups_by_enumeration split_group",
    "meshlib._calls.future": "Future WaitTimeoutError",
    "meshlib._calls.work": "Work WorkResult collect_all",
    "meshlib._collectives.windows.window": "Window",
    "meshlib._groups.backend": "Backend get_default_backend_for_device is_backend_available",
    "meshlib._groups.process_group": "ProcessGroup",
    "meshlib._job.preemption": "request_stop should_stop",
    "meshlib._job.starting.init": "destroy_process_group init_process_group is_initialized",
    "meshlib._launcher.spawn": "spawn",
    "meshlib._launcher.spawned_rank": (
        "ProcessException ProcessExitedException ProcessRaisedException"
    ),
    "meshlib._mesh.config": "MeshConfig",
    "meshlib._mesh.device_mesh": "DeviceMesh current_mesh",
    "meshlib._mesh.init": "init_device_mesh",
    "meshlib._mesh.layout": "Layout",
    "meshlib._mesh.spec": "MeshDimError",
    "meshlib._recording.log": (
        "DebugLevel get_debug_level set_debug_level set_debug_level_from_env"
    ),
    "meshlib.notebook": "local_ranks",
    "meshlib.sharding": (
        "DArray P Partial Replicate Shard Sharding ShardingError distribute_array"
    ),
    "transport._errors": (
        "CollectiveMismatchError CollectiveTimeoutError DistBackendError DistError "
        "DistNetworkError DistStoreError QueueEmptyError RankFailedError"
    ),
    "transport._operands.compression": "Compression",
    "transport._operands.reduce_op": "ReduceOp error_feedback premul_sum",
    "transport._rendezvous": "register_rendezvous_handler rendezvous",
    "transport._store": "FileStore HashStore PrefixStore Store TCPStore",
}
"""The public names, by the module that defines them."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

if not _typing.TYPE_CHECKING:
    __all__ = sorted(_HOME_OF)  # noqa: PLE0605 (it is a list)

    def __getattr__(name: str) -> _typing.Any:
        """Import a public name at its first use."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}")
        from importlib import import_module

        value = getattr(import_module(_HOME_OF[name]), name)
        if type(value) is type(__getattr__):
            # Classes keep their module, in which inspect and get_type_hints search for them.
            value.__module__ = __name__
        return globals().setdefault(name, value)  # a user may have assigned another value

    def _hint(name: str) -> str:
        from importlib.util import find_spec

        if name.startswith("_") or find_spec(f"{__name__}.{name}") is not None:
            return ""  # Python looks up a submodule here before it imports it
        from meshlib._did_you_mean import did_you_mean

        return did_you_mean(name, __all__)

    def __dir__() -> list[str]:
        special = (name for name in globals() if name.startswith("__"))
        return sorted({*special, *__all__})
