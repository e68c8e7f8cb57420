"""Mixed precision for ``DistributedDataParallel``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy.typing as npt

from parallel.checks import to_floating


@dataclass(frozen=True)
class MixedPrecision:
    """In which dtypes a model computes and averages, while it is trained in that of its parameters.

    ``param_dtype`` is that of forward and backward, as by ``nn.ComputeIn`` around the whole module
    (put ``ComputeIn`` of another dtype around parts that need it). ``reduce_dtype`` is that of the
    buckets on the wire. None means the parameters' own. Names as in torch's.

    Raises ValueError for a dtype that is not floating, TypeError for what is no dtype.
    """

    param_dtype: npt.DTypeLike | None = None
    reduce_dtype: npt.DTypeLike | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None:
                to_floating(dtype, name)
