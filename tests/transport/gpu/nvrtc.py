"""NVRTC through ctypes: CUDA's compiler at run time, which needs neither a GPU nor a driver.

It comes with CUDA, and as the packages nvidia-cuda-nvrtc-cu12 and nvidia-cuda-nvrtc.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import sys
from pathlib import Path
from typing import Any


@functools.cache
def load() -> Any:
    """The library, or None if there is none."""
    packaged = [
        found
        for folder in sys.path
        for found in sorted(Path(folder, "nvidia").glob("*/lib/libnvrtc.so.*"))
        if "builtins" not in found.name and "alt" not in found.name
    ]
    for name in (*map(str, packaged), ctypes.util.find_library("nvrtc")):
        if name:
            try:
                return ctypes.CDLL(name)
            except OSError:
                continue
    return None


def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert load().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    return major.value, minor.value


def architectures() -> list[int]:
    """The architectures of this NVRTC: 80, 90 …"""
    count = ctypes.c_int()
    assert load().nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
    found = (ctypes.c_int * count.value)()
    assert load().nvrtcGetSupportedArchs(found) == 0
    return list(found)


def compile_for(source: str, architecture: int, *options: str) -> tuple[str, bytes]:
    """Compile for a real architecture; return what was said, and the machine code (empty: failed).

    Machine code, not PTX: so the inline assembly is assembled too.
    """
    library, program = load(), ctypes.c_void_p()
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
    )
    assert status == 0
    try:
        given = [option.encode() for option in (f"-arch=sm_{architecture}", *options)]
        status = library.nvrtcCompileProgram(
            program, len(given), (ctypes.c_char_p * len(given))(*given)
        )
        log = _text(library, program, "ProgramLog").rstrip(b"\0").decode()
        return log, b"" if status else _text(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: Any, program: Any, what: str) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(max(size.value, 1))
    assert getattr(library, f"nvrtcGet{what}")(program, text) == 0
    return text.raw[: size.value]
