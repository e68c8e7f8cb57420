"""The list of cases, and what they share."""

from __future__ import annotations

import torch
import torch.distributed as dist

RANKS = 4
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def seeded(*shape, rank=None):
    """Draw numbers that depend on the rank."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return torch.randn(*shape, generator=generator)


def backend():
    return dist.get_backend()
