"""The order of addition: one tree, whoever adds up, in whatever order contributions come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport._operands.flat import Scratch
from transport._operands.order import (
    StreamingReduction,
    add_all,
    are_one_tree,
    arrivals,
    merges_of,
    relatives,
    subtrees,
    tree_reduce,
)
from transport._operands.reduce_op import ReduceOp

SIZES = [*range(1, 20), 31, 33, 40]


def tree(first: int, width: int, size: int) -> str:
    """The tree over ``width`` ranks from ``first`` on, of ``size``, in words."""
    if width == 1:
        return str(first)
    lower = tree(first, width // 2, size)
    middle = first + width // 2
    return lower if middle >= size else f"({lower}+{tree(middle, width // 2, size)})"


def whole(size: int) -> str:
    return tree(0, 1 << (size - 1).bit_length(), size)


def merged(values: list[str], merges: Any) -> str:
    """The result of reducing ``values``; the first one is there from the beginning."""
    waiting = values[:1]
    for value, merge in zip(values[1:], merges, strict=True):
        waiting.append(value)
        for earlier_is_lower in merge:
            last, earlier = waiting.pop(), waiting.pop()
            lower, upper = (earlier, last) if earlier_is_lower else (last, earlier)
            waiting.append(f"({lower}+{upper})")
    (found,) = waiting
    return found


def test_the_examples_of_the_docs() -> None:
    assert whole(3) == "((0+1)+2)"
    assert whole(6) == "(((0+1)+(2+3))+(4+5))"
    assert whole(7) == "(((0+1)+(2+3))+((4+5)+6))"


@pytest.mark.parametrize("size", SIZES)
def test_contributions_that_arrive_nearest_first_are_added_by_the_tree(size: int) -> None:
    for rank in range(size):
        peers, merges = arrivals(rank, size)
        assert sorted([rank, *peers]) == list(range(size))
        assert merged([str(rank), *map(str, peers)], merges) == whole(size)


@pytest.mark.parametrize("size", SIZES)
def test_values_that_flow_to_any_root_are_added_by_the_tree(size: int) -> None:
    for root in range(size):

        def value(rank: int, root: int = root) -> str:
            found = str(rank)
            for child, child_is_lower in relatives(rank, size, root)[1]:
                assert relatives(child, size, root)[0] == rank
                other = value(child)
                found = f"({other}+{found})" if child_is_lower else f"({found}+{other})"
            return found

        assert relatives(root, size, root)[0] is None
        assert value(root) == whole(size)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24))
def test_the_sums_of_hosts_blocks_are_added_by_the_tree(hosts: list[int]) -> None:
    size = len(hosts)
    groups = [[rank for rank in range(size) if hosts[rank] == host] for host in range(4)]
    blocks = sorted(block for group in groups for block in subtrees(group, size))
    values = [tree(block.first, 1 << block.level, size) for block in blocks]
    assert merged(values, merges_of(blocks)) == whole(size)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[0, 1], [2, 3]], True),
        ([[0, 1], [2]], True),
        ([[0, 1, 2, 3], [4, 5, 6]], True),
        ([[0], [1], [2]], True),
        ([[0, 1, 2], [3, 4, 5]], False),
        ([[0, 2], [1, 3]], False),
        ([[0, 1], [2, 3, 4]], False),
        ([[0, 1], [2], [3]], False),
    ],
)
def test_hosts_that_are_blocks_of_one_size_are_one_tree(
    groups: list[list[int]], expected: bool
) -> None:
    assert are_one_tree(groups) == expected


@given(
    size=st.integers(1, 9),
    count=st.integers(0, 40),
    piece=st.integers(1, 200),
    dtype=st.sampled_from([np.float16, np.float32]),
    data=st.data(),
)
def test_a_fold_adds_the_same_whatever_its_pieces(
    size: int, count: int, piece: int, dtype: Any, data: st.DataObject
) -> None:
    rng = np.random.default_rng(count)
    parts = [rng.standard_normal(count).astype(dtype) for _ in range(size)]
    kept = [part.copy() for part in parts]
    expected = np.empty(count, np.float32)
    tree_reduce(Scratch(), ReduceOp.SUM, parts, expected)
    rank = data.draw(st.integers(0, size - 1))
    total = np.empty(count, np.float32)
    own = parts[rank].astype(np.float32)
    peers, merges = arrivals(rank, size)
    adding = StreamingReduction(Scratch(), ReduceOp.SUM, merges, own, total, piece)
    for peer in peers:
        into, on_piece = adding.expect(np.dtype(dtype))
        for stop in sorted(data.draw(st.lists(st.integers(0, count), max_size=3))):
            into[:stop] = parts[peer][:stop]
            if on_piece is not None:
                on_piece(stop * into.itemsize)
        into[:] = parts[peer]
        adding.add()
    assert size == 1 or total.tobytes() == expected.tobytes()
    assert all((part == same).all() for part, same in zip(parts, kept, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_values_that_all_are_there_are_added_by_the_tree(size: int) -> None:
    class InWords:
        def combine(self, lower: list[str], upper: list[str], out: list[str]) -> None:
            out[0] = f"({lower[0]}+{upper[0]})"

    values: Any = [[str(rank)] for rank in range(size)]
    add_all(InWords(), values)  # pyright: ignore[reportArgumentType]
    assert values[0] == [whole(size)]
