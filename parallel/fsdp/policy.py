"""In which dtypes sharded modules compute, reduce gradients and return what they computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel.checks import to_floating


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of one ``fully_shard``: None leaves things as they are.

    Args:
        param_dtype: what parameters are gathered in, and modules compute in. The parts that the
            optimizer updates stay what they are.
        reduce_dtype: what gradients are reduced in; by default the parameters' own dtype.
        output_dtype: what floating outputs of ``forward`` are cast to; by default they stay in the
            dtype that they were computed in.
        cast_forward_inputs: cast floating inputs of ``forward`` to ``param_dtype``.

    Raises ValueError for a dtype that is not floating, TypeError for what is no dtype.
    """

    param_dtype: npt.DTypeLike | None = None
    reduce_dtype: npt.DTypeLike | None = None
    output_dtype: npt.DTypeLike | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, to_floating(value, name))

    def dtype(self, name: str) -> np.dtype[Any] | None:
        """Return ``param_dtype``, ``reduce_dtype`` or ``output_dtype`` as a dtype, or None."""
        value = getattr(self, name)
        return None if value is None else np.dtype(value)
