"""The errors of checkpoints."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A missing checkpoint, or one whose tree differs from the tree to load."""


class CorruptCheckpointError(CheckpointError):
    """A missing, torn or changed file of a checkpoint; the message names the file and its array."""
