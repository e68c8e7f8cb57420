"""Functions that a notebook sends to its ranks by cloudpickle, and the cells that define them.

A cell's function uses the globals of the rank's ``__main__``, including those that earlier calls
have set. Globals of the notebook that the function uses are sent with it and overwrite the rank's.
"""

from __future__ import annotations

import ast
import io
import linecache
import marshal
import os
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

_MAIN = "__main__"
_PROTOCOL = 5


class Packed(NamedTuple):
    """An object pickled by cloudpickle, with its arrays' memory out of band."""

    data: bytes
    buffers: Sequence[Any]


def require_cloudpickle() -> Any:
    """Return the package cloudpickle. Raises ImportError with instructions to install it."""
    try:
        import cloudpickle
    except ImportError:
        raise ImportError(
            "functions of a notebook are sent by cloudpickle, which is not installed:"
            " pip install 'meshlib-spmd[notebook]'",
            name="cloudpickle",
        ) from None
    return cloudpickle


def pack(value: object) -> Packed:
    """Pickle ``value``, including functions and classes of a notebook's cells.

    Raises pickling errors.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    base = require_cloudpickle().Pickler
    # cloudpickle's own reduction loses the cell's name, which tracebacks need.
    table = ChainMap({types.CodeType: _reduce_code}, base.dispatch_table)
    pickler = type(base.__name__, (base,), {"dispatch_table": table})
    pickler(stream, _PROTOCOL, buffer_callback=buffers.append).dump(value)
    return Packed(stream.getvalue(), buffers)


def _reduce_code(code: types.CodeType) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    return marshal.loads, (marshal.dumps(code),)


def unpack(packed: Packed, namespace: dict[str, Any] | None = None) -> Any:
    """Return the packed object. Its functions of a ``__main__`` get ``namespace`` as globals."""
    return _Unpickler(packed, namespace).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: Packed, namespace: dict[str, Any] | None) -> None:
        super().__init__(io.BytesIO(packed.data), buffers=packed.buffers)
        self._namespace = namespace

    def find_class(self, module_name: str, global_name: str) -> Any:
        """See the base."""
        found = super().find_class(module_name, global_name)
        is_maker = global_name == "_make_function" and module_name.startswith("cloudpickle")
        return self._making_here(found) if is_maker and self._namespace is not None else found

    def _making_here(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def make_here(code: Any, namespace: dict[str, Any], *rest: Any) -> Any:
            of_main = namespace.get("__name__") == _MAIN
            return make(code, self._namespace if of_main else namespace, *rest)

        return make_here


# ------------------------------------------------------------------ cells


def cells(known: Collection[str] = ()) -> dict[str, list[str]]:
    """Return the lines of this process's cells, except ``known``, by their name in tracebacks."""
    return {
        name: lines
        for name, entry in linecache.cache.copy().items()  # other threads may change it
        if len(entry) == 4 and entry[1] is None and name not in known
        for lines in [entry[2]]
        if not os.path.exists(name)
    }


def remember_cell(name: str, lines: list[str]) -> None:
    """Let tracebacks show ``lines`` for code with the file name ``name``."""
    linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def execute(source: str, name: str) -> None:
    """Run the cell ``source`` in this process's ``__main__``; print its last expression's value."""
    namespace = sys.modules[_MAIN].__dict__
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)  # noqa: S102 (this is what a cell is for)
    if last is not None:
        shown = ast.Interactive([last])
        exec(compile(shown, name, "single"), namespace)  # noqa: S102


def new_main() -> dict[str, Any]:
    """Put an empty ``__main__`` in place of this process's, and return its namespace."""
    main = types.ModuleType(_MAIN)
    main.__dict__["__builtins__"] = __builtins__
    sys.modules[_MAIN] = main
    return main.__dict__
