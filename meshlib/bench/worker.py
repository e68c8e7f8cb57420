"""One rank of one library's job: measures what it is told to on stdin, and answers on stdout.

It runs in the library's own environment, which needs nothing of ours but NumPy. Requests and
answers are JSON, one a line. Rank 0 begins with ``{"port": …}``, the others are told; each then
says ``{"ready": version}`` and answers requests until its input ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from typing import Any

from meshlib.bench.cases import CASES, Case
from meshlib.bench.libraries import LIBRARIES, Library


def measure(case: Case, library: Library, repetitions: int, warmup: int) -> dict[str, Any]:
    """Return the seconds of each repetition, and whether the last results were right."""
    dist = library.dist
    seconds: list[float] = []
    for turn in range(-warmup, repetitions):
        case.reset()
        dist.barrier()
        began = time.perf_counter()
        case.run(dist)
        took = time.perf_counter() - began
        if turn >= 0:
            seconds.append(took)
    return {"seconds": seconds, "right": case.is_right()}


def main() -> None:
    """Run as a worker process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    args = parser.parse_args()
    # Whatever the libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    library = LIBRARIES[args.library]()
    if args.rank == 0:
        port = library.host(args.size)
        answer({"port": port})
    else:
        port = json.loads(sys.stdin.readline())["port"]
    library.join(port, args.rank, args.size)
    answer({"ready": library.version()})
    case: Case | None = None
    made = None
    for line in sys.stdin:
        request = json.loads(line)
        key = request["case"], request["bytes"]
        if case is None or made != key:
            case = None  # its memory goes before the next one's comes
            case = CASES[key[0]](key[1], args.rank, args.size, library.wrap)
            made = key
        answer(measure(case, library, request["repetitions"], request["warmup"]))
    with contextlib.suppress(RuntimeError):  # a peer that left first is no failure here
        library.leave()


if __name__ == "__main__":
    main()
