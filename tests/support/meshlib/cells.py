"""A notebook without IPython: cells that run in a namespace, with their lines for tracebacks."""

from __future__ import annotations

import itertools
import linecache


class Cells:
    """The namespace of a notebook, called ``__main__`` as in a kernel; calling it runs a cell."""

    _numbers = itertools.count(1)  # of all notebooks: a rank keeps the lines of earlier cells

    def __init__(self, **variables) -> None:
        self.names = {"__name__": "__main__", **variables}

    def __call__(self, source: str):
        """Run ``source``; return the value of its last line if that is an expression."""
        name = f"<cell {next(self._numbers)}>"
        lines = source.splitlines(keepends=True)
        linecache.cache[name] = (len(source), None, lines, name)
        *body, last = source.rstrip().split("\n")
        try:
            value = compile("\n" * len(body) + last, name, "eval")
        except SyntaxError:
            exec(compile(source, name, "exec"), self.names)
            return None
        exec(compile("\n".join(body), name, "exec"), self.names)
        return eval(value, self.names)
