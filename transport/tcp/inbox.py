"""The mailbox of a rank whose messages all come by TCP."""

from __future__ import annotations

from transport.call import Call
from transport.communicators.runtime import Membership
from transport.condition import hold
from transport.links.incoming import Receive
from transport.links.mailbox import Mailbox
from transport.tcp.conversation import Conversation


class Inbox(Mailbox):
    """A mailbox whose receivers read their sender's connection themselves while they wait."""

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        # By peer, the one of our connections that it uses.
        self._speaking: dict[int, Conversation] = {}

    def hear(self, conversation: Conversation) -> None:
        """Be told on which connection its peer sends: it uses no other."""
        self._speaking[conversation.peer] = conversation

    def _sleep(self, call: Call, receive: Receive) -> None:
        conversation = None if receive.src is None else self._speaking.get(receive.src)
        if conversation is None:
            # It may come from anyone, and nobody else may be reading.
            for other in self._speaking.values():
                other.resume()
            super()._sleep(call, receive)
            return
        try:
            if not conversation.take_turn():
                super()._sleep(call, receive)
                return
            self._lock.release()
            settled = False
            try:
                conversation.carry(receive.is_settled, call.deadline)
            finally:
                hold(self._lock)
                settled = receive.is_settled()
                if self._receives or not settled:
                    conversation.resume()
        except BaseException:
            conversation.end_turn()
            hold(self._lock)
            raise
        self._check_aborted()
        if not settled:
            # It takes the thread to end the conversation.
            super()._sleep(call, receive)
