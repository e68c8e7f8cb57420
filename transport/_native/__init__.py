"""The compiled core, where there is one: see ``core.h``, and ``module.c`` for what is in it."""

from __future__ import annotations

import logging
import os
import pkgutil
from importlib import import_module
from pathlib import Path
from types import ModuleType

from transport import _environment as environment

_AGAIN = "install meshlib again"


def load(name: str, package: str) -> tuple[ModuleType | None, str | None]:
    """Return the compiled module ``name`` of ``package``, or None; and why, with a way to mend it.

    Raises ValueError for a value of MESHLIB_NATIVE in the environment that says nothing.
    """
    switch = os.environ.get(environment.NATIVE, "")
    if switch not in {"", "0", "1"}:
        raise ValueError(
            f"environment variable {environment.NATIVE} is {switch!r}; expected 0, 1 or nothing"
        )
    if switch == "0":
        return None, f"{environment.NATIVE}=0 in the environment; unset it to have the core"
    try:
        module = import_module(f"{package}.{name}")
    except ModuleNotFoundError:
        return None, _why_not_built(name, package)
    except ImportError as error:
        return None, f"{error}; {_AGAIN}, so that it is built for this Python and this machine"
    # The sources lie beside it in an editable installation only, and may have changed since.
    file = Path(str(module.__file__))
    built = file.stat().st_mtime
    for source in file.parent.rglob("*.[ch]"):
        if source.stat().st_mtime > built:
            why = f"{source} was changed after {module.__file__} was built; {_AGAIN} (`make` does)"
            if os.environ.get(environment.LOCAL_RANK, "0") == "0":  # once a host, not once a rank
                logging.getLogger("meshlib").warning("running without the compiled core: %s", why)
            return None, why
    return module, None


def _why_not_built(name: str, package: str) -> str:
    """Return the cause, which a failed build has left, and advice."""
    folder = Path(*import_module(package).__path__)
    others = [path.name for path in folder.glob(f"{name}.*.so")]
    if others:
        return f"it was built for another Python ({', '.join(others)}); {_AGAIN} for this one"
    try:
        recorded = pkgutil.get_data(__name__, "_core.txt")
    except OSError:
        return f"it was never built; {_AGAIN}, with a C compiler and Python's headers"
    reason = (recorded or b"").decode(errors="replace").strip()
    mend = "without that"
    if not reason.startswith(environment.NATIVE):
        mend = "with a C compiler and Python's headers (Debian: gcc, python3-dev)"
    return f"it was not built when meshlib was installed: {reason}; {_AGAIN} {mend}"


core, why_not = load("_core", __name__)
"""The module, or None; and why it is None, with what to do about it."""
