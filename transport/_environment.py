"""The environment variables that a launcher sets for its ranks, or a user for both.

The first group is torchrun's; the second is meshlib's.
"""

from __future__ import annotations

RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"

SECRET = "MESHLIB_SECRET"  # noqa: S105 (a variable's name)
"""The job's secret, in hexadecimal; every connection of the job proves that it knows it."""

SECRET_FILE = "MESHLIB_SECRET_FILE"  # noqa: S105 (a variable's name)
"""The file with the secret if MESHLIB_SECRET is unset; default: ``meshlib secret``'s file."""

LAUNCHER = "MESHLIB_LAUNCHER"
"""The engine that started this process, if detection is wrong: ``slurm``, ``openmpi``, ``pmi``,
``torchrun``, ...; ``none``: this process is alone, a world of one.
"""

ENGINE_RESTARTS = "MESHLIB_ENGINE_RESTARTS"
"""The number of times that an engine restarted the whole job, if it has no variable of its own.

It becomes part of the job's name, so that a node left over from an earlier start is refused.
"""

TLS_CERT = "MESHLIB_TLS_CERT"
"""A file with this process's certificate, in PEM. With the next two set, all TCP uses TLS."""

TLS_KEY = "MESHLIB_TLS_KEY"
"""A file with the private key of that certificate."""

TLS_CA = "MESHLIB_TLS_CA"
"""A file with the certificate of the authority that signed those of all processes of the job."""

TLS = (TLS_CERT, TLS_KEY, TLS_CA)
"""A process sets all three, or none."""
TLS_EVERYWHERE = (
    f"({TLS_CERT}, {TLS_KEY} and {TLS_CA} must be set in all processes of a job, or in none)"
)
"""The end of the error message if only one side uses TLS."""

RDZV = "MESHLIB_RDZV"
"""The default of ``meshrun --rdzv``. A password is safe here; other users see a command line."""

AGENT_STORE = "MESHLIB_AGENT_STORE"
"""``HOST:PORT`` of the launcher's store, of which rank 0 is a client, too. If the store is in an
etcd, a space and its URL follow.

Ranks ignore this variable if MASTER_ADDR and MASTER_PORT differ from it. Then the program has set
those itself, and rank 0 serves the store there.
"""

RUN_ID = "MESHLIB_RUN_ID"
"""The name of this launch, which the launcher sets for all ranks."""

RESTART_COUNT = "MESHLIB_RESTART_COUNT"
"""The launcher's count of restarts of the ranks; keys in the store are prefixed with it."""

JOIN = "MESHLIB_JOIN"
"""``1``: this rank joins a running job of ``WORLD_SIZE`` ranks; its RANK is at least that."""

MESH = "MESHLIB_MESH"
"""The argument of ``meshrun --mesh``: ``dp=2,tp=2``, or the contents of a file, as JSON.

Without a launcher it may also be the path of a config file.
"""

CPUS = "MESHLIB_CPUS"
"""The CPUs to which ``meshrun --numa`` binds this rank at its start, as ``0-3,8``."""

ERROR_FILE = "MESHLIB_ERROR_FILE"
"""The file for the exception that ended this rank, as JSON; the launcher prints it."""

TRACE_DIR = "MESHLIB_TRACE_DIR"
"""The directory for flight-recorder dumps."""

TRACE_CALLS = "MESHLIB_TRACE_CALLS"
"""The number of calls in each rank's flight recorder."""

HOST = "MESHLIB_HOST"
"""The address at which other ranks reach this one; default: that of the route to the store."""

SITE = "MESHLIB_SITE"
"""The name of this host's site: hosts near each other and far from others. Data is reduced inside
a site before it crosses to another one. All hosts without a name are one site.
"""

TCP_CONNECTIONS = "MESHLIB_TCP_CONNECTIONS"
"""The number of TCP connections to a rank with a round trip of 1 ms or more, 1 to 16; default 4."""

TUNING = "MESHLIB_TUNING"
"""A file from ``meshlib tune``, the same on all ranks: the sizes at which algorithms change."""

DEBUG = "MESHLIB_DEBUG"
"""The amount of logging: ``OFF``, ``INFO`` or ``DETAIL``."""

ANY_JAX = "MESHLIB_ANY_JAX"
"""``1``: let ``meshlib.jit`` use versions of JAX with which it was not tested."""

NATIVE = "MESHLIB_NATIVE"
"""``0``: do not use the compiled core.

When meshlib is installed, ``0`` skips the build of the core; ``1`` makes a failed build an error.
"""
