"""Many ranks, as threads, lose a quarter of themselves at random and regain it: what it costs.

    python -m tests.benchmarks.elastic.many --ranks 25,50,100,200

For each number of ranks: the epochs that it took, the messages to the store that agreeing took (for
each epoch, and by rank), and all that the store was asked for while the training ran.
"""

from __future__ import annotations

import argparse
import math
import random
import threading
import time
from collections import Counter

from meshlib._job.continuing import agreement
from meshlib._job.current import current_world
from tests.support.parallel import elastic_ranks as training
from transport._store.commands import Commands, Op


def run(size: int, until: int, seed: int) -> str:
    """Train with ``size`` ranks and return a row of the table."""
    generator = random.Random(seed)
    counts, lock = Counter[str](), threading.Lock()
    answer = Commands.answer

    def counted(self, op, fields):
        with lock:
            counts["all"] += 1
            counts[Op(op).name] += 1
            counts["agreeing"] += bool(fields) and b"/agree/" in b"/" + bytes(fields[0])
        return answer(self, op, fields)

    Commands.answer = counted
    lost = size // 4
    plan = {
        victim: generator.randrange(2, until - 3)
        for victim in generator.sample(range(1, size), lost)
    }
    epochs = []

    def program(job):
        def event(elastic, step, where):
            me = current_world().rank
            if where == "begin" and plan.get(me) == step.number and me < size:
                job.start()
                job.kill()
            if where == "begin" and me == 0:
                epochs.append(elastic.epoch)

        return training.train(job, (size,), until, event=event)

    begun = time.monotonic()
    try:
        results = training.ThreadJob(program, size, timeout=120.0).join()
    finally:
        Commands.answer = answer
    seconds = time.monotonic() - begun
    values = {b"".join(array.tobytes() for array in one[0]) for one in results.values() if one[0]}
    assert len(values) == 1, "replicas differ"
    changes = max(epochs)
    each = counts["agreeing"] / changes
    return (
        f"| {size} | {lost} | {changes} | {each:.0f} | {each / size:.1f} |"
        f" {size * math.log2(size):.0f} | {counts['all']} | {seconds:.1f} |"
    )


def main() -> None:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="25,50,100,200")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    agreement.LIFE_SECONDS = 60.0  # hundreds of threads of one interpreter are slow, not silent
    agreement.LEASE_SECONDS = 60.0
    head = "ranks|lost and regained|epochs|messages an epoch|a rank|n log2 n|all to the store|s"
    print(f"|{head}|\n|{'---|' * 8}")
    for text in given.ranks.split(","):
        print(run(int(text), given.steps, 0), flush=True)


if __name__ == "__main__":
    main()
