"""Optimizers for ``parallel.nn`` parameters."""

from parallel.optim._optax import OptaxOptimizer
from parallel.optim._optimizer import Optimizer, ParamGroup
from parallel.optim._updates import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW", "OptaxOptimizer", "Optimizer", "ParamGroup"]
