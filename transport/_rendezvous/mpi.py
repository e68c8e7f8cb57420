"""``mpi://``: MPI assigns the ranks; rank 0 serves the store and broadcasts its address."""

from __future__ import annotations

import json
import os
import socket

from transport import _environment as environment
from transport._net import LOOPBACK
from transport._net.auth import new_secret
from transport._place import this_machine
from transport._rendezvous.rank_claims import in_group
from transport._rendezvous.request import RendezvousRequest
from transport._store.base import Store
from transport._store.tcp.store import TCPStore


def mpi_rendezvous(request: RendezvousRequest) -> tuple[Store, int, int]:
    """Return a store, and MPI's rank and world size.

    If the job has no secret, rank 0 creates one and sends it over MPI. All ranks then set it in
    their environment, as a launcher does. Raises ValueError if the URL contradicts MPI's rank or
    world size.
    """
    from transport._mpi.library import join

    deadline, timeout = request.deadline(), request.timeout
    process = join(deadline)
    request.check_found(process.rank, process.size, "MPI assigned another")
    machines = process.all_gather(this_machine(), deadline)
    if process.rank == 0:
        secret = request.secret or new_secret()
        host = os.environ.get(environment.HOST)
        if not host:
            host = LOOPBACK if len(set(machines)) == 1 else socket.gethostname()
        store = TCPStore(host, 0, is_master=True, timeout=timeout, secret=secret)
        address = {"host": host, "port": store.port, "secret": secret.hex()}
        process.all_gather(json.dumps(address), deadline)
    else:
        address = json.loads(process.all_gather("", deadline)[0])
        secret = bytes.fromhex(address["secret"])
        store = TCPStore(address["host"], address["port"], timeout=timeout, secret=secret)
    os.environ.setdefault(environment.SECRET, secret.hex())
    return in_group(store, request.group_name), process.rank, process.size
