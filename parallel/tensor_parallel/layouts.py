"""How an activation lies on the ranks before and after a module: which of torch's placements."""

from __future__ import annotations

from meshlib.sharding import Partial, Replicate, Shard
from parallel.checks import describe

Placement = Shard | Replicate | Partial


def sequence_dim(layout: object, name: str) -> int | None:
    """Return the dim that ``layout``, called ``name``, is split along; None if it is whole.

    Raises TypeError for what is neither ``Shard`` nor ``Replicate``.
    """
    if isinstance(layout, Shard):
        return layout.dim
    if isinstance(layout, Replicate):
        return None
    raise TypeError(f"{name} must be Replicate() or Shard(dim), got {describe(layout)}")


def features_split(layout: object, name: str) -> bool:
    """Return whether ``layout``, called ``name``, has features split (None), or is whole.

    Raises TypeError for what is neither None nor ``Replicate``.
    """
    if layout is not None and not isinstance(layout, Replicate):
        raise TypeError(
            f"{name} must be Replicate() or None, for features that are split, got"
            f" {describe(layout)}"
        )
    return layout is None
