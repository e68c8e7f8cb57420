"""A backend for ``torch.distributed``: CPU tensors go through meshlib.

It is registered under the name ``meshlib`` as soon as PyTorch is imported, or this:
``torch.distributed.init_process_group("meshlib")``, or ``"cpu:meshlib,cuda:nccl"``.

PyTorch is imported here and nowhere else in meshlib.
"""

from meshlib.torch._registration import register

__all__ = ["register"]

register()
