"""A backend for ``torch.distributed``: CPU tensors go through meshlib.

``import meshlib.torch`` registers it under the name ``meshlib``:
``torch.distributed.init_process_group("meshlib")``, or ``"cpu:meshlib,cuda:nccl"``.

PyTorch is imported here and nowhere else in meshlib.
"""

from meshlib.torch.registration import register

__all__ = ["register"]

register()
