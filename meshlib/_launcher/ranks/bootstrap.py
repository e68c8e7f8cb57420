"""The start of a rank's process: runs the user's program, and records the error that ends it.

Python runs it as a file, not as a module. It imports only the standard library, so the program
decides whether and when NumPy or the rest of this package is loaded. ``__main__``, ``sys.argv``,
``sys.path[0]`` and tracebacks are as if Python had started the program directly. So pickling
classes of ``__main__`` and multiprocessing inside a rank work.

Arguments: PARENT_PID FLAGS KIND TARGET [ARGS...]. FLAGS is ``-`` or letters: with ``l``, standard
output and error are line-buffered; with ``q``, the launcher prints the traceback. With ``f`` and a
descriptor, this process is not a rank but forks ranks (``forking``). KIND is ``script``, ``module``
or ``program`` (any executable).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import CodeType, ModuleType, TracebackType

_ERROR_FILE = "MESHLIB_ERROR_FILE"  # transport._environment.ERROR_FILE, without the import
_CPUS = "MESHLIB_CPUS"
SERVE = "f"
_PR_SET_PDEATHSIG = 1
_PARENT_SECONDS = 0.2
BELL = signal.SIGURG
"""Sent to the launcher after an error file is written, because the process may end late or never
(a thread that does not return). The default action ignores it."""


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process (SIGKILL) when its parent, process ``parent``, ends.

    If the parent has already ended, exit immediately; the check after the request closes the race.
    Without support in the kernel, a thread polls the parent.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        import threading

        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
        return
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        os._exit(1)


def _end_after(parent: int) -> None:
    import time

    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def users_traceback(error: BaseException, runner: str = __file__) -> TracebackType | None:
    """Return the traceback of ``error`` without its first frames in ``runner`` and in Python's
    import machinery.
    """
    frame = error.__traceback__
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if name != runner and not name.startswith("<frozen "):
            break
        frame = frame.tb_next
    return frame


def types_of(error: BaseException) -> list[str]:
    """Return the class and base class names of ``error`` and of its causes and contexts."""
    link: BaseException | None = error
    types: dict[str, None] = {}
    while link is not None and len(types) < 1000:
        types.update(dict.fromkeys(cls.__name__ for cls in type(link).__mro__[:-1]))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return list(types)


def describe_error(error: BaseException, rank: int, runner: str = __file__) -> dict[str, object]:
    """Return ``error`` as JSON values; ``runner`` is the file that called the user's code.

    The launcher uses ``types`` to distinguish an original error from the echo of another rank's.
    """
    import time
    import traceback

    lines = traceback.format_exception(type(error), error, users_traceback(error, runner))
    return {
        "rank": rank,
        "pid": os.getpid(),
        "time": time.time(),
        "monotonic": time.monotonic(),
        "type": type(error).__name__,
        "types": types_of(error),
        "message": _text(error),
        "traceback": "".join(lines),
    }


def write_error_file(path: str, record: dict[str, object]) -> None:
    """Write the result of ``describe_error`` to ``path``, completely or not at all."""
    import json

    partial = f"{path}.{os.getpid()}"
    with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(record, file)
    os.replace(partial, path)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 (a broken __str__ must not hide the error)
        return f"<{type(error).__name__} whose text raises {failure!r}>"


def _record(error: BaseException, parent: int) -> bool:
    path = os.environ.get(_ERROR_FILE)
    if not path or os.getppid() != parent:  # a fork of the rank that returned to the top level
        return False
    try:
        write_error_file(path, describe_error(error, int(os.environ.get("RANK", "-1"))))
        os.kill(parent, BELL)
    except OSError:  # a full disk must not replace the user's exception
        return False
    return True


def _show_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    del trace
    sys.__excepthook__(kind, error, users_traceback(error))


def _print_nothing(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print nothing: the launcher prints only the traceback of the first failed rank."""


