"""Key-value stores: one interface, served over TCP, from a file, or inside one process."""

from transport.store.base import DEFAULT_STORE_TIMEOUT, Store
from transport.store.file.store import FileStore
from transport.store.hash_store import HashStore
from transport.store.prefix_store import PrefixStore
from transport.store.tcp.server import TCPStoreServer
from transport.store.tcp.store import TCPStore

__all__ = [
    "DEFAULT_STORE_TIMEOUT",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TCPStoreServer",
]
