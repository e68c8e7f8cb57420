"""Arrays of any library as flat buffers, and the checks of a call on them."""
