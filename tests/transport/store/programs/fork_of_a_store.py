"""A child that was forked uses the store of its parent, and a clone; the parent goes on."""

import os
import sys

from transport._store import TCPStore

store = TCPStore(sys.argv[1], int(sys.argv[2]), timeout=10, secret=b"s")
store.set_will("will", "dead")
child = os.fork()
if child == 0:
    try:
        store.get("k")
    except Exception as error:  # noqa: BLE001 (told, whatever it is)
        clone = store.clone()
        clone.set("child", type(error).__name__ + ": " + str(error))
        clone.close()
    store.close()
    os._exit(0)
os.waitpid(child, 0)
store.set("alive", "yes")
store.get("go")
store.close()
