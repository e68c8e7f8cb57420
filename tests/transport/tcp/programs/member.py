"""A member in a process of its own says when it lost its peer."""

import sys
import time

from tests.support.net.tcp_members import all_reduce, member_of, ones
from transport._errors import PeerLostError
from transport._operands.reduce_op import ReduceOp
from transport._store.tcp.store import TCPStore

rank, size, port, what = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with (
    TCPStore("127.0.0.1", port, secret=None) as store,
    member_of(store, rank, tuple(range(10, 10 + size))) as member,
):
    all_reduce(member)
    print("ready", flush=True)
    victim = size - 1
    if rank == victim:
        time.sleep(60)
    try:
        if what == "small":
            all_reduce(member)
        elif what == "large":
            member.all_reduce(ones(8_000_000), ReduceOp.SUM)
        else:
            member.recv(ones(), victim)
    except PeerLostError as error:
        print(f"lost {error.peer}: {error}", flush=True)
        member.comm.abort(str(error))
