"""The names of ``import meshlib as dist``, but for those of ``mesh_api`` and ``wider_api``."""

from meshlib.arrays.ignored import ResultIgnoredWarning
from meshlib.c10d.availability import (
    get_node_local_rank,
    is_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    supports_complex,
)
from meshlib.c10d.batch import P2POp, batch_isend_irecv
from meshlib.c10d.debugger import breakpoint
from meshlib.c10d.deprecated import reduce_op
from meshlib.c10d.functions.arrays import all_reduce, barrier, broadcast, monitored_barrier, reduce
from meshlib.c10d.functions.coalesced import (
    all_gather_coalesced,
    all_gather_into_tensor_coalesced,
    all_reduce_coalesced,
    reduce_scatter_tensor_coalesced,
)
from meshlib.c10d.functions.gathered import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
)
from meshlib.c10d.functions.messages import irecv, isend, recv, send
from meshlib.c10d.functions.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from meshlib.c10d.functions.personalized import all_to_all, all_to_all_single, gather, scatter
from meshlib.c10d.grad_bucket import GradBucket
from meshlib.c10d.groups import (
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
from meshlib.calls.future import Future, WaitTimeoutError
from meshlib.calls.work import Work, WorkResult, collect_all
from meshlib.groups.backend import Backend, get_default_backend_for_device, is_backend_available
from meshlib.groups.process_group import ProcessGroup
from meshlib.job.init import destroy_process_group, init_process_group, is_initialized
from meshlib.recording.log import (
    DebugLevel,
    get_debug_level,
    set_debug_level,
    set_debug_level_from_env,
)
from transport.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    QueueEmptyError,
    RankFailedError,
)
from transport.operands.compression import Compression
from transport.operands.reduce_op import ReduceOp, error_feedback, premul_sum
from transport.rendezvous import register_rendezvous_handler, rendezvous
from transport.store import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = [
    "Backend",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Compression",
    "DebugLevel",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "Future",
    "GradBucket",
    "GroupMember",
    "HashStore",
    "P2POp",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "RankFailedError",
    "ReduceOp",
    "ResultIgnoredWarning",
    "Store",
    "TCPStore",
    "WaitTimeoutError",
    "Work",
    "WorkResult",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
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
    "collect_all",
    "destroy_process_group",
    "error_feedback",
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
    "premul_sum",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "register_rendezvous_handler",
    "rendezvous",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "supports_complex",
]
