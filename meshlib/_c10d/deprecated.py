"""Names that c10d keeps for old programs."""

from __future__ import annotations

import warnings

from transport._operands.reduce_op import ReduceOp


class _ReduceOpAlias:
    """``reduce_op``, the deprecated name of ``ReduceOp``: reading an op from it warns."""

    def __getattr__(self, name: str) -> ReduceOp:
        if name not in ("SUM", "PRODUCT", "MIN", "MAX"):
            raise AttributeError(f"reduce_op has no {name}; it has SUM, PRODUCT, MIN and MAX")
        warnings.warn("reduce_op is deprecated; use ReduceOp", FutureWarning, stacklevel=2)
        return getattr(ReduceOp, name)


reduce_op: _ReduceOpAlias = _ReduceOpAlias()
