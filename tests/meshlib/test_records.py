"""Frozen records as JSON and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from meshlib._records import JsonRecord, build, values_of


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
    "values",
    [
        {},
        {"name": "a", "more": 1},
        {"name": "a", "sizes": 1},
        ["name"],
        {"name": 1},
        {"name": "a", "sizes": [1, "b"]},
        {"name": "a", "sizes": [True]},
        {"name": "a", "sizes": {"start": 0}},
    ],
)
def test_what_is_no_such_record_is_a_type_error(values):
    with pytest.raises(TypeError):
        build(Leaf, values)


@dataclass(frozen=True, slots=True)
class Members(JsonRecord):
    ranks: Sequence[int]
    point: Point | None = None


def test_a_range_travels_as_its_three_numbers():
    assert Members.unpack(Members(range(3, 99, 2)).pack()) == Members(range(3, 99, 2))
    assert len(Members(range(10_000)).pack()) < 80


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ('{"ranks": [0], "point": [1]}', "point: expected a list of 2 values, got [1]"),
        ('{"ranks": [0], "point": [1, "2"]}', "point: expected int, got '2'"),
        ('{"ranks": "0"}', "ranks: expected a list, got '0'"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_what_is_no_record_says_which_field(data, why):
    with pytest.raises(ValueError, match="not a record: " + re.escape(why)):
        Members.unpack(data)
