"""Cross-entropy of logits whose classes are split over ``mesh["tp"]``."""

from __future__ import annotations

from meshlib import ProcessGroup, ReduceOp
from parallel._arrays import Array, namespace
from parallel._groups import Ranks, resolve
from parallel.nn._loss import CrossEntropyLoss, Reduction, check_targets


class VocabParallelCrossEntropyLoss(CrossEntropyLoss):
    """The cross-entropy of logits of which each rank has the i-th block of classes.

    Such are the outputs of a ``ColumnParallelLinear``. They are never gathered: two all-reduces, of
    one number a sample (the largest logit) and of two (the sum of exponentials and the target's
    logit; a third with label smoothing), give the same loss on every rank, and backward needs none.
    Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.

    Args:
        mesh: the ranks: ``mesh["tp"]``, a process group, or None for the default group.
        reduction: "mean" over the samples, or their "sum".
        label_smoothing: the share of the target that is spread over all classes.

    Raises:
        ValueError: for another reduction, a share outside [0, 1], or ranks without this one.
        TypeError: for arguments of another type.
    """

    def __init__(
        self,
        mesh: Ranks | None = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(reduction, label_smoothing)
        self.group: ProcessGroup = resolve(mesh, "mesh")

    def forward(self, logits: Array, targets: Array) -> float:
        """Return the loss of logits (..., classes / size) for targets (...), in [0, classes).

        Targets are the same on all ranks.

        Raises ValueError for targets of another shape or dtype, or outside [0, classes), and for
        no samples; TypeError for what is no array.
        """
        xp, group = namespace(logits, "logits"), self.group
        own = logits.shape[-1] if getattr(logits, "ndim", 0) else 0
        classes = own * group.size()
        index = check_targets(logits, targets, classes)
        flat = logits.reshape(-1, own)
        largest = flat.max(axis=-1)
        group.all_reduce(largest, op=ReduceOp.MAX)
        exp = flat - largest[:, None]
        local = index - group.rank() * own
        rows = xp.nonzero((local >= 0) & (local < own))[0]
        local = local[rows]
        smooth = self.label_smoothing
        sums = xp.zeros((3 if smooth else 2, len(index)), dtype=exp.dtype)
        sums[1][rows] = exp[rows, local]
        if smooth:
            sums[2] = exp.sum(axis=-1)
        exp = xp.exp(exp, out=exp)
        sums[0] = exp.sum(axis=-1)
        group.all_reduce(sums)
        logs = xp.log(sums[0])
        loss = (1 - smooth) * (logs - sums[1]).sum()
        if smooth:
            loss += smooth * (logs - sums[2] / classes).sum()
        if self.training:
            exp /= sums[0][:, None]
            exp -= smooth / classes
            exp[rows, local] -= 1 - smooth
            self.save_for_backward(exp.reshape(logits.shape))
        return float(loss) / (len(index) if self.reduction == "mean" else 1)