def _script(path: str) -> tuple[ModuleType, CodeType]:
    """Load ``path`` like ``python path``."""
    from importlib.machinery import SourceFileLoader

    full = os.path.abspath(path)
    loader = SourceFileLoader("__main__", full)
    main = _new_main(__file__=full, __loader__=loader)
    return main, loader.source_to_code(loader.get_data(full), full)


def _module(name: str) -> tuple[ModuleType, CodeType]:
    """Load ``name`` like ``python -m name``; for a package, its ``__main__``."""
    from importlib.util import find_spec

    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = find_spec(name)
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(name) if get_code is not None else None
    if spec is None or code is None:
        raise ImportError(f"No module named {name!r} that can be run with -m")
    main = _new_main(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    if spec.origin is not None:
        sys.argv[0] = spec.origin
    return main, code


def _serve(flags: str, parent: int) -> str:
    """Serve as the process from which ranks are forked; return in each rank, with its flags."""
    try:
        from meshlib._launcher.ranks.forking import serve
    except Exception:  # noqa: BLE001 (ranks are then started by exec, and show the error)
        os._exit(1)
    flags = serve(int(flags.removeprefix(SERVE)), parent)
    die_with_parent(parent)
    return flags


def _new_main(**names: object) -> ModuleType:
    """Replace ``__main__`` by a module with ``names``, as this Python version creates it."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__)
    if "__annotations__" in globals():
        main.__annotations__ = {}
    if "__cached__" in globals():
        main.__dict__["__cached__"] = None
    main.__dict__.update(names)
    sys.modules["__main__"] = main
    return main


def _is_archive(path: str) -> bool:
    """Return whether ``path`` is a zip file, which Python runs like a directory."""
    if path.endswith(".py"):
        return False
    from zipimport import ZipImportError, zipimporter

    try:
        zipimporter(path)
    except ZipImportError:
        return False
    return True


def _run(kind: str, target: str) -> None:
    if kind == "script" and (os.path.isdir(target) or _is_archive(target)):
        import runpy

        if not sys.flags.safe_path:
            del sys.path[0]  # Python has the program itself there; runpy adds it
        runpy.run_path(target, run_name="__main__")
        return
    main, code = _script(target) if kind == "script" else _module(target)
    exec(code, main.__dict__)  # noqa: S102 (running the user's program is what this file is for)


def _bind() -> None:
    """Bind this process and its later threads to the CPUs that the launcher has chosen."""
    cpus: set[int] = set()
    for item in filter(None, os.environ.get(_CPUS, "").split(",")):
        first, _, last = item.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    if cpus:
        os.sched_setaffinity(0, cpus)


def _unblock_interrupts() -> None:
    """Unblock SIGINT, which the launcher blocked for the start of this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))


def main() -> None:
    """Run the program of the arguments; see the module's docstring."""
    parent, flags, kind, target = int(sys.argv[1]), *sys.argv[2:5]
    die_with_parent(parent)
    if kind == "program":
        _bind()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _unblock_interrupts()
        os.execvp(target, [target, *sys.argv[5:]])  # noqa: S606 (the parent-death signal stays)
    if not sys.flags.safe_path:  # as Python sets it for a script, and for -m
        of_script = os.path.dirname(os.path.realpath(target))
        sys.path[0] = of_script if kind == "script" else os.getcwd()
    if flags.startswith(SERVE):
        flags = _serve(flags, parent)
    _bind()
    import faulthandler

    with contextlib.suppress(RuntimeError, OSError):  # standard error is closed
        faulthandler.enable()  # a segmentation fault prints the Python stack
    sys.modules["meshrun bootstrap"] = sys.modules["__main__"]  # keeps these functions alive
    sys.argv[:] = [target, *sys.argv[5:]]
    if "l" in flags:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    sys.excepthook = _show_traceback
    try:
        _unblock_interrupts()
        _run(kind, target)
    except SystemExit:
        raise
    except BaseException as error:  # the launcher reports any exception
        if _record(error, parent) and "q" in flags and sys.excepthook is _show_traceback:
            sys.excepthook = _print_nothing
        raise


if __name__ == "__main__":
    main()
