"""The layer: a router, experts on several ranks, and shared ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from meshlib import ProcessGroup
from parallel._arrays import Array, namespace
from parallel._checks import (
    check_generator,
    check_instance,
    check_nonnegative,
    check_number,
    to_count,
    to_floating,
)
from parallel._core.experts import Score, capacity_of, choose, load_balance, scores_of
from parallel._groups import GroupLike, resolve
from parallel.expert._experts import Dispatch, Experts
from parallel.nn._layers.linear import check_input, uniform_init
from parallel.nn._layers.simple import GELU
from parallel.nn._module import Module
from parallel.nn._parameter import Parameter
from parallel.tensor_parallel._parts import reduce


class Router(Module):
    """A linear layer that scores the experts for each token, of which the best ``top_k`` are taken.

    Scores are ``softmax(x @ weight.T)`` or ``sigmoid`` of it: see ``parallel._core.experts``.

    Args:
        dim: The size of a token.
        experts: The number of experts.
        top_k: The number of experts that each token goes to.
        score: "softmax" or "sigmoid".
        normalize: Divide the weights of the chosen by their sum. None: if there are several (the
            weight of a single one would be 1 and have no derivative).
        balance_weight: The weight of ``load_balance`` in the loss; backward adds its gradient. You
            may change the attribute. Divide it by the number of microbatches if their gradients are
            added up.
        balance_over: The ranks whose tokens are balanced together, those that share the batch:
            ``mesh["dp", "ep"]``. None: each rank's by themselves.
        rng: Draws the weight, (experts, dim), uniformly within 1/sqrt(dim); in the same state on
            all ranks.
        dtype: Of the weight.

    Raises:
        ValueError: For numbers below 1, more choices than experts, an unknown score, a negative
            weight, or a dtype that is not floating.
        TypeError: For arguments of another type.
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
        balance_over: GroupLike | None = None,
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
        """The number of the last forward's choices of each expert, over ``balance_over``."""
        self.balance_loss: float = 0.0
        """The balance loss of the last forward, without its weight: this rank's share."""

    @property
    def experts(self) -> int:
        """The number of experts."""
        return self.weight.shape[0]

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Map tokens (n, dim) to weights (n, top_k) and experts (n, top_k), the best first.

        Raises ValueError for another shape, TypeError for a value that is not an array or of
        another dtype.
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


