"""Arrays of any library as flat buffers, and what a call asks of them."""
