"""c10d's functions: each finds the group and calls its method of the same name.

A function and its method share their words. They are written at the method;
``tests/docs/shared_docstrings.py`` copies them (``make format``), and a test compares.
"""

from meshlib.c10d.functions.arrays import (
    all_reduce,
    barrier,
    broadcast,
    monitored_barrier,
    reduce,
)
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
from meshlib.c10d.functions.messages import (
    irecv,
    isend,
    recv,
    send,
)
from meshlib.c10d.functions.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from meshlib.c10d.functions.personalized import (
    all_to_all,
    all_to_all_single,
    gather,
    scatter,
)

__all__ = [
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
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
]
