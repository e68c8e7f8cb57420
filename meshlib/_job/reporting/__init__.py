"""Reporting a rank's calls: progress for monitors, and the flight record."""
