"""Optimizers for ``parallel.nn`` parameters."""

from parallel.optim._optimizer import SGD, Adam, AdamW, Optimizer, ParamGroup

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "ParamGroup"]
