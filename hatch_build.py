"""Builds the compiled core, the C below transport/_native and meshlib/_native, into a wheel or, if
editable, beside its sources.

With it goes the handler that XLA calls, below meshlib/_native/jit, where jaxlib and so XLA's header
are installed as the core is built. Without it ``meshlib.jit`` makes all calls by Python.

Without it ranks of one host use TCP. So where it cannot be built the wheel is a pure one, and a
line says why: here, and in ``transport._native.why_not`` of what is installed. ``MESHLIB_NATIVE=0``
asks for that, and with ``MESHLIB_NATIVE=1`` a failure is an error.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "MESHLIB_NATIVE"
SOURCES = "transport/_native"
MODULE = "transport._native._core"
MODULES = (MODULE, "meshlib._native._calls")
"""The second one works on the first one, whose headers it includes."""
REASON = f"{SOURCES}/_core.txt"
"""Where what is installed without a core says why: ``transport._native`` reads it."""
# -ffp-contract=off: the bits that NumPy computes, on every CPU.
FLAGS = ["-O3", "-ffp-contract=off", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
SECONDS = 120.0
"""What compiling, and then importing, may take."""

_IMPORT = """
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
for name, path in zip(sys.argv[1::2], sys.argv[2::2]):
    loader = ExtensionFileLoader(name, path)
    module = module_from_spec(spec_from_file_location(loader.name, path, loader=loader))
    loader.exec_module(module)
    # Whose import asks for its package as well.
    sys.modules[name] = sys.modules[name.split('.')[0]] = module
"""


class NotBuilt(Exception):
    """Why there is no compiled core, in one line."""


class CompiledCore(BuildHookInterface[BuilderConfig]):
    """Adds the compiled core to wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the core, for ``version`` 'standard' or 'editable'."""
        switch = os.environ.get(SWITCH, "")
        if switch not in {"", "0", "1"}:
            raise ValueError(
                f"environment variable {SWITCH} is {switch!r}; expected 0, 1 or nothing"
            )
        # Until the wheel has a copy.
        self._scratch = TemporaryDirectory(prefix="meshlib-core-")
        try:
            self._add_core(switch, version == "editable", build_data)
        except BaseException:
            self._scratch.cleanup()
            raise

    def _add_core(self, switch: str, editable: bool, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        binaries = {
            path: Path(self._scratch.name, Path(path).name) for path in map(binary, MODULES)
        }
        try:
            if switch == "0":
                raise NotBuilt(f"{SWITCH}=0")
            compile_core(root, *binaries.values())
            if editable:
                for inside, built in binaries.items():
                    _replace(built, root / inside)
                (root / REASON).unlink(missing_ok=True)
        except NotBuilt as reason:
            if switch == "1":
                raise RuntimeError(f"{SWITCH}=1, and no compiled core: {reason}") from None
            self.app.display_warning(f"meshlib without its compiled core: {reason}")
            note = root / REASON if editable else Path(self._scratch.name, Path(REASON).name)
            note.write_text(f"{reason}\n", encoding="utf-8")
            if editable:
                for inside in binaries:
                    (root / inside).unlink(missing_ok=True)  # from another source or compiler
            else:
                build_data["force_include"][str(note)] = REASON
            return
        if not editable:
            for inside, built in binaries.items():
                build_data["force_include"][str(built)] = inside
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what is in the wheel now."""
        self._scratch.cleanup()


def binary(module: str) -> str:
    """Return where the binary of ``module`` lies, from the root."""
    return f"{module.replace('.', '/')}{sysconfig.get_config_var('EXT_SUFFIX')}"


def compile_core(root: Path, *built: Path) -> None:
    """Compile the sources below ``root`` into ``built``, a file for each of ``MODULES`` or for the
    first ones, and see that Python can import them.

    Raises:
        NotBuilt: there is no compiler, header, source; or one of the two steps failed.
    """
    if not sys.platform.startswith("linux"):
        raise NotBuilt(f"it is for Linux, not {sys.platform}")
    if sys.implementation.name != "cpython":
        raise NotBuilt(f"it is for CPython, not {sys.implementation.name}")
    headers = sysconfig.get_path("include")
    # Paths from the root, so that the same sources give the same bytes wherever they lie.
    imported: list[str] = []
    for module, file in zip(MODULES, built, strict=False):
        folder = root.joinpath(*module.split(".")[:-1])
        sources = sorted(str(path.relative_to(root)) for path in folder.rglob("*.c"))
        if not sources:
            raise NotBuilt(f"{folder} has no sources")
        if not Path(headers, "Python.h").is_file():
            raise NotBuilt(f"{headers}/Python.h is missing")
        compiler = find_compiler()
        folders = [headers, SOURCES, *([] if module == MODULE else xla_headers())]
        includes = [word for folder in folders for word in ("-I", folder)]
        _run("compiling", [*compiler, *FLAGS, *includes, *sources, "-o", str(file)], root)
        imported += [module, str(file)]
        _run("importing", [sys.executable, "-I", "-S", "-c", _IMPORT, *imported], root)


def xla_headers() -> list[str]:
    """Return the folder of the header of XLA's calls, which comes with jaxlib, if that is here."""
    found = find_spec("jaxlib")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return [path for folder in folders if os.path.isdir(path := os.path.join(folder, "include"))]


def find_compiler() -> list[str]:
    """Return the command of the C compiler: ``CC``, or the one that Python was built with, or cc.

    Raises:
        NotBuilt: there is none.
    """
    given = os.environ.get("CC")
    for words in [given] if given else [sysconfig.get_config_var("CC"), "cc"]:
        try:
            command = shlex.split(words or "")
        except ValueError as error:
            raise NotBuilt(f"the C compiler's command {words!r}: {error}") from error
        if command and shutil.which(command[0]):
            return command
    raise NotBuilt(f"there is no C compiler {given or 'cc'!r}")


def _replace(built: Path, target: Path) -> None:
    """Put a copy of ``built`` in place, not overwriting what a process may have mapped."""
    waiting = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(built, waiting)
        waiting.replace(target)
    except OSError as error:
        waiting.unlink(missing_ok=True)
        raise NotBuilt(f"cannot write {target}: {error}") from error


def _run(what: str, command: list[str], root: Path) -> None:
    """Run ``command``; raises NotBuilt with what it printed if it fails or takes too long."""
    with TemporaryDirectory(prefix="meshlib-core-") as scratch:
        log = Path(scratch, "output")
        with log.open("wb") as output:
            try:
                # In a group of its own, because a compiler's driver has others do its work.
                process = subprocess.Popen(
                    command,
                    cwd=root,
                    env={**os.environ, "LC_ALL": "C"},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            except OSError as error:
                raise NotBuilt(f"{what} with {command[0]}: {error}") from error
            try:
                status = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                raise NotBuilt(f"{what} with {command[0]} took over {SECONDS:g} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if status:
            lines = log.read_text(errors="replace").split("\n")
            shown = next((line for line in lines if "error:" in line.lower()), lines[0]).strip()
            ended = f"{what} with {command[0]} ended with status {status}"
            raise NotBuilt(f"{ended}: {shown}" if shown else ended)
