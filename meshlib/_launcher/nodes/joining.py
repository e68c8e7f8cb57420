"""Notes on standard error while a node waits for its place in a job."""

from __future__ import annotations

from meshlib._command_line import print_note
from meshlib._launcher.nodes.records import (
    AgentLeft,
    AgentRecord,
    JoinAccepted,
    JoinDeferred,
    JoinRefused,
    JoinRequest,
)
from meshlib._launcher.options.launch import NodeOptions
from transport._net.sockets import format_address

_FIRST_NOTE_SECONDS = 5.0
"""The delay of the first note; nodes that start together need no note."""
_NEXT_NOTE_SECONDS = 30.0


class JoinNotes:
    """Prints notes on standard error while this node waits for a place in the job."""

    def __init__(self, nodes: NodeOptions, agent: str) -> None:
        self._nodes = nodes
        self._agent = agent
        self._where = format_address(nodes.host, nodes.port)
        self._hosts: dict[str, str] = {}
        self._arrived: set[str] = set()
        self._began: float | None = None
        self._next = 0.0

    def begin(self, now: float) -> None:
        """Begin the wait for a place, which ends when ``on_record`` gets the answer."""
        self._began = now
        self._next = now + _FIRST_NOTE_SECONDS

    def on_record(self, record: AgentRecord, *, leads: bool) -> None:
        """Handle a record of the log; ``leads``: this node prints the leader's decisions."""
        match record:
            case JoinRequest(agent=agent, host=host):
                self._hosts[agent] = host
                self._arrived.add(agent)
            case JoinRefused(agent=agent, reason=reason):
                self._arrived.discard(agent)
                if leads:
                    print_note("meshrun", f"refused node {self._hosts.get(agent, agent)}: {reason}")
            case JoinDeferred(agent=self._agent, reason=reason):
                print_note("meshrun", reason)
            case AgentLeft(agent=agent):
                self._arrived.discard(agent)
            case JoinAccepted(agent=agent):
                self._arrived.discard(agent)
                if agent == self._agent:  # other nodes may get a place before this one
                    self._began = None
            case _:
                pass

    def tick(self, now: float, unreached: Exception | None = None) -> None:
        """Print the state of the wait if a note is due. ``unreached``: the store's error."""
        if self._began is None or now < self._next:
            return
        self._next = now + _NEXT_NOTE_SECONDS
        left = f"{max(0.0, self._began + self._nodes.join_timeout - now):.0f} s left"
        if unreached is not None:
            server = "etcd" if self._nodes.etcd else "the leading node"
            print_note("meshrun", f"waiting for {server}, at {self._where}, {left}: {unreached}")
            return
        least, most = self._nodes.least, self._nodes.most
        wanted = str(most) if least == most else f"{least} to {most}"
        # This node counts, even if its own request is not in the log yet.
        print_note(
            "meshrun",
            f"{max(1, len(self._arrived))} of {wanted} nodes, waiting at {self._where}, {left}",
        )
