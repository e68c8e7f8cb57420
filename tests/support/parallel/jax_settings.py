"""JAX's settings in tests, as double precision, for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import jax


@contextmanager
def jax_settings(**settings: bool) -> Generator[None]:
    """Change JAX's ``settings`` for a block."""
    before = {name: jax.config.read(name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
