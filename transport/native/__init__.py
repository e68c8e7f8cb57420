"""The compiled core, where there is one: see ``core.h``. All it does, Python does as well."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from transport import environment


class Core(Protocol):
    """What the compiled module has. A class with a twin in Python is typed as that one."""

    MOST_MEMBERS: int
    Board: type[Any]
    CallFields: type[Any]
    Laps: type[Any]
    Order: type[Any]
    Progress: type[Any]
    RingEnd: type[Any]
    Ring: type[Any]
    Shortcut: type[Any]
    share_all_reduce: Callable[..., bool]


def _load() -> tuple[Core | None, str | None]:
    switch = os.environ.get(environment.NATIVE, "")
    if switch not in {"", "0", "1"}:
        raise ValueError(
            f"environment variable {environment.NATIVE} is {switch!r}; expected 0, 1 or nothing"
        )
    if switch == "0":
        return None, f"{environment.NATIVE}=0"
    try:
        module = import_module("transport.native._core")
    except ImportError as error:
        return None, str(error)
    # The sources lie beside it in an editable installation only, and may have changed since.
    built = Path(str(module.__file__)).stat().st_mtime
    for source in Path(__file__).parent.glob("*.[ch]"):
        if source.stat().st_mtime > built:
            return None, f"{source} was changed after {module.__file__} was built: install again"
    return cast("Core", module), None


core, why_not = _load()
"""The module, or None; and why it is None."""
