"""Checkpoints of sharded states that load on any mesh, in Zarr's format.

``save`` and ``load`` work on a tree of arrays and values. A ``Checkpointer`` saves in the
background and keeps the newest and the best checkpoints. See docs/train/checkpoints.md.
"""

from meshlib.checkpoint._checkpointer import Checkpointer, load, save
from meshlib.checkpoint._errors import CheckpointError, CorruptCheckpointError
from meshlib.checkpoint._files.folder import latest_step
from meshlib.checkpoint._safetensors import (
    SafetensorsFiles,
    export_safetensors,
    import_safetensors,
)

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "CorruptCheckpointError",
    "SafetensorsFiles",
    "export_safetensors",
    "import_safetensors",
    "latest_step",
    "load",
    "save",
]
