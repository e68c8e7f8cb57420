"""Mixtures of experts, whose experts are split over the ranks of one mesh dimension."""

from parallel.core.experts import load_balance
from parallel.expert.dispatch import Dispatch
from parallel.expert.experts import Experts, GroupedLinear
from parallel.expert.layer import MoE
from parallel.expert.router import Router

__all__ = ["Dispatch", "Experts", "GroupedLinear", "MoE", "Router", "load_balance"]
