"""Making the backend known to ``torch.distributed``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from meshlib.torch.group import NAME, make_group
from meshlib.torch.store import meshlib_rendezvous

_c10d: Any = import_module("torch.distributed")
_rendezvous: Any = import_module("torch.distributed.rendezvous")


def register() -> None:
    """Register the backend ``meshlib`` and the rendezvous ``meshlib://``. Idempotent.

    Called by ``import meshlib.torch``.
    """
    if NAME not in _c10d.Backend.backend_list:
        _c10d.Backend.register_backend(NAME, make_group, extended_api=True, devices=["cpu"])
        _rendezvous.register_rendezvous_handler(NAME, meshlib_rendezvous)
