"""Key-value stores: one interface, served over TCP, from a file, or inside one process."""

from transport._store.base import DEFAULT_STORE_TIMEOUT, Store
from transport._store.file.store import FileStore
from transport._store.hash_store import HashStore
from transport._store.prefix_store import PrefixStore
from transport._store.tcp.server import TCPStoreServer
from transport._store.tcp.store import TCPStore

__all__ = [
    "DEFAULT_STORE_TIMEOUT",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TCPStoreServer",
]
