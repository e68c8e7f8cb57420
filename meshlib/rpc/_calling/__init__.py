"""Remote calls: their frames, made by the caller and run by the server."""
