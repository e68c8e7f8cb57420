"""A pool of workers that evaluate candidates. A free worker gets the next candidate.

    meshrun --nproc-per-node 4 --on-failure continue examples/rpc/evaluators.py [--lose 2]

Rank 0 searches for weights that keep a pole upright (the cross-entropy method: Rubinstein, 1999),
and the other ranks evaluate them. Other evaluators take over the candidates of a dead one:
``--lose RANK`` kills one to show this.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cart_pole import episode

import meshlib as dist
from meshlib import rpc


class Pool:
    """Calls functions on ``workers``, one at a time on each."""

    def __init__(self, workers: Sequence[int]) -> None:
        self.workers = list(workers)
        self.done: Counter[int] = Counter()
        """The number of completed calls of each worker."""

    def map(self, func: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Return ``[func(item) for item in items]``, each evaluated by a free worker.

        Raises the errors of ``func``, and ``WorkerLostError`` when no worker is left.
        """
        results: dict[int, Any] = {}
        left, free, failures = deque(range(len(items))), [*self.workers], list[BaseException]()
        lock, over = threading.Lock(), threading.Event()

        def feed() -> None:
            while True:
                with lock:
                    if failures or len(results) == len(items):
                        over.set()
                    if over.is_set() or not left or not free:
                        return
                    worker, i = free.pop(0), left.popleft()
                try:
                    future = rpc.rpc_async(worker, func, (items[i],))
                except rpc.WorkerLostError as error:
                    lose(worker, i, error)
                else:
                    future.add_done_callback(lambda done, w=worker, i=i: take(w, i, done))

        def take(worker: int, i: int, done: rpc.Future[Any]) -> None:
            error = done.exception()
            if isinstance(error, rpc.WorkerLostError):
                lose(worker, i, error)
            else:
                with lock:
                    self.done[worker] += 1
                    free.append(worker)
                    if error is not None:
                        failures.append(error)
                    else:
                        results[i] = done.value()
            feed()

        def lose(worker: int, i: int, error: rpc.WorkerLostError) -> None:
            with lock:
                self.workers.remove(worker)
                left.append(i)
                if not self.workers:
                    failures.append(error)

        feed()
        over.wait()
        if failures:
            raise failures[0]
        return [results[i] for i in range(len(items))]


def evaluate(candidate: tuple[np.ndarray, int]) -> float:
    """Return the mean number of steps for which the weights keep the pole upright."""
    weights, seed = candidate
    rng = np.random.default_rng(seed)
    return float(np.mean([len(episode(weights, rng)[1]) for _ in range(3)]))


def end_yourself(_: object) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def search(pool: Pool, generations: int, candidates: int = 24) -> list[float]:
    """Return the mean score of the best quarter of each generation."""
    rng, found = np.random.default_rng(3), list[float]()
    mean, spread = np.zeros(4), np.full(4, 5.0)
    for _ in range(generations):
        tried = mean + spread * rng.standard_normal((candidates, 4))
        seeds = rng.integers(0, 1 << 30, candidates)
        scores = np.array(pool.map(evaluate, list(zip(tried, map(int, seeds), strict=True))))
        best = np.argsort(-scores, kind="stable")[: candidates // 4]
        mean, spread = tried[best].mean(0), tried[best].std(0) + 0.1
        found.append(float(scores[best].mean()))
    return found


def run(generations: int, lose: int | None = None) -> tuple[list[float], dict[int, int]]:
    """Search with all ranks of the job; on rank 0, return the scores by generation, and the number
    of candidates that each evaluator has tried.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    rpc.init_rpc("head" if rank == 0 else f"evaluator{rank}")
    scores, pool = list[float](), Pool(range(1, size))
    if rank == 0:
        if lose is not None:
            rpc.rpc_async(lose, end_yourself, (None,))
        scores = search(pool, generations)
    rpc.shutdown()
    return scores, dict(pool.done)


def main() -> None:
    """Search, and print the scores and each worker's number of calls."""
    parser = argparse.ArgumentParser(description="Try candidates in a pool of workers.")
    parser.add_argument("--generations", type=int, default=6)
    parser.add_argument("--lose", type=int, help="the rank of an evaluator that dies")
    options = parser.parse_args()
    dist.init_process_group()
    scores, done = run(options.generations, options.lose)
    for number, score in enumerate(scores):
        print(f"generation {number}: {score:6.1f} steps")
    if scores:
        print("tried: " + ", ".join(f"rank {rank} {done[rank]}" for rank in sorted(done)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
