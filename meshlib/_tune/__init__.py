"""``meshlib tune``: measures the sizes at which algorithms change, and the cost of messages."""
