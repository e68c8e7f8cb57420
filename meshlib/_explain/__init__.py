"""``meshlib explain``: shows a mesh, a plan on it, or the costs of a run, without starting one."""
