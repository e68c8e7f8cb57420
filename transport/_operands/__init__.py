"""What goes into a reduction and comes out of it: staged, scaled, widened, folded, rounded."""
