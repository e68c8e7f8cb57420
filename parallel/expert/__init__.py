"""Mixtures of experts, whose experts are split over the ranks of one mesh dimension."""

from parallel._core.experts import load_balance
from parallel.expert._experts import Dispatch, Experts, GroupedLinear
from parallel.expert._layer import MoE, Router

__all__ = ["Dispatch", "Experts", "GroupedLinear", "MoE", "Router", "load_balance"]
