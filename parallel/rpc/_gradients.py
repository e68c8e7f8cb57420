"""The carrier that makes remote calls differentiable."""

from __future__ import annotations

import sys
from typing import Any

from meshlib import rpc
from parallel.rpc._contexts import ContextStore
from parallel.rpc._engine import backward


class Gradients(ContextStore):
    """The carrier of gradients (``rpc.Differentiating``)."""

    def replace(
        self,
        request: rpc.PreparedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        creates: bool,
    ) -> Any:
        """Return a differentiable call inside a function that JAX differentiates, else None."""
        if "jax" not in sys.modules:
            return None
        from parallel.rpc._traced import replaced

        return replaced(self, request, args, kwargs, creates)

    def backward(self, context_id: int, value: object, retain_graph: bool) -> None:
        """Compute the gradients of ``value``."""
        backward(self, context_id, [value], retain_graph)
