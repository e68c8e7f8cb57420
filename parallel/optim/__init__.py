"""Optimizers for ``parallel.nn`` parameters."""

from parallel.optim.adam import Adam, AdamW
from parallel.optim.from_optax import OptaxOptimizer
from parallel.optim.optimizer import Optimizer, ParamGroup
from parallel.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "OptaxOptimizer", "Optimizer", "ParamGroup"]
