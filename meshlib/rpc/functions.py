"""``async_execution``: remotely called functions that return a future."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from meshlib._calls.future import Future

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_meshlib_rpc_async"


def async_execution(fn: F) -> F:
    """Make remote calls of ``fn``, which returns a ``Future``, end with that future.

    The thread that runs ``fn`` is released when ``fn`` returns, so ``fn`` chains work to a future
    (``then``) instead of waiting. Put ``@staticmethod`` and ``@classmethod`` outside this
    decorator. Call methods by an RRef's ``rpc_sync()``, ``rpc_async()`` or ``remote()``.

    The call raises TypeError if ``fn`` returns anything else.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, _MARK, True)
    return wrapper  # pyright: ignore[reportReturnType]


def is_async(fn: object) -> bool:
    """Return whether ``fn`` is decorated with ``async_execution``."""
    return getattr(fn, _MARK, False) is True


def future_of(fn: object, result: object) -> Future[Any]:
    """Return ``result``, returned by an async ``fn``. Raises TypeError if it is not a future."""
    if not isinstance(result, Future):
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"{name} is marked with async_execution, and returned a {type(result).__name__};"
            " expected a Future"
        )
    return result
