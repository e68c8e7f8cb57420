"""An embedding and a cross-entropy whose vocabulary is split over ``mesh["tp"]``."""

from __future__ import annotations

from meshlib import ProcessGroup, ReduceOp
from parallel._arrays import Array, namespace
from parallel._groups import GroupLike, resolve
from parallel.nn._layers.linear import Embedding
from parallel.nn._loss import CrossEntropyLoss, Reduction
from parallel.tensor_parallel._parts import (
    Parts,
    Placement,
    gather,
    reduce,
    sequence_dim,
)


class VocabParallelEmbedding(Embedding):
    """An Embedding split by rows: each rank holds the vectors of a block of indices.

    Each rank looks up the indices of its block, uses zeros for the others, and the ranks' vectors
    are added: Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3. ``parallelize`` makes
    one from an ``Embedding``.
    """

    parts: Parts
    scattered_dim: int | None
    """The dim along which the output is split over the ranks; None: the output is whole."""

    def cut(self, parts: Parts, output_layouts: Placement | None) -> None:
        """Reduce a whole table to this rank's rows; see ``RowwiseParallel``."""
        self.scattered_dim = sequence_dim(output_layouts, "output_layouts")
        self.parts = parts
        parts.cut(self.weight, 0)

    @property
    def num_embeddings(self) -> int:
        """The number of rows on all ranks."""
        return self.weight.shape[0] * self.parts.group.size()

    def forward(self, indices: Array) -> Array:
        """Map integers of any shape, each in [0, num_embeddings), to (*shape, embedding_dim).

        Raises IndexError for an index out of range, TypeError for other dtypes than integers,
        ValueError for a sequence length that is not divisible by the number of ranks.
        """
        self.check(indices)
        rows, group = self.weight.shape[0], self.parts.group
        local = indices - group.rank() * rows
        own = (local >= 0) & (local < rows)
        local = local[own]
        self.save_for_backward((own, local))
        y = namespace(self.weight.data).zeros(
            (*indices.shape, self.weight.shape[1]), dtype=self.weight.data.dtype
        )
        y[own] = self.weight.data[local]
        return reduce(y, group, self.scattered_dim)

    def backward(self, grad: Array) -> None:
        """Add each vector's gradient to its row. Returns None, because indices have no gradient."""
        own, local = self.saved()
        if self.scattered_dim is not None:
            grad = gather(grad, self.parts.group, self.scattered_dim)
        rows = grad[own]
        self.defer(lambda: self.accumulate(local, rows))


class VocabParallelCrossEntropyLoss(CrossEntropyLoss):
    """The cross-entropy of logits (..., classes / size); rank i has the i-th block of classes.

    Targets, in [0, classes), are the same on all ranks. The logits are the outputs of a
    ``ColwiseParallel`` layer; they are never gathered. Forward makes two all-reduces. The first has
    one number per sample, the largest logit. The second has the sum of exponentials, the target's
    logit and, with label smoothing, a third number. Every rank gets the same loss, and backward
    does not communicate. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.

    Args:
        mesh: The ranks: ``mesh["tp"]``, a process group, or None for the default group.
        reduction: "mean" over the samples, or their "sum".
        label_smoothing: The fraction of the target that is spread over all classes.

    Raises:
        ValueError: For another reduction, a label_smoothing outside [0, 1], or if this rank is not
            in ``mesh``.
        TypeError: For arguments of another type.
    """

    def __init__(
        self,
        mesh: GroupLike | None = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(reduction, label_smoothing)
        self.group: ProcessGroup = resolve(mesh, "mesh")

    def block(self, own: int) -> tuple[int, int]:
        return self.group.rank() * own, self.group.size() * own

    def reduced(self, values: Array, op: ReduceOp) -> Array:
        self.group.all_reduce(values, op=op)
        return values
