"""``python -m parallel.bench``: what data parallel training adds to a step, beside PyTorch's."""
