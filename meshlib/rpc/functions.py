"""``async_execution``: functions that answer later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from meshlib._calls.future import Future

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_meshlib_rpc_async"


def async_execution(fn: F) -> F:
    """Have remote calls of ``fn``, which returns a ``Future``, end when that future does.

    The thread that runs ``fn`` is free as soon as ``fn`` returns: it chains later work to a future
    (``then``) instead of waiting. Put ``@staticmethod`` and ``@classmethod`` outside of this
    decorator. Call methods by an RRef's ``rpc_sync()`` and the like.

    Raises TypeError (in the call) if ``fn`` returns anything else.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, _MARK, True)
    return wrapper  # pyright: ignore[reportReturnType]


def is_async(fn: object) -> bool:
    """Return whether ``fn`` was made by ``async_execution``."""
    return getattr(fn, _MARK, False) is True


def future_of(fn: object, result: object) -> Future[Any]:
    """Return the result of an async ``fn``. Raises TypeError if that is not a future."""
    if not isinstance(result, Future):
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"{name} is marked with async_execution, and returned a {type(result).__name__};"
            " expected a Future"
        )
    return result
