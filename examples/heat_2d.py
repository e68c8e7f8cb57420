"""Heat spreads over a plate that is cut into blocks, one for each rank of a mesh.

    meshrun --mesh y=2,x=2 examples/heat_2d.py

Each rank has its block with one ghost cell at each side. Before a step ``exchange_halo`` fills the
ghost cells with the neighbours' values. The result equals that of one process, bit by bit.
"""

from __future__ import annotations

import argparse

import numpy as np

import meshlib as dist

HOT = 24
"""The side of the initially hot corner, in cells."""


def step(block: np.ndarray) -> None:
    """Update the inner cells by one step of the heat equation."""
    around = block[:-2, 1:-1] + block[2:, 1:-1] + block[1:-1, :-2] + block[1:-1, 2:]
    block[1:-1, 1:-1] += 0.2 * (around - 4 * block[1:-1, 1:-1])


def main() -> None:
    """Heat one corner of a cold plate, and print the temperatures at the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, default=64, help="cells of a block along each dim")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    mesh = dist.init_device_mesh()
    cells = options.cells
    block = np.zeros((cells + 2, cells + 2))
    if mesh.get_coordinate() == [0, 0]:
        block[1 : HOT + 1, 1 : HOT + 1] = 100.0
    for _ in range(options.steps):
        mesh.exchange_halo(block, {"y": 0, "x": 1})  # the plate's own edges stay cold
        step(block)
    inner = block[1:-1, 1:-1]
    total = mesh.all_reduce(np.array([inner.sum()]))[0]
    warmest = mesh.all_reduce(np.array([inner.max()]), op=dist.ReduceOp.MAX)[0]
    if mesh.get_rank() == 0:
        size = mesh.size() * cells**2
        print(f"{size} cells: {total / size:.3f} degrees on average, {warmest:.3f} at most")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
