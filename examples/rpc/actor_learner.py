"""Actors balance a pole on a cart, and a learner improves their policy from their episodes.

    meshrun --nproc-per-node 3 examples/rpc/actor_learner.py

Rank 0 has the learner; the actors hold a reference to it. Each actor plays an episode with its
weights, reports the episode and gets new weights. The learner answers when all actors have
reported. No thread waits meanwhile (``async_execution``). The method is REINFORCE (Williams, 1992):
the rewards after a push, less their mean, weight the gradient of the logarithm of the push's
probability.
"""

from __future__ import annotations

import argparse
import threading

import numpy as np
from cart_pole import chance_of_right, episode

import meshlib as dist
from meshlib import rpc

DISCOUNT = 0.98


class Learner:
    """Learns from one episode of each of ``actors`` actors at a time."""

    def __init__(self, actors: int, rate: float) -> None:
        self.weights = np.zeros(4)
        self.lengths: list[float] = []
        """The average length of the episodes, by update."""
        self._rate = rate
        self._actors = actors
        self._reports: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._next: rpc.Future[np.ndarray] = rpc.Future()
        self._lock = threading.Lock()  # actors report at the same time

    @rpc.functions.async_execution
    def report(self, actor: int, states: np.ndarray, pushes: np.ndarray) -> rpc.Future[np.ndarray]:
        """Record an actor's episode. Once all have reported, the answer is the new weights (4,)."""
        with self._lock:
            self._reports[actor] = states, pushes
            answer = self._next
            if len(self._reports) < self._actors:
                return answer
            reports = [self._reports[actor] for actor in sorted(self._reports)]
            self._reports, self._next = {}, rpc.Future()
            self.weights = self.weights + self._rate * gradient(self.weights, reports)
            self.lengths.append(float(np.mean([len(pushes) for _, pushes in reports])))
        answer.set_result(self.weights)
        return answer


def gradient(weights: np.ndarray, reports: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return the direction (4,) in which episodes get longer."""
    states = np.concatenate([states for states, _ in reports])
    pushes = np.concatenate([pushes for _, pushes in reports])
    # The discounted number of remaining steps.
    worth = np.concatenate([(1 - DISCOUNT ** np.arange(len(p), 0, -1)) for _, p in reports])
    worth = (worth - worth.mean()) / (worth.std() + 1e-8)
    return (worth * (pushes - chance_of_right(weights, states))) @ states / len(states)


def act(learner: rpc.RRef[Learner], actor: int, episodes: int) -> int:
    """Play ``episodes`` episodes on an actor; return the number of steps."""
    rng, weights, steps = np.random.default_rng([7, actor]), np.zeros(4), 0
    for _ in range(episodes):
        states, pushes = episode(weights, rng)
        steps += len(pushes)
        weights = learner.rpc_sync().report(actor, states, pushes)
    return steps


def run(episodes: int, rate: float = 20.0) -> list[float]:
    """Learn with all ranks of the job; on rank 0, return the mean episode length by update."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 2:
        raise ValueError(f"expected a learner and at least one actor, got {size} rank")
    rpc.init_rpc("learner" if rank == 0 else f"actor{rank}")
    lengths: list[float] = []
    if rank == 0:
        learner = Learner(size - 1, rate)
        reference = rpc.RRef(learner)
        played = [
            rpc.rpc_async(r, act, (reference, r, episodes), timeout=0) for r in range(1, size)
        ]
        rpc.wait_all(played)
        lengths = learner.lengths
    rpc.shutdown()
    return lengths


def main() -> None:
    """Learn, and print the mean episode length."""
    parser = argparse.ArgumentParser(description="Balance a pole with actors and a learner.")
    parser.add_argument("--episodes", type=int, default=150, help="episodes of each actor")
    options = parser.parse_args()
    dist.init_process_group()
    lengths = run(options.episodes)
    for i in range(0, len(lengths), 10):
        print(f"updates {i:4} to {i + 9:4}: {np.mean(lengths[i : i + 10]):6.1f} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
