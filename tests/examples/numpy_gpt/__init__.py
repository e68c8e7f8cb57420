"""A GPT of ``parallel.nn`` modules over any of the six dims of a mesh, for tests."""
