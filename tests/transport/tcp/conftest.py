"""Common parts of the tests of the TCP transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from transport._store.hash_store import HashStore


@pytest.fixture
def store() -> Iterator[HashStore]:
    made = HashStore()
    yield made
    made.close()
