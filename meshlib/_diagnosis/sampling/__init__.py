"""Samples of a rank's calls for a monitor: a small summary each second, while one watches."""
