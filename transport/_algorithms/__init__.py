"""Collectives over links, by several algorithms; ``choice`` says which is used.

Every function is called by all members of a ``Team`` in the same order with the same sizes. The
frames and bytes that each sends are in docs/inside/algorithms.md, and the tests count them.
"""
