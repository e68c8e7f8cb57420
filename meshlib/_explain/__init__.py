"""``meshlib explain``: shows a mesh, a plan on it, or the costs of a step, without a job."""
