"""The functions of ``torch.distributed``."""
