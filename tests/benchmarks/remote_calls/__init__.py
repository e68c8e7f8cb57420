"""Remote calls: their time beside peers, faults, and a million of them."""
