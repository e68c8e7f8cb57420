"""Connections for remote calls: frames in both directions between the members of a group."""
