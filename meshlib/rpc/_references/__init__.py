"""References to objects on workers: what their holders and their owners keep of them."""
