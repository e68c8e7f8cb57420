"""Arrays of any library as flat buffers, and the checks of arguments."""
