"""A call, the header that identifies it to other ranks, and the codes of dtypes and ops."""
