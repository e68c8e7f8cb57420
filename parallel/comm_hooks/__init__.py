"""Communication hooks for ``DistributedDataParallel.register_comm_hook``.

``parallel._core.comm_hooks`` explains how to write a hook.
"""

from parallel._core.comm_hooks import CommHook, allreduce_hook, noop_hook
from parallel.comm_hooks._hooks import (
    PostLocalSGDState,
    PowerSGDState,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    post_localSGD_hook,
    powerSGD_hook,
)

__all__ = [
    "CommHook",
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
]
