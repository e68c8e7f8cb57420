"""The environment variables that connect a launcher with the ranks that it starts.

The first group is torchrun's; the second is ours.
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
"""A file with the secret, where no variable has it; default: what ``meshlib secret`` wrote."""

LAUNCHER = "MESHLIB_LAUNCHER"
"""The engine that started this process, where the guess would be another: ``slurm``, ``openmpi``,
``pmi``, ``torchrun``, ...; ``none``: this process is alone, a world of one.
"""

ENGINE_RESTARTS = "MESHLIB_ENGINE_RESTARTS"
"""The number of times that an engine restarted the whole job, if it has no variable of its own.

It becomes part of the job's name, so that a node that is left of an earlier start is refused.
"""

TLS_CERT = "MESHLIB_TLS_CERT"
"""A file with this process's certificate, in PEM; with the next two, all TCP is inside TLS."""

TLS_KEY = "MESHLIB_TLS_KEY"
"""A file with the private key of that certificate."""

TLS_CA = "MESHLIB_TLS_CA"
"""A file with the authority that has signed the certificates of all processes of the job."""

TLS = (TLS_CERT, TLS_KEY, TLS_CA)
TLS_EVERYWHERE = (
    f"({TLS_CERT}, {TLS_KEY} and {TLS_CA} must be set in all processes of a job, or in none)"
)
"""The end of an error that says that one side speaks TLS and the other does not."""
"""All three, or none, are set."""

RDZV = "MESHLIB_RDZV"
"""What ``meshrun --rdzv`` is not given: a command line, unlike this, shows a password to others."""

AGENT_STORE = "MESHLIB_AGENT_STORE"
"""``HOST:PORT`` of the store that the launcher serves: rank 0 is a client of it, too. Where the
store is in an etcd, a space and its URL follow.

It holds while MASTER_ADDR and MASTER_PORT say the same. A program that sets those itself, as many
do, has rank 0 serve its store there.
"""

RUN_ID = "MESHLIB_RUN_ID"
"""Names this launch; set by the launcher in every rank."""

RESTART_COUNT = "MESHLIB_RESTART_COUNT"
"""The launcher's count of restarts of the ranks; keys in the store are prefixed with it."""

JOIN = "MESHLIB_JOIN"
"""``1``: this rank comes to a job that has begun with ``WORLD_SIZE`` others; its RANK is above."""

MESH = "MESHLIB_MESH"
"""The mesh that ``meshrun --mesh`` was given: ``dp=2,tp=2``, or what it read from a file, as JSON.

Without a launcher it may also be the path of a config file.
"""

CPUS = "MESHLIB_CPUS"
"""The CPUs that this rank is bound to when it begins, as ``0-3,8``: ``meshrun --numa``."""

ERROR_FILE = "MESHLIB_ERROR_FILE"
"""The file for the exception that ended this rank, as JSON; the launcher prints it."""

TRACE_DIR = "MESHLIB_TRACE_DIR"
"""The directory for flight-recorder dumps."""

TRACE_CALLS = "MESHLIB_TRACE_CALLS"
"""The number of calls that each rank's flight recorder keeps."""

HOST = "MESHLIB_HOST"
"""The address at which other ranks reach this one; default: the interface towards the store."""

SITE = "MESHLIB_SITE"
"""The name of this host's site, whose hosts are near each other and far from others: what crosses
between sites is reduced inside them first. Equal names are one site, and so are hosts without.
"""

TCP_CONNECTIONS = "MESHLIB_TCP_CONNECTIONS"
"""The number of TCP connections to a rank with a round trip of 1 ms or more, 1 to 16; default 4."""

TUNING = "MESHLIB_TUNING"
"""A file that ``meshlib tune`` wrote: where one algorithm gives way to another, on all ranks."""

DEBUG = "MESHLIB_DEBUG"
"""The amount of logging: ``OFF``, ``INFO`` or ``DETAIL``."""

ANY_JAX = "MESHLIB_ANY_JAX"
"""``1``: have ``meshlib.jit`` try versions of JAX that it is not tested with."""

NATIVE = "MESHLIB_NATIVE"
"""``0``: do without the compiled core.

So it is when meshlib is installed: with ``0`` the core is not built, and with ``1`` it has to be.
"""
