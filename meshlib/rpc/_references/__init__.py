"""References to objects on workers, as their holders and their owners keep them."""
