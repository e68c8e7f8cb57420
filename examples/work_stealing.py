"""Ranks share uneven work without a master: an idle rank takes work from another rank.

    meshrun -n4 examples/work_stealing.py

Each rank owns a range of numbers, and its part of a window counts the numbers already taken. Ranks
take numbers by ``fetch_and_op``, so no two ranks get the same number. A rank that has used up its
range continues with its neighbour's, while the neighbour continues to compute. The work on a number
is to count its steps to 1 by the Collatz rule.
"""

from __future__ import annotations

import argparse

import numpy as np

import meshlib as dist


def steps_to_one(number: int) -> int:
    """Return the steps to 1: an even number is halved, an odd one is tripled plus 1."""
    steps = 0
    while number > 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


def main() -> None:
    """Find the number below a limit that takes the most steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--numbers", type=int, default=20_000, help="numbers of each rank")
    parser.add_argument("--batch", type=int, default=100, help="numbers taken at a time")
    options = parser.parse_args()
    dist.init_process_group()
    group = dist.group.WORLD
    rank, size, count = group.rank(), group.size(), options.numbers

    longest = (0, 0)
    done = stolen = 0
    with group.window(np.zeros(1, np.int64)) as window:
        for owner in (*range(rank, size), *range(rank)):
            while (first := int(window.fetch_and_op(options.batch, owner))) < count:
                for i in range(first, min(first + options.batch, count)):
                    number = owner * count + i + 1
                    longest = max(longest, (steps_to_one(number), -number))
                    done += 1
                    stolen += owner != rank

    found = dist.all_gather_object([None] * size, (longest, done, stolen))
    if rank == 0:
        (steps, number), total = max(one for one, _, _ in found), sum(n for _, n, _ in found)
        print(f"{total} numbers: {-number} takes the most steps, {steps}")
        print("each rank did", [n for _, n, _ in found], "of which stolen", [n for *_, n in found])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
