"""Frozen records as JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from meshlib.records import build, values_of


class Point(NamedTuple):
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Leaf:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    point: Point
    first: Leaf
    others: Sequence[Leaf]
    maybe: Leaf | None
    chains: Mapping[str, tuple[int, int] | None]
    plain: float | None = None


def there_and_back(record):
    return build(type(record), json.loads(json.dumps(record, default=values_of)))


@pytest.mark.parametrize("maybe", [None, Leaf("c", (3,))])
def test_what_lies_inside_is_what_it_was(maybe):
    chains = {"a": (1, 2), "b": None}
    record = Tree(Point(1, 2), Leaf("a", (1, 2)), [Leaf("b"), Leaf("d")], maybe, chains)
    again = there_and_back(record)
    assert again == record
    assert isinstance(again.point, Point)
    assert isinstance(again.chains["a"], tuple)


def test_fields_with_a_default_may_be_missing():
    assert build(Leaf, {"name": "a"}) == Leaf("a")


@pytest.mark.parametrize(
    "values", [{}, {"name": "a", "more": 1}, {"name": "a", "sizes": 1}, ["name"]]
)
def test_what_is_no_such_record_is_a_type_error(values):
    with pytest.raises(TypeError):
        build(Leaf, values)
