"""What NumPy's functions do with DArrays; ``table`` has the list."""

from meshlib.sharding._rules.table import FUNCTIONS, apply_function, apply_ufunc

__all__ = ["FUNCTIONS", "apply_function", "apply_ufunc"]
