"""Algorithms for collectives over links; ``transport._choosing.choice`` selects one for each call.

All members of a ``Team`` call these functions in the same order with the same sizes.
The frames and bytes that each algorithm sends are in docs/inside/algorithms.md, and are tested.
"""
