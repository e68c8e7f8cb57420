"""Meshes, groups and collectives on plain arrays: ``import meshlib as dist``.

The names are those of ``meshlib.api``, ``meshlib.mesh_api`` and ``meshlib.wider_api``. Each of the
three is imported when one of its own is first asked for, or one of those behind it: the launcher is
in this package too, and needs neither them nor NumPy.
"""

import importlib
import typing
from importlib.util import find_spec

from meshlib.neighbours import check_transport as _check_transport

_check_transport()

if typing.TYPE_CHECKING:
    from meshlib import api as _api
    from meshlib import mesh_api as _mesh_api
    from meshlib import wider_api as _wider_api
    from meshlib.api import *  # noqa: F403 (its __all__ is the one list of its names)
    from meshlib.mesh_api import *  # noqa: F403 (as above)
    from meshlib.wider_api import *  # noqa: F403 (as above)

    __all__: list[str] = []
    __all__ += _api.__all__
    __all__ += _mesh_api.__all__
    __all__ += _wider_api.__all__
else:
    # What every program needs comes first.
    _FACES = ("meshlib.api", "meshlib.mesh_api", "meshlib.wider_api")

    def __getattr__(name: str) -> typing.Any:
        """Bring the names of a module of ``_FACES`` here at the first use of one (PEP 562)."""
        if name == "__all__":
            return globals().setdefault("__all__", sorted(_all_names()))
        hint = ""
        if not (name.startswith("_") or _is_module(name)):
            for face in _FACES:
                if name in _bring(face):
                    return globals()[name]
            from meshlib.did_you_mean import did_you_mean

            hint = did_you_mean(name, _all_names())
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")

    def _bring(face: str) -> list[str]:
        """Return the names of a module, which are here then; none while it is being imported."""
        module = vars(importlib.import_module(face))
        names = module.get("__all__", [])
        for public in names:
            globals().setdefault(public, module[public])  # a user may have put another one here
        return names

    def _all_names() -> list[str]:
        return [public for face in _FACES for public in _bring(face)]

    def _is_module(name: str) -> bool:
        """Whether ``from meshlib import name`` asks for a module, which the import brings itself.

        Modules of the API do so while they are being imported.
        """
        return find_spec(f"{__name__}.{name}") is not None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})


__version__ = "0.1.0"
