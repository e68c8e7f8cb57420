"""Remote calls: the caller's and the server's side, and their frames."""
