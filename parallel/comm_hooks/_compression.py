"""Gradients in 16 bits: half the bytes (a quarter, for float64) on the wire.

Each rank rounds its gradients once; their average is computed in float32 and rounded once more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshlib import Future
from parallel._checks import check_callable
from parallel._core.comm_hooks import CommHook, allreduce_hook, compress_wrapper
from parallel._core.grad_bucket import GradBucket
from parallel._groups import Ranks


def fp16_compress_hook(process_group: Ranks | None, bucket: GradBucket) -> Future[Any]:
    """Average the bucket in float16: 11 bits of precision, nothing above 65504.

    ``process_group``: ``mesh["dp"]``, a group, or None for the wrapper's own.
    """
    return compress_wrapper(allreduce_hook, np.float16)(process_group, bucket)


def bf16_compress_hook(process_group: Ranks | None, bucket: GradBucket) -> Future[Any]:
    """Average the bucket in bfloat16: 8 bits of precision, the range of float32.

    ``process_group``: ``mesh["dp"]``, a group, or None for the wrapper's own. Needs the package
    ml_dtypes: raises ImportError without it.
    """
    return compress_wrapper(allreduce_hook, _bfloat16())(process_group, bucket)


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return ``hook`` run on the bucket in float16, such as ``powerSGD_hook``.

    Raises TypeError for what cannot be called.
    """
    check_callable(hook, "hook")
    return compress_wrapper(hook, np.float16)


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return ``hook`` run on the bucket in bfloat16. Needs the package ml_dtypes.

    Raises TypeError for what cannot be called, ImportError without that package.
    """
    check_callable(hook, "hook")
    return compress_wrapper(hook, _bfloat16())


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError("bfloat16 needs the package ml_dtypes; install it") from error
    return np.dtype(ml_dtypes.bfloat16)
