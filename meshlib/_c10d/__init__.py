"""The functions that ``torch.distributed``'s users know."""
