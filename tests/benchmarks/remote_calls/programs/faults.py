"""Three workers of remote calls, of which one is killed or stopped in the phase that is named."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from typing import Any

import meshlib as dist
from meshlib import rpc
from meshlib.rpc._worker import current_worker

VICTIM = 2


class Thing:
    """An object that references refer to."""

    def __init__(self) -> None:
        self.value = list(range(1000))

    def get(self) -> int:
        return len(self.value)


def whoami() -> int:
    return os.getpid()


def use(rref: rpc.RRef[Thing]) -> Any:
    return rref.rpc_sync().get()


def ping() -> None:
    return None


def work(seconds: float) -> None:
    """Call the others, and hold what they own, for a while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        rref = rpc.remote(0, Thing)
        rpc.rpc_sync(0, ping)
        rpc.rpc_sync(1, use, (rref,))


def strike(pid: int, kind: str, seed: int) -> None:
    """Kill or stop a process at a random moment; one that was stopped goes on later."""
    time.sleep(random.Random(seed).uniform(0.0, 0.3))
    os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    if kind == "stop":
        time.sleep(6.0)
        os.kill(pid, signal.SIGCONT)


def need_the_victim(kind: str, phase: str) -> dist.DistError:
    """Use the victim until an error says that it does not answer."""
    theirs = rpc.rpc_async(VICTIM, work, (8.0,), timeout=30) if phase == "caller" else None
    until = time.monotonic() + 20
    while True:
        assert time.monotonic() < until, "nothing was noticed"
        try:
            if phase == "fetch":
                rpc.remote(VICTIM, Thing).to_here()
            elif phase == "grant":
                rpc.rpc_sync(1, use, (rpc.remote(VICTIM, Thing),))
            elif theirs is not None and kind == "kill":
                theirs.wait()
            else:
                rpc.rpc_sync(VICTIM, ping)
        except dist.DistError as caught:
            return caught


def main(kind: str, phase: str, seed: int) -> None:
    """Run a rank."""
    dist.init_process_group()
    me = dist.get_rank()
    rpc.init_rpc(f"worker{me}", rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=2.0))
    if me == 0:
        pid = rpc.rpc_sync(VICTIM, whoami)
        striking = threading.Thread(target=strike, args=(pid, kind, seed))
        striking.start()
        text = None if phase == "end" else str(need_the_victim(kind, phase))
        striking.join()
        if text is not None:
            word = "was killed by SIGKILL" if kind == "kill" else "passed its deadline of 2 s"
            assert f"worker{VICTIM}" in text or "worker1" in text, text
            assert word in text, text
        until = time.monotonic() + 20
        while phase == "caller" and kind == "kill" and len(current_worker().references):
            assert time.monotonic() < until, "what the victim held was not freed"
            time.sleep(0.01)
    rpc.shutdown(timeout=40)
    print("good", me, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
