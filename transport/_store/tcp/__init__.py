"""The store over TCP: the commands on a wire, one server and its clients."""
