"""A backend for ``torch.distributed`` that communicates CPU tensors over meshlib.

Importing PyTorch or this package registers the backend ``meshlib``:
``torch.distributed.init_process_group("meshlib")``, or ``"cpu:meshlib,cuda:nccl"``.

No other package of meshlib imports PyTorch.
"""

from meshlib.torch._registration import register

__all__ = ["register"]

register()
