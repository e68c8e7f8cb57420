"""A pole on a cart, balanced by pushes to the left or to the right.

The equations are those of Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve
difficult learning control problems" (1983), without friction, integrated by Euler's method.
"""

from __future__ import annotations

import math

import numpy as np

GRAVITY, CART, POLE, HALF_LENGTH = 9.8, 1.0, 0.1, 0.5
FORCE, SECONDS = 10.0, 0.02
MOST_STEPS = 200
_FARTHEST, _STEEPEST = 2.4, math.radians(12)


class CartPole:
    """One cart. Its state is (position, velocity, angle, angular velocity): m, m/s, rad, rad/s."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._state = rng.uniform(-0.05, 0.05, 4)
        self._steps = 0

    @property
    def state(self) -> np.ndarray:
        """A copy of the state, shape (4,)."""
        return self._state.copy()

    def push(self, right: bool) -> bool:
        """Push for one step; return True if the pole still stands and the episode continues."""
        _, speed, angle, turn = self._state
        sine, cosine, mass = math.sin(angle), math.cos(angle), CART + POLE
        push = ((FORCE if right else -FORCE) + POLE * HALF_LENGTH * turn**2 * sine) / mass
        fall = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE * cosine**2 / mass))
        slide = push - POLE * HALF_LENGTH * fall * cosine / mass
        self._state += SECONDS * np.array([speed, slide, turn, fall])
        self._steps += 1
        position, _, angle, _ = self._state
        return abs(position) <= _FARTHEST and abs(angle) <= _STEEPEST and self._steps < MOST_STEPS


def chance_of_right(weights: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Return the probability of a push to the right in each of the states (..., 4)."""
    return 1 / (1 + np.exp(-states @ weights))


def episode(weights: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Play an episode with the policy of ``weights`` (4,).

    Return the states (steps, 4), and whether the policy pushed to the right in each (steps,).
    """
    cart, states, pushes, goes_on = CartPole(rng), list[np.ndarray](), list[bool](), True
    while goes_on:
        states.append(cart.state)
        pushes.append(bool(rng.random() < chance_of_right(weights, states[-1])))
        goes_on = cart.push(pushes[-1])
    return np.array(states), np.array(pushes)
