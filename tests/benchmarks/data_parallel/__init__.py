"""What data parallel training adds to a step, beside PyTorch's.

python -m tests.benchmarks.data_parallel
"""