class MoE(Module):
    """A mixture of experts: ``y = sum over the top_k experts e of x of weight_e * e(x)``.

    Each rank of ``ep`` has its own tokens and ``experts / size`` of the experts. Each token's rows
    travel to its experts and back, in forward and in backward. Without ``capacity_factor``, the
    results are those of one process with all experts and all tokens.

    **Gradients.** The router (and all else) is replicated over ``ep``: average its gradient over
    ``ep`` and the data-parallel dims. Experts are replicated over the data-parallel dims only:
    average theirs over these, ``fully_shard(layer.experts, mesh["dp_shard"])``, or
    ``layer.experts`` in a ``DistributedDataParallel`` of its own. Over ``tp`` nothing is averaged.

    Lepikhin et al., "GShard", arXiv:2006.16668; Fedus et al., "Switch Transformers",
    arXiv:2101.03961; without dropped tokens: Gale et al., "MegaBlocks", arXiv:2211.15841; shared
    experts: Dai et al., "DeepSeekMoE", arXiv:2401.06066, section 3.2.

    Args:
        dim: The size of a token.
        hidden: That between the two layers of an expert.
        experts: The number of experts, on all ranks of ``ep``.
        top_k: The number of experts that each token goes to.
        ep: The ranks that the experts are split over: ``mesh["ep"]``. None: all are here.
        tp: The ranks that each expert is split over, which have the same tokens: ``mesh["tp"]``.
            None: each is whole.
        score: "softmax" or "sigmoid", see ``Router``; ``normalize``, ``balance_weight`` and
            ``balance_over``, too.
        normalize: See ``score``.
        balance_weight: See ``score``.
        balance_over: See ``score``.
        capacity_factor: Each expert takes at most ``ceil(capacity_factor * top_k * n / experts)``
            rows of the n tokens of a rank, and the rest is dropped. The result then depends on the
            distribution of tokens over ranks. None: nothing is dropped.
        shared: A module that all tokens go through besides; it runs while rows travel.
        activation: Makes the module between an expert's two layers, element by element.
        rng: Draws the router, then the experts; in the same state on all ranks.
        dtype: Of the parameters.

    Raises:
        ValueError: For numbers below 1, more choices than experts, and experts or hidden features
            that do not divide by the ranks. For an unknown score, a ``capacity_factor`` that is not
            positive, or a dtype that is not floating.
        TypeError: For arguments of another type.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        ep: GroupLike | None = None,
        tp: GroupLike | None = None,
        score: Score = "softmax",
        normalize: bool | None = None,
        balance_weight: float = 0.0,
        balance_over: GroupLike | None = None,
        capacity_factor: float | None = None,
        shared: Module | None = None,
        activation: Callable[[], Module] = GELU,
        rng: np.random.Generator,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        if capacity_factor is not None:
            check_number(capacity_factor, "capacity_factor")
            if not capacity_factor > 0:
                raise ValueError(f"capacity_factor must be positive, got {capacity_factor}")
        if shared is not None:
            check_instance(shared, Module, "shared")
        self.router: Router = Router(
            dim,
            experts,
            top_k,
            score=score,
            normalize=normalize,
            balance_weight=balance_weight,
            balance_over=balance_over,
            rng=rng,
            dtype=dtype,
        )
        self.experts: Experts = Experts(
            experts, dim, hidden, ep=ep, tp=tp, activation=activation, rng=rng, dtype=dtype
        )
        self.shared = shared
        self.capacity_factor = capacity_factor
        self.dropped = 0
        """The number of this rank's token choices in the last forward that no expert took."""
        self._ep = None if ep is None else resolve(ep, "ep")
        self._tp = None if tp is None else resolve(tp, "tp")

    def forward(self, x: Array) -> Array:
        """Map (..., dim) to the same shape. All ranks of ``ep`` call.

        Raises ValueError for another last dimension, TypeError for a value that is not an array or
        one of
        another dtype: before anything is sent.
        """
        flat = x.reshape(-1, x.shape[-1]) if getattr(x, "ndim", 0) else x
        weights, chosen = self.router(flat)
        experts = self.router.experts
        capacity = capacity_of(self.capacity_factor, len(flat), self.router.top_k, experts)
        plan = Dispatch(chosen, experts, self._ep, capacity)
        self.dropped: int = plan.dropped
        arriving = plan.send(flat[plan.tokens_of_rows])
        shared = None if self.shared is None else self.shared(x)
        rows = plan.send_back(self.experts(arriving(), plan.counts))()
        terms = plan.by_choice(rows)
        # Summed up in the order of the choices, wherever the experts were.
        y = terms[0] * weights[:, :1]
        for choice in range(1, plan.top_k):
            y += terms[choice] * weights[:, choice : choice + 1]
        if self._tp is not None:
            y = reduce(y, self._tp)
        self.save_for_backward((plan, rows, weights))
        y = y.reshape(x.shape)
        return y if shared is None else y + shared

    def backward(self, grad: Array) -> Array:
        """Map the output's gradient to the input's. All ranks of ``ep`` call."""
        plan, rows, weights = self.saved()
        flat = grad.reshape(-1, grad.shape[-1])
        tokens = plan.tokens_of_rows
        of_rows = flat[tokens]
        weights_grad = plan.by_choice((of_rows * rows).sum(axis=-1, keepdims=True))[..., 0].T.copy()
        summing = None if self._tp is None else self._tp.all_reduce(weights_grad, async_op=True)
        weight_of_row = weights.T.reshape(-1)[plan.rows]
        arriving = plan.send(of_rows * weight_of_row[:, None])
        shared = None if self.shared is None else self.shared.backward(grad)
        back = plan.send_back(self.experts.backward(arriving()))
        if summing is not None:
            summing.wait()
        of_router = self.router.backward(weights_grad)
        input_grad = plan.by_choice(back()).sum(axis=0)
        if self._tp is not None:
            input_grad = reduce(input_grad, self._tp)
        input_grad += of_router
        input_grad = input_grad.reshape(grad.shape)
        return input_grad if shared is None else input_grad + shared
