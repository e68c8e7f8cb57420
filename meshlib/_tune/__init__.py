"""``meshlib tune``: measures where one algorithm gives way to another, and what messages cost."""
