"""Starts ranks from a running program, like ``torch.multiprocessing.spawn``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pickle import PicklingError
from typing import TYPE_CHECKING, Any

from transport._checks import to_whole_number

if TYPE_CHECKING:
    from meshlib._launcher.process_context import ProcessContext


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Call ``fn(rank, *args)`` in ``nprocs`` new processes.

    Each process is a rank: ``init_process_group()`` works there without arguments, with a store
    that this process serves. ``fn`` must be importable by name, and ``args`` picklable. If a rank
    fails, the others get SIGTERM and, seconds later, SIGKILL. ``ProcessRaisedException`` or
    ``ProcessExitedException`` names the first failed rank and the cause. With ``join=False``, the
    function returns a ``ProcessContext`` while the processes run. They are killed if this process
    is killed. At its exit, ``daemon`` processes are ended and others awaited.

    Raises ValueError for ``nprocs`` below 1 and for a ``start_method`` other than ``"spawn"``.
    Raises TypeError if ``fn`` is not callable, ``args`` is not a tuple or list, or ``nprocs`` is
    not a number. Raises ``pickle``'s errors, such as ``PicklingError`` for objects of a notebook's
    cell, a prompt or ``python -c``, which other processes cannot import.
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
    for value in (fn, *args):
        _check_importable(value)
    # Imported here, because multiprocessing is slow to import.
    from meshlib._launcher.process_context import ProcessContext

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


def _check_importable(value: object) -> None:
    """Raise PicklingError for an object of a ``__main__`` that new processes cannot import."""
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) or getattr(main, "__spec__", None):
        return  # multiprocessing imports it there under another name
    if getattr(value, "__module__", None) != "__main__":
        return
    cls = type(value)
    name = getattr(value, "__qualname__", None) or f"an instance of {cls.__qualname__}"
    raise PicklingError(
        f"{name} is defined in a notebook's cell, at a prompt or in python -c, so a new process"
        " cannot import it from a file. Ranks that run functions of cells:"
        " `with meshlib.local_ranks(4) as ranks: ranks.run(function)`. Or write it into a module"
        " (`%%writefile ranks.py` at the top of its cell, then `from ranks import ...`), or use"
        " ranks that are threads: meshlib.testing.run_ranks(function, world_size)"
    )
