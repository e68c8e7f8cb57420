"""One rank of one library's job; speaks as ``meshlib._bench.jobs.worker`` does.

A request ``{"build": {"width": …, "batch": …}}`` comes first, then
``{"synchronise": …, "repetitions": …, "warmup": …}`` as often as one likes.
"""

from __future__ import annotations

import os
import time
import zlib
from typing import Any

from meshlib._bench.jobs.worker import Respond, speak
from meshlib._bench.libraries import Library
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


def make(name: str, rank: int, size: int) -> tuple[Library, Respond]:
    """Return the library called ``name``, and what trains with it."""
    del size
    # XLA's share of one thread for each rank, for a matrix product and for independent operations;
    # the others read variables that the job has set.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    os.environ["NPROC"] = "1"
    trainer = TRAINERS[name]()

    def respond(request: dict[str, Any]) -> dict[str, Any]:
        if "build" in request:
            trainer.build(rank, **request["build"])
            return {"built": True}
        return measure(trainer, **request)

    return trainer.library, respond


if __name__ == "__main__":
    speak(TRAINERS, make)
