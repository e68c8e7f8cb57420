"""The names that ``import meshlib as dist`` shows and a program may do without: shardings, more
ways to make groups, profiles, ranks that a program starts itself.

What they need is imported when the first of them is asked for.
"""

from meshlib.c10d.profiler import profile, record_comm
from meshlib.c10d.shrink import shrink_group
from meshlib.c10d.subgroups import new_subgroups, new_subgroups_by_enumeration, split_group
from meshlib.launcher.spawn import (
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
)
from meshlib.sharding import (
    DArray,
    P,
    Partial,
    Replicate,
    Shard,
    Sharding,
    ShardingError,
    distribute_array,
)

__all__ = [
    "DArray",
    "P",
    "Partial",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "Replicate",
    "Shard",
    "Sharding",
    "ShardingError",
    "distribute_array",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "profile",
    "record_comm",
    "shrink_group",
    "spawn",
    "split_group",
]
