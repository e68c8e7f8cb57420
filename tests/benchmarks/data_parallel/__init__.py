"""The cost of data parallel training in a step, beside PyTorch's.

python -m tests.benchmarks.data_parallel
"""
