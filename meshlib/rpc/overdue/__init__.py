"""Calls that take too long: past their deadlines, or waiting for each other in a circle."""
