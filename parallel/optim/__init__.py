"""Optimizers for ``parallel.nn`` parameters."""

from parallel.optim._adam import Adam, AdamW
from parallel.optim._from_optax import OptaxOptimizer
from parallel.optim._optimizer import Optimizer, ParamGroup
from parallel.optim._sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "OptaxOptimizer", "Optimizer", "ParamGroup"]
