"""One rank of one library's job; speaks as ``meshlib.bench.jobs.worker`` does.

A request ``{"build": {"width": …, "batch": …}}`` comes first, then
``{"synchronise": …, "repetitions": …, "warmup": …}`` as often as one likes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import zlib
from typing import Any

from tests.benchmarks.data_parallel.trainers import TRAINERS, Trainer


def measure(trainer: Trainer, synchronise: bool, repetitions: int, warmup: int) -> dict[str, Any]:
    """Return what each repetition took, the hidden share, and a checksum of some weights.

    That is seconds, and seconds of processor time of all of this rank's threads.
    """
    seconds: list[float] = []
    processor: list[float] = []
    for turn in range(-warmup, repetitions):
        trainer.library.dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        trainer.step(synchronise)
        took, used = time.perf_counter() - began, time.process_time() - used
        if turn >= 0:
            seconds.append(took)
            processor.append(used)
    return {
        "seconds": seconds,
        "processor": processor,
        "hidden": trainer.hidden(),
        "weights": zlib.crc32(trainer.first_weights().tobytes()),
    }


def main() -> None:
    """Run as a worker process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=TRAINERS, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    args = parser.parse_args()
    # XLA's share of one thread for each rank, for a matrix product and for independent operations;
    # the others read variables that the job has set.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    os.environ["NPROC"] = "1"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    trainer = TRAINERS[args.library]()
    library = trainer.library
    if args.rank == 0:
        port = library.host(args.size)
        answer({"port": port})
    else:
        port = json.loads(sys.stdin.readline())["port"]
    library.join(port, args.rank, args.size)
    answer({"ready": library.version()})
    for line in sys.stdin:
        request = json.loads(line)
        if "build" in request:
            trainer.build(args.rank, **request["build"])
            answer({"built": True})
        else:
            answer(measure(trainer, **request))
    with contextlib.suppress(RuntimeError):  # a peer that left first is no failure here
        library.leave()


if __name__ == "__main__":
    main()
