"""The memory of one-sided windows, accessed by loads and stores, or by messages."""
