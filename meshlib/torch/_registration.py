"""The backend's registration with ``torch.distributed``.

PyTorch calls ``register`` when it is imported (the entry point ``torch.backends``). So this module
imports the rest of ``meshlib.torch`` only when the backend is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from transport import _environment as environment

NAME = "meshlib"
"""The backend's name, and the scheme of its rendezvous."""


def register() -> None:
    """Register the backend ``meshlib`` and the rendezvous ``meshlib://``. Idempotent.

    If ``meshrun`` started this process, ``env://`` means ``meshlib://``, because PyTorch's client
    does not support the protocol of meshrun's store. If the program changes MASTER_ADDR or
    MASTER_PORT, ``env://`` is PyTorch's.
    """
    c10d: Any = import_module("torch.distributed")
    if not c10d.is_available() or NAME in c10d.Backend.backend_list:
        return
    meeting: Any = import_module("torch.distributed.rendezvous")
    c10d.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu"])
    meeting.register_rendezvous_handler(NAME, _meet)
    if environment.AGENT_STORE in os.environ:
        _take_over(meeting._rendezvous_handlers)


def _make_group(*arguments: Any) -> Any:
    return import_module("meshlib.torch._group").make_group(*arguments)


def _meet(url: str, *arguments: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
    return import_module("meshlib.torch._store").meshlib_rendezvous(url, *arguments, **options)


def _take_over(handlers: dict[str, Any]) -> None:
    """Let ``env://`` use the launcher's store, by PyTorch's private table of handlers."""
    pytorchs = handlers["env"]

    def meet(url: str, *arguments: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
        host, port = (os.environ.get(name) for name in _MASTER)
        agents = os.environ.get(environment.AGENT_STORE, "").partition(" ")[0]
        launchers = agents == f"{host}:{port}"
        return (_meet if launchers else pytorchs)(url, *arguments, **options)

    handlers["env"] = meet


_MASTER = (environment.MASTER_ADDR, environment.MASTER_PORT)
