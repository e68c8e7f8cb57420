"""A GPT on real text, over any of the six dims of a mesh: ``meshrun --mesh … examples/gpt``."""
