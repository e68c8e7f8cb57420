"""``Channels``: the communicators of one group, by the device whose arrays they carry."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from meshlib.calls.context import RankContext
from meshlib.calls.state import Fate
from transport.communicators.base import Communicator, Turns
from transport.condition import has


class Channels:
    """Made at the first call; a member joins its group once, from whichever thread."""

    def __init__(self, context: RankContext, fate: Fate) -> None:
        self._context = context
        self._fate = fate
        self._making = threading.RLock()
        self.turns: Turns | None = None
        """The turns of the collectives, for those communicators that ask."""
        self.made: dict[str, Communicator] = {}
        """By device; it changes under the lock of the group's ``Fate``."""

    def get(self, device: str) -> Communicator:
        """Return the communicator for arrays on ``device``, making it if there is none yet."""
        communicator = self.made.get(device)
        if communicator is not None:
            return communicator
        fate = self._fate
        # Lanes run side by side.
        with self._making:
            communicator = self.made.get(device)
            if communicator is None:
                communicator = self._context.make_communicator(fate.members, device)
                if self.turns is not None:
                    communicator.take_turns(self.turns)
                with fate.lock:
                    self.made[device] = communicator
                    failure, departed = fate.error, fate.departed
                self.lose([communicator], departed)
                if failure is not None:
                    communicator.abort(str(failure))
            return communicator

    def is_making(self) -> bool:
        """Whether the calling thread is in the middle of making one."""
        return has(self._making)

    def open(self) -> list[Communicator]:
        """Return those that can still carry something. With the lock of the group's ``Fate``."""
        return [] if self._fate.destroyed else list(self.made.values())

    def lose(self, communicators: list[Communicator], departed: Iterable[int]) -> None:
        """Tell ``communicators`` of the members among the ranks ``departed``, which have left."""
        if not communicators:
            return
        members = self._fate.members
        places = members.places_of(departed)
        for communicator in communicators:
            known = communicator.lost
            for place in places:
                if place not in known:
                    communicator.lose(place, f"rank {members.ranks[place]} has left the job")

    def is_receiving(self) -> bool:
        """Whether a message is on its way."""
        return any(communicator.receiving for communicator in self.made.values())

    def release(self) -> None:
        """Let go of all; with none left, later ones are made anew."""
        with self._fate.lock:
            communicators, self.made = self.made, {}
        for communicator in communicators.values():
            communicator.close()

    def close(self, *, idle: bool) -> None:
        """Let go of all for good; unless ``idle``, somebody is still in a call on them."""
        fate = self._fate
        for communicator in list(self.made.values()):
            for text in communicator.left_over() if fate.error is None else ():
                self._context.log.warning("%s ends with messages left: %s", fate.members, text)
            if not idle:
                communicator.abort("the group was destroyed")
            communicator.close()

    def end_in_a_fork(self) -> None:
        """Be usable in a fork of this rank's process."""
        self._making = threading.RLock()  # threads that are not here may have held it
