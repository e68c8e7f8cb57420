"""The engine that started this process, and the place that it assigned: a rank's, or a node's.

One file an engine; each is asked two questions (``LaunchEnvironment.place`` and ``.node``) about
the environment's variables. Nothing of an engine's is imported, and none is spoken to.
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
