"""Links between two ranks, and the communicators made of them."""
