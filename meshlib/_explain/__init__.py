"""``meshlib explain``: what a mesh or a plan on it looks like, and a run takes. Starts nothing."""
