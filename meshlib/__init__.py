"""Meshes, groups and collectives on plain arrays: ``import meshlib as dist``.

The names are those of ``meshlib.api``, which is imported when one of them is first asked for: the
launcher is in this package too, and needs neither them nor NumPy.
"""

import importlib
import typing
from importlib.util import find_spec

from meshlib.neighbours import check_transport as _check_transport

_check_transport()

if typing.TYPE_CHECKING:
    from meshlib.api import *  # noqa: F403 (its __all__ is the one list of names)
    from meshlib.api import __all__ as __all__
else:

    def __getattr__(name: str) -> typing.Any:
        """Bring the names of ``meshlib.api`` here at the first use of one (PEP 562)."""
        if name == "__all__" or not (name.startswith("_") or _is_module(name)):
            api = vars(importlib.import_module("meshlib.api"))
            if "__all__" in api:  # it is not while the module is being imported
                globals().update({public: api[public] for public in ("__all__", *api["__all__"])})
            if name in globals():
                return globals()[name]
        hint = ""
        if "__all__" in globals() and not name.startswith("_"):
            from meshlib.did_you_mean import did_you_mean

            hint = did_you_mean(name, globals()["__all__"])
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")

    def _is_module(name: str) -> bool:
        """Whether ``from meshlib import name`` asks for a module, which the import brings itself.

        Modules of the API do so while they are being imported.
        """
        return find_spec(f"{__name__}.{name}") is not None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})


__version__ = "0.1.0"
