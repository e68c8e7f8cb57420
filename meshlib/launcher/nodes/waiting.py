"""What the user is told while a node waits for a place in the job, and for whom it waits."""

from __future__ import annotations

from functools import partial

from meshlib.command_line import say
from meshlib.launcher.nodes.records import Gone, Held, Hello, Record, Refused, Round
from meshlib.launcher.options.launch import NodeOptions
from transport.net.sockets import format_address

_say = partial(say, "meshrun")
FIRST_SECONDS = 5.0
"""After how long the first line comes: nodes that start together need none."""
NEXT_SECONDS = 30.0


class Waiting:
    """Follows the agents' log, and prints a line on standard error where a person would wonder."""

    def __init__(self, nodes: NodeOptions, agent: str) -> None:
        self._nodes = nodes
        self._agent = agent
        self._where = format_address(nodes.host, nodes.port)
        self._hosts: dict[str, str] = {}
        self._came: set[str] = set()
        self._began: float | None = None
        self._next = 0.0

    def begin(self, now: float) -> None:
        """This node asks for a place, and waits until ``hear`` is told of a ``Round``."""
        self._began = now
        self._next = now + FIRST_SECONDS

    def hear(self, record: Record, *, leads: bool) -> None:
        """Take note of a record of the log; ``leads``: it is this node's to explain decisions."""
        match record:
            case Hello(agent=agent, host=host):
                self._hosts[agent] = host
                self._came.add(agent)
            case Refused(agent=agent, reason=reason):
                self._came.discard(agent)
                if leads:
                    _say(f"refused node {self._hosts.get(agent, agent)}: {reason}")
            case Held(agent=self._agent, reason=reason):
                _say(reason)
            case Gone(agent=agent):
                self._came.discard(agent)
            case Round():
                self._came.clear()
                self._began = None
            case _:
                pass

    def tick(self, now: float, unreached: Exception | None = None) -> None:
        """Print how things stand if it is time. ``unreached``: why the store was not."""
        if self._began is None or now < self._next:
            return
        self._next = now + NEXT_SECONDS
        left = f"{max(0.0, self._began + self._nodes.join_timeout - now):.0f} s left"
        if unreached is not None:
            _say(f"waiting for the node that leads, at {self._where}, {left}: {unreached}")
            return
        least, most = self._nodes.least, self._nodes.most
        wanted = str(most) if least == most else f"{least} to {most}"
        # A moment ago it may have been one less: this node itself is here.
        _say(f"{max(1, len(self._came))} of {wanted} nodes, waiting at {self._where}, {left}")
