"""A table of vectors, looked up by index."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from parallel._arrays import Array, namespace
from parallel._checks import check_array, to_count, to_floating, to_generator
from parallel.nn._module import Module
from parallel.nn._parameter import Parameter


class Embedding(Module):
    """``weight[indices]``, weight being (num_embeddings, embedding_dim), drawn from N(0, 1).

    ``rng`` draws the weight, which is of ``dtype``; None: NumPy's global random state does, which
    ``np.random.seed`` sets. Ranks on which the layer must begin alike (``fully_shard``,
    ``parallelize``) need equal generators or seeds.

    Raises ValueError for sizes below 1 or a dtype that is not floating, TypeError for arguments of
    another type.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        rng: np.random.Generator | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        rows = to_count(num_embeddings, "num_embeddings")
        columns = to_count(embedding_dim, "embedding_dim")
        table = to_generator(rng).standard_normal((rows, columns))
        self.weight: Parameter = Parameter(table.astype(to_floating(dtype, "dtype")))

    def forward(self, indices: Array) -> Array:
        """Map integers of any shape, each in [0, num_embeddings), to (*shape, embedding_dim).

        Raises IndexError for an index outside, TypeError for anything but integers.
        """
        self.check(indices)
        self.save_for_backward(indices)
        return self.weight.data[indices]

    def backward(self, grad: Array) -> None:
        """Add each vector's gradient to its row. Indices have no gradient: returns None."""
        rows = self.saved().reshape(-1)
        self.defer(lambda: self.accumulate(rows, grad.reshape(-1, grad.shape[-1])))

    @property
    def num_embeddings(self) -> int:
        """How many rows there are."""
        return self.weight.shape[0]

    def check(self, indices: Array) -> None:
        """Raise IndexError for an index outside, TypeError for anything but integers."""
        check_array(indices, "indices")
        if indices.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, got {indices.dtype.name}")
        count = self.num_embeddings
        if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= count):
            raise IndexError(
                f"indices must lie in [0, {count}), got {int(indices.min())} to "
                f"{int(indices.max())}"
            )

    def accumulate(self, rows: Array, grads: Array) -> None:
        """Add ``grads``, (n, embedding_dim), to the gradients of ``rows``, (n,)."""
        total = namespace(grads).zeros_like(self.weight.data)
        namespace(grads).add.at(total, rows, grads)
        self.weight.accumulate_grad(total)
