"""How long threads look for what they wait for, and how often they ask."""

from __future__ import annotations

import threading

import pytest

from transport.waiting import LookOut, Pauses


class Asked:
    """Becomes true at look number ``at``; counts the looks."""

    def __init__(self, at: float = float("inf")) -> None:
        self.at = at
        self.looks = 0

    def __call__(self) -> bool:
        self.looks += 1
        return self.looks >= self.at


@pytest.mark.parametrize("at", [1, 2, 300, 301])
def test_what_comes_while_it_polls_is_seen_at_once(at: int) -> None:
    asked = Asked(at)
    assert LookOut(300).until(asked)
    assert asked.looks == at


def test_after_a_short_yield_it_polls_only_a_few_times() -> None:
    look_out = LookOut(300)
    assert look_out.until(Asked(302))  # behind the first yield: somebody had waited for this core
    asked = Asked(6)
    assert look_out.until(asked)  # 1 look, 4 polls, 1 yield
    assert asked.looks == 6
    assert LookOut(0).until(Asked(2))  # a look and a yield


def test_after_looking_in_vain_ever_more_waits_sleep_at_once() -> None:
    look_out = LookOut(most_missed=3)
    looked = []
    for _ in range(10):
        asked = Asked()
        assert not look_out.until(asked)
        looked.append(asked.looks > 1)
    asleep = [False]
    assert looked == [True, *asleep, True, *3 * asleep, True, *3 * asleep]
    assert look_out.until(Asked(2))  # what comes in time ends that
    asked = Asked()
    assert not look_out.until(asked)
    assert asked.looks > 1


def test_one_that_never_misses_looks_each_time() -> None:
    look_out = LookOut(10)
    for _ in range(3):
        asked = Asked()
        assert not look_out.until(asked)
        assert asked.looks > 11


def test_only_the_main_thread_looks_where_others_would_starve_it() -> None:
    look_out, asked = LookOut(10, main_only=True), Asked(2)
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(look_out.until(asked)))
    thread.start()
    thread.join(30)
    assert (seen, asked.looks) == ([False], 1)
    assert look_out.until(asked)


def test_pauses_grow_up_to_the_longest_and_begin_again() -> None:
    pauses = Pauses(1.0, 5.0)
    assert [pauses.next() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert pauses.next(left=0.5) == 0.5
    pauses.restart()
    assert [pauses.next() for _ in range(2)] == [1.0, 2.0]
    assert [Pauses(1.0, 9.0, 1.5).next(), Pauses(3.0, 2.0).next(1.0)] == [1.0, 1.0]
