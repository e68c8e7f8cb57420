"""docs/reference/c10d.md names every public name of the ``torch.distributed`` that is installed."""

from __future__ import annotations

import re
import types
import warnings
from pathlib import Path

import pytest

import meshlib

torch = pytest.importorskip("torch")

PAGE = (Path(__file__).parents[2] / "docs/reference/c10d.md").read_text()
NAMED = set(re.findall(r"`(?:meshlib\.|distributed_c10d\.)?([A-Za-z_][\w.]*)`", PAGE))
CLASSES = (
    "DeviceMesh",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "ProcessGroup",
    "Store",
    "TCPStore",
)
MODULES = ("distributed_c10d", "device_mesh", "rendezvous", "constants")
OF_THE_ENUMERATION = {"UNDEFINED", "GLOO", "NCCL", "XCCL", "UCC", "MPI", "CUSTOM"}


def public_names() -> set[str]:
    """Return what ``torch.distributed`` exports of its core, and the members of its classes."""
    dist = torch.distributed
    found = set(dist.distributed_c10d.__all__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one of them is deprecated
        for name in [name for name in dir(dist) if not name.startswith("_")]:
            value = getattr(dist, name)
            home = getattr(value, "__module__", "").rpartition(".")[2].removeprefix("_")
            if not isinstance(value, types.ModuleType) and home in MODULES:
                found.add(name)
    for owner in (*CLASSES, "Work"):
        members = {name for name in vars(getattr(dist, owner)) if not name.startswith("_")}
        found |= {f"{owner}.{name}" for name in members - OF_THE_ENUMERATION}
    return found


def test_every_name_is_on_the_page():
    missing = []
    for name in sorted(public_names() - NAMED):
        owner, _, member = name.rpartition(".")
        # What a class of ours has by the same name needs no words.
        if not (owner and hasattr(getattr(meshlib, owner), member)):
            missing.append(name)
    assert not missing
