"""Meshes, groups and collectives on plain arrays: ``import meshlib as dist``."""

from meshlib.availability import (
    get_node_local_rank,
    is_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    supports_complex,
)
from meshlib.backend import Backend, get_default_backend_for_device, is_backend_available
from meshlib.batch import P2POp, batch_isend_irecv
from meshlib.debug import DebugLevel, get_debug_level, set_debug_level, set_debug_level_from_env
from meshlib.debugger import breakpoint
from meshlib.deprecated import reduce_op
from meshlib.device_mesh import DeviceMesh, current_mesh
from meshlib.functions import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_object,
    all_gather_single,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    irecv,
    isend,
    monitored_barrier,
    recv,
    recv_object_list,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
    scatter_object_list,
    send,
    send_object_list,
)
from meshlib.groups import (
    GroupMember,
    get_backend,
    get_backend_config,
    get_global_rank,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    new_group,
)
from meshlib.init import destroy_process_group, init_process_group, is_initialized
from meshlib.init_mesh import init_device_mesh
from meshlib.labels import record_comm
from meshlib.layout import Layout
from meshlib.mesh_config import MeshConfig
from meshlib.mesh_spec import MeshDimError
from meshlib.process_group import ProcessGroup
from meshlib.profiler import profile
from meshlib.spawn import (
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
)
from meshlib.subgroups import new_subgroups, new_subgroups_by_enumeration, split_group
from meshlib.work import Future, Work, WorkResult
from transport.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    RankFailedError,
)
from transport.reduce_op import ReduceOp, premul_sum
from transport.rendezvous import register_rendezvous_handler, rendezvous
from transport.store import FileStore, HashStore, PrefixStore, Store, TCPStore

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DebugLevel",
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "Future",
    "GroupMember",
    "HashStore",
    "Layout",
    "MeshConfig",
    "MeshDimError",
    "P2POp",
    "PrefixStore",
    "ProcessException",
    "ProcessExitedException",
    "ProcessGroup",
    "ProcessRaisedException",
    "RankFailedError",
    "ReduceOp",
    "Store",
    "TCPStore",
    "Work",
    "WorkResult",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_object_list",
    "current_mesh",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "premul_sum",
    "profile",
    "record_comm",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_rendezvous_handler",
    "rendezvous",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "spawn",
    "split_group",
    "supports_complex",
]
