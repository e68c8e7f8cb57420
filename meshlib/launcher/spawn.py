"""Starting ranks from a running program: the analogue of ``torch.multiprocessing.spawn``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from transport.checks import to_whole_number

if TYPE_CHECKING:
    from meshlib.launcher.process_context import ProcessContext


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Call ``fn(rank, *args)`` in ``nprocs`` new processes.

    Each is a complete rank: ``init_process_group()`` works in it without arguments, over a store
    that this process serves. ``fn`` must be importable by name, and ``args`` picklable. When one
    rank fails, the others get SIGTERM and, seconds later, SIGKILL; ``ProcessRaisedException`` or
    ``ProcessExitedException`` says which was first and why. With ``join=False`` the processes run
    on behind the ``ProcessContext`` that is returned. They are killed when this process is; at its
    exit those that are ``daemon`` are ended, others are waited for.

    Raises ValueError for ``nprocs`` below 1 and for another ``start_method`` than ``"spawn"``,
    TypeError for an ``fn`` that cannot be called, ``args`` that are no tuple or list and ``nprocs``
    that is no number, and what ``pickle`` raises for what it cannot pickle.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}")
    if not isinstance(args, Sequence) or isinstance(args, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"args must be a tuple of arguments for fn, got {args!r}")
    if to_whole_number(nprocs, "nprocs") < 1:
        raise ValueError(f"nprocs must be at least 1, got {nprocs}")
    if start_method != "spawn":
        raise ValueError(
            f"start_method must be 'spawn', got {start_method!r}: a forked rank would inherit"
            " threads and connections that are not its own"
        )
    from meshlib.launcher.process_context import (
        ProcessContext,  # only who spawns pays for multiprocessing
    )

    context = ProcessContext(fn, tuple(args), nprocs, daemon)
    if not join:
        return context
    try:
        context.join()
    except KeyboardInterrupt:
        context.end()
        raise
    finally:
        context.close()
    return None
