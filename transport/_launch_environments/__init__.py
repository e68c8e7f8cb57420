"""The engine that started this process, and the place of the rank or node that it assigned.

Each engine has a module with a ``LaunchEnvironment``, whose methods ``place`` and ``node`` read the
environment variables. No engine's package is imported, and no engine is contacted.
"""

from transport._launch_environments.base import (
    DEFAULT_PORT,
    LaunchEnvironment,
    LaunchEnvironmentError,
    NodePlace,
    RankPlace,
    derived_port,
    number_in,
)
from transport._launch_environments.detection import (
    KNOWN,
    NONE,
    detect,
    detect_nodes,
    engine_restarts,
    hints,
    launched_local_rank,
)
from transport._launch_environments.slurm import Slurm, first_host

__all__ = [
    "DEFAULT_PORT",
    "KNOWN",
    "NONE",
    "LaunchEnvironment",
    "LaunchEnvironmentError",
    "NodePlace",
    "RankPlace",
    "Slurm",
    "derived_port",
    "detect",
    "detect_nodes",
    "engine_restarts",
    "first_host",
    "hints",
    "launched_local_rank",
    "number_in",
]
