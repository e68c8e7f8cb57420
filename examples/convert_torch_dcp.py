"""Convert a checkpoint of torch.distributed.checkpoint (DCP) to meshlib's format, and back.

    python examples/convert_torch_dcp.py from-dcp DCP_FOLDER FOLDER --step 100
    python examples/convert_torch_dcp.py to-dcp FOLDER DCP_FOLDER

Runs in one process; needs torch. The result loads on any mesh, whatever the tensors' sharding was.
Tensors become arrays; the tree, numbers and strings stay the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from meshlib.checkpoint import load, save


def from_dcp(source: Path, folder: Path, step: int) -> str:
    """Convert the DCP checkpoint ``source`` to one in ``folder``; return its path."""
    metadata = dcp.FileSystemReader(source).read_metadata()
    flat: dict[str, Any] = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype)
        if isinstance(kind, TensorStorageMetadata)
        else None
        for name, kind in metadata.state_dict_metadata.items()
    }
    dcp.load(flat, checkpoint_id=source, no_dist=True)
    paths = metadata.planner_data or {name: (name,) for name in flat}
    return save(
        folder, nested({paths[name]: to_array(leaf) for name, leaf in flat.items()}), step=step
    )


def to_dcp(folder: Path, target: Path) -> None:
    """Convert the newest checkpoint in ``folder`` to a DCP checkpoint in ``target``."""
    dcp.save(mapped(load(folder), to_tensor), checkpoint_id=target, no_dist=True)


def nested(leaves: dict[tuple[Any, ...], Any]) -> Any:
    """Return the tree with these leaves: dicts, or lists if the keys are 0, 1, 2, …"""
    if list(leaves) == [()]:
        return leaves[()]
    parts: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (key, *rest), leaf in leaves.items():
        parts.setdefault(key, {})[tuple(rest)] = leaf
    children = {key: nested(part) for key, part in parts.items()}
    # DCP's paths have list indices as integers, and dict keys unchanged.
    return (
        [children[i] for i in range(len(children))]
        if set(children) == {*range(len(children))}
        else children
    )


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return ``tree`` with ``function(leaf)`` for each leaf."""
    if isinstance(tree, dict):
        return {key: mapped(child, function) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(child, function) for child in tree)
    return function(tree)


def to_array(leaf: Any) -> Any:
    """Return a tensor as an array over the same memory."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.dtype is torch.bfloat16:
        import ml_dtypes

        return leaf.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return leaf.numpy()


def to_tensor(leaf: Any) -> Any:
    """Return an array as a tensor over the same memory."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    if leaf.dtype.name == "bfloat16":
        return torch.from_numpy(leaf.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(leaf)


def main() -> None:
    """Convert in the direction given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("direction", choices=["from-dcp", "to-dcp"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--step", type=int, default=0, help="step of the new checkpoint")
    args = parser.parse_args()
    if args.direction == "from-dcp":
        print(from_dcp(args.source, args.target, args.step))
    else:
        to_dcp(args.source, args.target)


if __name__ == "__main__":
    main()
