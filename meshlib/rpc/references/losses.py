"""References in requests that were lost with their connection, while both workers live, or that
could not be unpickled.

Their owner was told that they were given. Whether they arrived, only the worker knows to which they
went: so that one, told by the giver which requests have failed, releases those that it never got,
as if it had dropped them at once. If the giver dies before, the owner asks what is left of what it
gave; if the other one does, nothing is.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

Passed = Sequence[tuple[int, tuple[int, int]]]
"""The references in a request: each one's owner and object."""
_REMEMBERED = 4096


class Losses:
    """What of this worker's callers was lost. Any thread.

    ``is_settled(caller, number)`` says whether a request has been unpickled, or never will be.
    """

    def __init__(self, is_settled: Callable[[int, int], bool]) -> None:
        self._is_settled = is_settled
        self._lock = threading.Lock()
        self._arrived: dict[int, OrderedDict[int, Passed]] = {}
        self._forgotten: dict[int, int] = {}
        self._told: list[tuple[int, int, Passed]] = []

    def arrived(self, caller: int, number: int, taken: Passed) -> None:
        """Note which references came with a request."""
        with self._lock:
            arrived = self._arrived.setdefault(caller, OrderedDict())
            arrived[number] = taken
            if len(arrived) > _REMEMBERED:
                first, _ = arrived.popitem(last=False)
                self._forgotten[caller] = max(first, self._forgotten.get(caller, 0))

    def told(self, caller: int, lost: Sequence[tuple[int, Passed]]) -> None:
        """Note that requests of a worker, by number, have failed."""
        with self._lock:
            self._told += [(caller, number, passed) for number, passed in lost]

    def settle(self) -> list[tuple[int, Passed]]:
        """Return what never arrived and never will, by who gave it; each once."""
        with self._lock:
            found: list[tuple[int, Passed]] = []
            left: list[tuple[int, int, Passed]] = []
            for caller, number, passed in self._told:
                if not self._is_settled(caller, number):
                    left.append((caller, number, passed))
                elif missing := self._missing(caller, number, passed):
                    found.append((caller, missing))
            self._told = left
        return found

    def __bool__(self) -> bool:
        return bool(self._told)

    def _missing(self, caller: int, number: int, passed: Passed) -> Passed:
        # What is not known any more counts as arrived: rather kept too long than freed too early.
        if number <= self._forgotten.get(caller, 0):
            return []
        left = Counter(passed)
        left.subtract(self._arrived.get(caller, {}).get(number, ()))
        return [*left.elements()]
