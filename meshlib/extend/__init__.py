"""The interface for libraries above meshlib. ``parallel`` uses no other private part.

Programs do not need it. Its names are public (docs/reference/compatibility.md), and documented in
docs/reference/meshlib/extend.md:

- ``Job``: the calling rank's job, its groups, and the change to the next epoch;
- groups: ``derived_group``, ``on_failure``, ``failure_of``, ``is_usable``, ``is_idle``, ``fail``;
- meshes: ``mesh_key``;
- calls: ``observe``, ``issue``, ``recorded``, ``at_once``, and the descriptions of a call;
- checks of arguments: ``to_seconds``, ``to_whole_number``, ``to_whole_numbers``;
- ``dump`` and ``load``: objects as bytes, in the format of collectives on objects;
- ``meshlib.extend.jit``: Python called from compiled JAX programs (needs JAX).
"""

from meshlib._arrays.pickling import Payload, dump, load
from meshlib._calls.context import Observer
from meshlib._calls.future import at_once
from meshlib._calls.members import Members
from meshlib._calls.spec import CallSpec, Run
from meshlib._job.continuing.epochs import Change, Choose
from meshlib._job.current import derived_group
from meshlib._job.membership import Epoch
from meshlib._mesh.value import mesh_key
from meshlib._recording.log import RankLog
from meshlib._recording.recorder import Record
from meshlib.extend._calls import issue, observe, recorded
from meshlib.extend._groups import (
    fail,
    failure_of,
    is_idle,
    is_usable,
    log_of,
    on_failure,
)
from meshlib.extend._job import Job
from transport._calls.call import Call
from transport._calls.codes import dtype_name, op_name
from transport._calls.header import CallHeader, Kind
from transport._checks import to_whole_number, to_whole_numbers
from transport._communicators.base import Communicator
from transport._waiting.deadline import Timeout, to_seconds

__all__ = [
    "Call",
    "CallHeader",
    "CallSpec",
    "Change",
    "Choose",
    "Communicator",
    "Epoch",
    "Job",
    "Kind",
    "Members",
    "Observer",
    "Payload",
    "RankLog",
    "Record",
    "Run",
    "Timeout",
    "at_once",
    "derived_group",
    "dtype_name",
    "dump",
    "fail",
    "failure_of",
    "is_idle",
    "is_usable",
    "issue",
    "load",
    "log_of",
    "mesh_key",
    "observe",
    "on_failure",
    "op_name",
    "recorded",
    "to_seconds",
    "to_whole_number",
    "to_whole_numbers",
]
