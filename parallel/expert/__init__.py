"""Mixtures of experts, whose experts are split over the ranks of one mesh dimension."""

from parallel.expert.dispatch import Dispatch
from parallel.expert.experts import Experts, GroupedLinear
from parallel.expert.layer import MoE
from parallel.expert.router import Router, load_balance

__all__ = ["Dispatch", "Experts", "GroupedLinear", "MoE", "Router", "load_balance"]
