"""The errors of checkpoints."""

from __future__ import annotations


class CheckpointError(ValueError):
    """There is no such checkpoint, or its tree is another one than that to be loaded."""


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, torn or changed; the message names it and its array."""
