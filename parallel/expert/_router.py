"""Which experts each token goes to, and with what weights."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from meshlib import ProcessGroup
from parallel._arrays import Array, namespace
from parallel._checks import check_generator, check_nonnegative, to_count, to_floating
from parallel._core.experts import Score, choose, load_balance, scores_of
from parallel._groups import Ranks, resolve
from parallel.nn._layers.linear import check_input, uniform_init
from parallel.nn._module import Module
from parallel.nn._parameter import Parameter


class Router(Module):
    """A linear layer that scores the experts for each token, of which the best ``top_k`` are taken.

    Scores are ``softmax(x @ weight.T)`` or ``sigmoid`` of it: see ``parallel._core.experts``.

    Args:
        dim: the size of a token.
        experts: how many there are.
        top_k: how many each token goes to.
        score: "softmax" or "sigmoid".
        normalize: divide the weights of the chosen by their sum. None: if there are several (the
            weight of a single one would be 1 and have no derivative).
        balance_weight: what the loss grows by for each unit of ``load_balance``: its gradient is
            added in backward. The attribute may be changed; it is divided by the number of
            microbatches where gradients of several are added up.
        balance_over: the ranks whose tokens are balanced together, those that share the batch:
            ``mesh["dp", "ep"]``. None: each rank's by themselves.
        rng: draws the weight, (experts, dim), uniformly within 1/sqrt(dim); in the same state on
            all ranks.
        dtype: of the weight.

    Raises:
        ValueError: for numbers below 1, more choices than experts, an unknown score, a negative
            weight, or a dtype that is not floating.
        TypeError: for arguments of another type.
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        top_k: int,
        *,
        score: Score = "softmax",
        normalize: bool | None = None,
        balance_weight: float = 0.0,
        balance_over: Ranks | None = None,
        rng: np.random.Generator,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        dim, experts = to_count(dim, "dim"), to_count(experts, "experts")
        self.top_k: int = to_count(top_k, "top_k")
        if self.top_k > experts:
            raise ValueError(f"top_k is {top_k}; expected at most the number of experts, {experts}")
        if score not in get_args(Score):
            raise ValueError(f"score must be 'softmax' or 'sigmoid', got {score!r}")
        check_nonnegative(balance_weight=balance_weight)
        check_generator(rng)
        self.score: Score = score
        self.normalize: bool = self.top_k > 1 if normalize is None else bool(normalize)
        self.balance_weight = balance_weight
        self._balance_over: ProcessGroup | None = (
            None if balance_over is None else resolve(balance_over, "balance_over")
        )
        self.weight: Parameter = Parameter(
            uniform_init((experts, dim), 1 / math.sqrt(dim), rng, to_floating(dtype, "dtype"))
        )
        self.load: npt.NDArray[Any] = np.zeros(experts, np.int64)
        """How many choices of the last forward fell on each expert, over ``balance_over``."""
        self.balance_loss: float = 0.0
        """The balance loss of the last forward, without its weight: this rank's share."""

    @property
    def experts(self) -> int:
        """How many experts there are."""
        return self.weight.shape[0]

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Map tokens (n, dim) to weights (n, top_k) and experts (n, top_k), the best first.

        Raises ValueError for another shape, TypeError for what is no array or of another dtype.
        """
        check_input(x, self.weight, self.weight.shape[1], type(self).__qualname__)
        if x.ndim != 2:
            raise ValueError(f"x must be tokens of shape (n, {x.shape[-1]}), got {list(x.shape)}")
        xp = namespace(x)
        logits = x @ self.weight.data.T
        scores = scores_of(xp, logits, self.score)
        best, chosen = choose(xp, scores, self.top_k)
        weights = best
        if self.normalize:
            weights = best / best.sum(axis=-1, keepdims=True)
        balance_grad = self._balance(scores, chosen)
        self.save_for_backward((x, scores, chosen, weights, best, balance_grad))
        return weights, chosen

    def _balance(self, scores: Array, chosen: Array) -> Array | None:
        """Note load and balance loss; return the loss's gradient by the shares of the experts."""
        xp = namespace(scores)
        counts = xp.bincount(chosen.reshape(-1), minlength=self.experts)
        if not self.balance_weight:
            self.load = counts
            return None
        if self._balance_over is not None and self._balance_over.size() > 1:
            counts = self._balance_over.all_reduce(counts)
        self.load = counts
        shares = scores / scores.sum(axis=-1, keepdims=True)
        loss, grad = load_balance(counts, shares)
        self.balance_loss = float(loss)
        return grad * self.balance_weight

    def backward(self, grad: Array) -> Array:
        """Map the gradient of the weights, (n, top_k), to that of the tokens, (n, dim)."""
        x, scores, chosen, weights, best, balance_grad = self.saved()
        xp = namespace(grad)
        if self.normalize:
            along = (grad * weights).sum(axis=-1, keepdims=True)
            grad = (grad - along) / best.sum(axis=-1, keepdims=True)
        scores_grad = xp.zeros_like(scores)
        xp.put_along_axis(scores_grad, chosen, grad.astype(scores.dtype, copy=False), axis=-1)
        if balance_grad is not None:
            total = scores.sum(axis=-1, keepdims=True)
            along = (scores * balance_grad).sum(axis=-1, keepdims=True) / total
            scores_grad += (balance_grad - along) / total
        if self.score == "softmax":
            along = (scores_grad * scores).sum(axis=-1, keepdims=True)
            logits_grad = scores * (scores_grad - along)
        else:
            logits_grad = scores_grad * scores * (1 - scores)
        self.defer(lambda: self.weight.accumulate_matmul(logits_grad.T, x))
        return logits_grad @ self.weight.data
