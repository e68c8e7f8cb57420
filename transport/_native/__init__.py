"""The compiled core, if it was built: see ``core.h``; ``module.c`` lists its functions."""

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
    """Return the compiled module ``name`` of ``package``, or None and a reason with advice.

    Raises ValueError if MESHLIB_NATIVE is set in the environment, but not to 0 or 1.
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
    # An editable installation has the sources, which may be newer than the module.
    file = Path(str(module.__file__))
    built = file.stat().st_mtime
    for source in file.parent.rglob("*.[ch]"):
        if source.stat().st_mtime > built:
            why = f"{source} was changed after {module.__file__} was built; {_AGAIN} (`make` does)"
            if os.environ.get(environment.LOCAL_RANK, "0") == "0":  # once per host
                logging.getLogger("meshlib").warning("running without the compiled core: %s", why)
            return None, why
    return module, None


def _why_not_built(name: str, package: str) -> str:
    """Return the cause, as a failed build recorded it, and advice."""
    folder = Path(*import_module(package).__path__)
    others = [path.name for path in folder.glob(f"{name}.*.so")]
    if others:
        return f"it was built for another Python ({', '.join(others)}); {_AGAIN} for this one"
    try:
        recorded = pkgutil.get_data(__name__, "_core.txt")
    except OSError:
        return f"it was never built; {_AGAIN}, with a C compiler and Python's headers"
    reason = (recorded or b"").decode(errors="replace").strip()
    advice = "without that"
    if not reason.startswith(environment.NATIVE):
        advice = "with a C compiler and Python's headers (Debian: gcc, python3-dev)"
    return f"it was not built when meshlib was installed: {reason}; {_AGAIN} {advice}"


core, why_not = load("_core", __name__)
"""The module, or None and a reason with advice."""
