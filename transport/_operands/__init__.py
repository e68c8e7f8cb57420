"""Reduce operations, and the conversion, encoding and order of their operands."""
