"""The collectives, as methods of process groups and device meshes."""
