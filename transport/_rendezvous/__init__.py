"""Rendezvous: from a URL to a store, a rank and a world size."""

from transport._rendezvous.foreign import ForeignStore, foreign_rendezvous
from transport._rendezvous.registry import (
    RendezvousHandler,
    register_rendezvous_handler,
    rendezvous,
)

__all__ = [
    "ForeignStore",
    "RendezvousHandler",
    "foreign_rendezvous",
    "register_rendezvous_handler",
    "rendezvous",
]
