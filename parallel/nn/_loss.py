"""Losses: softmax cross-entropy and mean squared error."""

from __future__ import annotations

from typing import Literal, get_args

from meshlib import ReduceOp
from parallel._arrays import Array, is_floating, namespace, written
from parallel._checks import check_array, check_share
from parallel.nn._module import Module

Reduction = Literal["mean", "sum"]


class CrossEntropyLoss(Module):
    """The cross-entropy between softmax(logits) and class indices.

    Args:
        reduction: "mean" over the samples, or their "sum". In data parallel training, "mean" is
            correct if all ranks have the same number of samples.
        label_smoothing: The fraction of the target that is spread over all classes (Szegedy et al.,
            arXiv:1512.00567, section 7).

    Raises ValueError for another reduction or a label_smoothing outside [0, 1], TypeError unless
    label_smoothing is a number.
    """

    def __init__(self, reduction: Reduction = "mean", label_smoothing: float = 0.0) -> None:
        super().__init__()
        _check_reduction(reduction)
        check_share(label_smoothing, "label_smoothing", whole=True)
        self.reduction: Reduction = reduction
        self.label_smoothing = label_smoothing

    def forward(self, logits: Array, targets: Array) -> float:
        """Return the loss of logits (..., classes) for integer targets (...).

        Raises ValueError for targets of another shape or dtype, or outside [0, classes), and
        without samples; TypeError for a value that is not an array.
        """
        xp, smooth = namespace(logits, "logits"), self.label_smoothing
        own = logits.shape[-1] if getattr(logits, "ndim", 0) else 0
        first, classes = self.block(own)
        index = check_targets(logits, targets, classes)
        flat = logits.reshape(-1, own)
        # Subtracting the maximum does not change softmax, and prevents overflow of exp.
        exp = flat - self.reduced(flat.max(axis=-1), ReduceOp.MAX)[:, None]
        rows = xp.nonzero((index >= first) & (index < first + own))[0]
        local = index[rows] - first
        sums = xp.zeros((3 if smooth else 2, len(index)), dtype=exp.dtype)
        sums[1][rows] = exp[rows, local]
        if smooth:
            sums[2] = exp.sum(axis=-1)
        exp = xp.exp(exp, out=exp)
        sums[0] = exp.sum(axis=-1)
        sums = self.reduced(sums, ReduceOp.SUM)
        logs = xp.log(sums[0])
        loss = (1 - smooth) * (logs - sums[1]).sum()
        if smooth:
            loss += smooth * (logs - sums[2] / classes).sum()
        if self.training:
            # exp becomes the gradient: softmax minus the target's distribution.
            exp /= sums[0][:, None]
            exp -= smooth / classes
            exp[rows, local] -= 1 - smooth
            self.save_for_backward(exp.reshape(logits.shape))
        return float(loss) / (len(index) if self.reduction == "mean" else 1)

    def block(self, own: int) -> tuple[int, int]:
        """Return the first of the ``own`` classes of this rank's logits, and the total number."""
        return 0, own

    def reduced(self, values: Array, op: ReduceOp) -> Array:
        """Return each sample's ``values``, reduced over the ranks that share the classes."""
        del op
        return values

    def backward(self, grad: float = 1.0) -> Array:
        logits_grad = self.saved()
        samples = logits_grad.size // logits_grad.shape[-1]
        logits_grad *= grad / (samples if self.reduction == "mean" else 1)
        return logits_grad


class MSELoss(Module):
    """The squared error of predictions, ``(predictions - targets) ** 2``.

    Args:
        reduction: "mean" over all elements, or their "sum". In data parallel training, "mean" is
            correct if all ranks have the same number of elements.

    Raises ValueError for another reduction.
    """

    def __init__(self, reduction: Reduction = "mean") -> None:
        super().__init__()
        _check_reduction(reduction)
        self.reduction: Reduction = reduction

    def forward(self, predictions: Array, targets: Array) -> float:
        """Return the loss of floating predictions (...) for targets of the same shape.

        Raises ValueError for another shape, for predictions that are not floating, and without
        elements; TypeError for a value that is not an array.
        """
        namespace(predictions, "predictions")
        check_array(targets, "targets")
        if not is_floating(predictions.dtype) or predictions.shape != targets.shape:
            raise ValueError(
                f"predictions are {written(predictions)} and targets {written(targets)}; expected"
                " floating predictions, and targets of the same shape"
            )
        if not predictions.size:
            raise ValueError("predictions is empty; expected at least one element")
        error = predictions - targets.astype(predictions.dtype, copy=False)
        if self.training:
            self.save_for_backward(error)
        return float((error * error).sum()) / (error.size if self.reduction == "mean" else 1)

    def backward(self, grad: float = 1.0) -> Array:
        error = self.saved()
        return error * (2 * grad / (error.size if self.reduction == "mean" else 1))


def _check_reduction(reduction: object) -> None:
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")


def check_targets(logits: Array, targets: Array, classes: int) -> Array:
    """Return the targets of logits (..., classes or a block of them), flattened to one dim.

    Raises the errors of ``CrossEntropyLoss.forward``.
    """
    check_array(targets, "targets")
    if targets.dtype.kind not in "iu" or targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets must be integers of shape {list(logits.shape[:-1])}, got {written(targets)}"
        )
    if not targets.size:
        raise ValueError("logits is empty; expected at least one sample")
    if int(targets.min()) < 0 or int(targets.max()) >= classes:
        raise ValueError(
            f"targets must be in [0, {classes}), got {int(targets.min())} to {int(targets.max())}"
        )
    return targets.reshape(-1)
