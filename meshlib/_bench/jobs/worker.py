"""One rank of one library's job: reads requests from stdin, measures, and answers on stdout.

It runs in the library's own environment, which needs only NumPy in addition. Requests and answers
are JSON, one per line. Rank 0 begins with the answer ``{"port": …}``, which the other ranks get as
a request. Each rank then sends the answer ``{"ready": version}``, and answers requests until its
input ends. Between requests it blocks in a read, and uses no processor.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshlib._bench.cases import CASES, Bound, Case, CopyCase
from meshlib._bench.libraries import LIBRARIES, Library

_LEAVE_SECONDS = 10.0


class RankBenchmark:
    """A rank's measurement of one case at a time, which holds the arrays until the next case."""

    def __init__(self, library: Library, rank: int, size: int) -> None:
        self._library = library
        self._rank = rank
        self._size = size
        self._key: tuple[str, int] | None = None
        self._case: Case | None = None

    def measure(
        self,
        case: str,
        nbytes: int,
        repetitions: int,
        warmup: int,
        keep: bool,
        synchronised: bool = True,
    ) -> dict[str, Any]:
        """Return the seconds and entry times of all repetitions.

        The result also has whether the last repetition's output was right. Entry times are on the
        machine's clock. If ``keep``, the arrays are reused for the next request of the same case.
        If ``synchronised``, a barrier precedes each repetition.
        """
        made, call = self._make(case, nbytes)
        library, seconds, entered = self._library, list[float](), list[float]()
        clock, barrier = time.perf_counter, library.barrier
        made.clear()
        gc.collect()
        gc.disable()
        for turn in range(-warmup, repetitions):
            made.reset()
            if synchronised:
                barrier()
            began = clock()
            call()
            took = clock() - began
            if turn >= 0:
                seconds.append(took)
                entered.append(began)
        gc.enable()
        right = made.is_right(library.result(made))
        if not keep:
            self._case = None
        return {"seconds": seconds, "entered": entered, "right": right}

    def _make(self, case: str, nbytes: int) -> tuple[Case, Bound]:
        if self._case is None or self._key != (case, nbytes):
            self._case = None  # free its memory before the next case allocates
            library = self._library
            self._case = CASES[case](nbytes, self._rank, self._size, library.empty)
            self._key = case, nbytes
        made = self._case
        return made, made.copy if isinstance(made, CopyCase) else self._library.bind(made)


def _end_with_driver() -> None:
    """End this process some time after its input has ended, even if it is stuck."""
    poll = select.poll()
    poll.register(0, 0)  # poll always reports a hang-up
    poll.poll()
    time.sleep(_LEAVE_SECONDS)
    os._exit(1)


Respond = Callable[[dict[str, Any]], dict[str, Any]]
"""A function that returns the answer to a request."""


def speak(
    libraries: Mapping[str, Any], make: Callable[[str, int, int], tuple[Library, Respond]]
) -> None:
    """Run as the worker process of the command line, with the protocol of this module.

    ``libraries`` are the valid names; ``make(library, rank, size)`` loads a library.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=libraries, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    args = parser.parse_args()
    # Output of the libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    threading.Thread(target=_end_with_driver, daemon=True).start()
    library, respond = make(args.library, args.rank, args.size)
    if args.rank == 0:
        port = library.host(args.size)
        answer({"port": port})
    else:
        port = json.loads(sys.stdin.readline())["port"]
    library.join(port, args.rank, args.size)
    answer({"ready": library.version(), "pid": os.getpid()})
    gc.collect()
    gc.freeze()  # later collections need not traverse the libraries' modules
    for line in sys.stdin:
        answer(respond(json.loads(line)))
    del respond  # frees its arrays
    with contextlib.suppress(RuntimeError):  # a peer that left first is not a failure here
        library.leave()


def main(counted: Any = None) -> None:
    """Run as a worker process; ``counted``, a dataclass of counters, is added to the answers."""

    def make(name: str, rank: int, size: int) -> tuple[Library, Respond]:
        library = LIBRARIES[name]()
        bench = RankBenchmark(library, rank, size)

        def respond(request: dict[str, Any]) -> dict[str, Any]:
            found = bench.measure(**request)
            return found if counted is None else found | {"counted": dataclasses.asdict(counted)}

        return library, respond

    speak(LIBRARIES, make)


if __name__ == "__main__":
    main()
