"""Counts the bytes that our transports copy, reduce, and give to and take from sockets.

Run as a program it is ``meshlib._bench.jobs.worker``, with counts in its answers. It is run by its
path, and imports nothing of ours until ``install`` has seen to it that the modules of ``transport``
are compiled with each store into a slice, each call of NumPy that has an ``out`` or is ``copyto``,
and each read and write of a socket noted at run time, by what the arrays really are. Counting costs
time, so nothing is timed in such a process.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import numpy as np

_PACKAGE = "transport"
_ON_SOCKETS = {"send", "sendmsg", "recv_into", "recvmsg_into"}
NAME = "__meshlib_bench_counting__"


@dataclass(slots=True)
class Counted:
    """Bytes since the process began. A message over a socket counts at both ends."""

    copied: int = 0
    reduced: int = 0
    sockets: int = 0


class Counter:
    """The functions that the rewritten modules call instead of the original operations."""

    def __init__(self) -> None:
        self.counted = Counted()
        self._lock = threading.Lock()

    def store(self, target: Any, index: Any, value: Any) -> None:
        """Do ``target[index] = value``."""
        target[index] = value
        if isinstance(target, (np.ndarray, memoryview)):
            part = target[index]
            self._note(copied=part.nbytes if isinstance(part, (np.ndarray, memoryview)) else 0)

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Do ``function(*args, **kwargs)``."""
        result = function(*args, **kwargs)
        owner = getattr(function, "__self__", None)
        if function is np.copyto:
            self._note(copied=args[0].nbytes)
        elif function is np.bitwise_or and args[0] is args[1]:  # a copy
            self._note(copied=kwargs["out"].nbytes)
        elif isinstance(owner, socket.socket):
            count = result if isinstance(result, int) else result[0]
            self._note(sockets=count)
        elif isinstance(out := kwargs.get("out"), np.ndarray):
            if isinstance(function, np.ufunc):
                self._note(reduced=out.nbytes)
            elif function is np.concatenate:
                self._note(copied=out.nbytes)
        return result

    def _note(self, copied: int = 0, reduced: int = 0, sockets: int = 0) -> None:
        with self._lock:
            self.counted.copied += copied
            self.counted.reduced += reduced
            self.counted.sockets += sockets


class _Rewriter(ast.NodeTransformer):
    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        target = node.targets[0]
        if len(node.targets) > 1 or not isinstance(target, ast.Subscript):
            return node
        index = target.slice
        if isinstance(index, ast.Slice):
            ends = [end or ast.Constant(None) for end in (index.lower, index.upper, index.step)]
            index = ast.Call(ast.Name("slice", ast.Load()), ends, [])
        call = ast.Call(_counters("store"), [target.value, index, node.value], [])
        return ast.copy_location(ast.Expr(call), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        has_out = any(keyword.arg == "out" for keyword in node.keywords)
        if not has_out and name != "copyto" and name not in _ON_SOCKETS:
            return node
        call = ast.Call(_counters("call"), [node.func, *node.args], node.keywords)
        return ast.copy_location(call, node)


def rewritten(source: bytes, path: str) -> CodeType:
    """Return the code of a module in which ``NAME`` must be a ``Counter``."""
    tree = _Rewriter().visit(ast.parse(source))
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


def _counters(name: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(NAME, ast.Load()), name, ast.Load())


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles from source, past what is cached, and leaves nothing in the cache."""

    def __init__(self, name: str, path: str, counter: Counter) -> None:
        super().__init__(name, path)
        self._counter = counter

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return rewritten(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, NAME, self._counter)
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _PACKAGE and not fullname.startswith(_PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        loader = _Loader(fullname, spec.loader.path, self._counter)
        return importlib.util.spec_from_file_location(
            fullname,
            loader.path,
            loader=loader,
            submodule_search_locations=spec.submodule_search_locations,
        )


def install() -> Counter:
    """Count from now on; raise RuntimeError when modules to be counted are imported already."""
    if early := sorted(name for name in sys.modules if name.startswith(_PACKAGE + ".")):
        raise RuntimeError(f"counting must begin before these are imported: {', '.join(early)}")
    counter = Counter()
    sys.meta_path.insert(0, _Finder(counter))
    return counter


def main() -> None:
    """Be a rank that counts."""
    sys.path.pop(0)  # this file's folder
    os.environ["MESHLIB_NATIVE"] = "0"  # so: no shared memory, whose engine nothing here sees
    counter = install()
    worker = importlib.import_module("meshlib._bench.jobs.worker")
    worker.main(counter.counted)


if __name__ == "__main__":
    main()
