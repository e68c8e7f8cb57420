"""Gradients by finite differences, for the tests of backward passes."""

import numpy as np


def numeric(function, array, weights, step=1e-6):
    """Central differences of sum(function() * weights) in each element of ``array``."""
    grad = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        kept = array[index]
        array[index] = kept + step
        above = (function() * weights).sum()
        array[index] = kept - step
        below = (function() * weights).sum()
        array[index] = kept
        grad[index] = (above - below) / (2 * step)
    return grad
