"""How the ranks of a job find each other: a URL in; a store, a rank and a world size out."""

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
