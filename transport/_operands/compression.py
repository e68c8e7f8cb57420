"""``Compression``, the wire format of a group's reductions of floating-point numbers.

This module does not import NumPy, because some processes check configs without it.
``transport/_operands/encoding.py`` defines the formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

FORMATS = ("bf16", "fp8", "int8")


@dataclass(frozen=True, slots=True)
class Compression:
    """The format of large reductions along a mesh dim: ``bf16``, or blocks of ``fp8`` or ``int8``.

    Args:
        format: ``"bf16"`` (half of float32's bytes), ``"fp8"`` or ``"int8"`` (a quarter, and a
            scale for each block of 256 numbers).
        error_feedback: Whether ``DistributedDataParallel`` and ``DiLoCo`` add the rounding error of
            a reduction to the next one.

    Raises:
        ValueError: For another format.
        TypeError: For an ``error_feedback`` that is not a bool.
    """

    format: str
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(
                f"compress is {self.format!r}; expected one of {', '.join(map(repr, FORMATS))}"
            )
        if not isinstance(self.error_feedback, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"error_feedback is {self.error_feedback!r}; expected True or False")

    @classmethod
    def parse(cls, value: object) -> Compression | None:
        """Return the ``Compression`` for ``value``: a format, a mapping with its fields, or a
        ``Compression``.

        Returns None for None. Raises ValueError for anything else.
        """
        if value is None or isinstance(value, Compression):
            return value
        try:
            return cls(value) if isinstance(value, str) else cls(**cast("Mapping[str, Any]", value))
        except TypeError as error:
            raise ValueError(
                f"compress is {value!r}; expected one of {', '.join(map(repr, FORMATS))}, or a"
                f" table with format and optionally error_feedback ({error})"
            ) from None

    def to_value(self) -> str | dict[str, Any]:
        """Return a config value from which ``parse`` returns an equal object."""
        if not self.error_feedback:
            return self.format
        return {"format": self.format, "error_feedback": True}

    def __str__(self) -> str:
        return f"{self.format} with error feedback" if self.error_feedback else self.format
