"""The members of a group are the same by arithmetic and from a table."""

import pytest

from meshlib._calls.members import Members

GROUPS = [
    (0, 1, 2, 3),
    (0,),
    (5,),
    (3, 5, 7),
    (7, 5, 3),
    (1, 0),
    (0, 1, 3),
    (4, 0, 2),
    (2, 3, 4, 5),
]


@pytest.mark.parametrize("ranks", GROUPS, ids=str)
def test_places(ranks):
    members = Members("group", ranks, ranks[-1], {"cpu": "inproc"}, 1.0, "")
    for rank in range(-1, 9):
        place = ranks.index(rank) if rank in ranks else None
        assert members.place_of(rank) == place
        if place is None:
            with pytest.raises(ValueError, match=f"global rank {rank} is not in"):
                members.group_rank(rank)
        else:
            assert members.group_rank(rank) == place
    assert members.rank() == len(ranks) - 1
    assert Members("group", ranks, 8, {"cpu": "inproc"}, 1.0, "").rank() == -1
    for wanted in ([], [1], [0, 1, 8], range(9), frozenset(ranks), [-1]):
        assert members.places_of(wanted) == {ranks.index(rank) for rank in wanted if rank in ranks}
