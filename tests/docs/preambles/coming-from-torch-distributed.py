"""Assumed by the fragments: the program above them."""

import numpy as np

import meshlib as dist

gradient = np.ones(dist.get_world_size())
