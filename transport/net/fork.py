"""What a forked child must not keep open.

A copy of a descriptor in a child hides its parent's death from whoever watches the descriptor: a
connection or a lock ends when its last copy does. (Children that are started with exec are no
concern: no descriptor of ours is inherited through it.)
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Closable(Protocol):
    """Anything with ``close()`` that weak references can refer to."""

    def close(self) -> None:
        """Let go of it."""
        ...


# Inherently one a process, as the hook is that reads it.
_OPEN: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_forked_children(closable: Closable) -> None:
    """Have ``closable`` closed in every child that this process forks without exec."""
    _OPEN.add(closable)


def _close_all() -> None:
    for closable in list(_OPEN):
        with contextlib.suppress(OSError):
            closable.close()


os.register_at_fork(after_in_child=_close_all)
