"""What a launch is asked to do: by the command line, the engine and the node."""
