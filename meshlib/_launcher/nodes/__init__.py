"""The agents of several nodes: membership, the leader, and its decisions."""
