"""The same work by PyTorch in the same run."""
