"""``meshlib tune``: measures the sizes at which algorithms switch, and the cost of messages."""
