"""The operands of a reduction: staged, scaled, widened, reduced, rounded."""
