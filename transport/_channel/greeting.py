"""The greeting on a new connection: each side finds out whether it can read the other's memory.

The connecting side sends its machine, process id, and the address of a nonce. The other side
answers with its own, and whether it could read the nonce. In a third frame the connecting side
answers whether it could read the other nonce.
"""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

import numpy as np

from transport._channel.connection import ChannelConnection
from transport._channel.frames import ChannelFrame, Control
from transport._errors import DistNetworkError
from transport._operands.flat import address
from transport._place import this_machine
from transport._shm.process_memory import ProcessMemory, is_possible
from transport._waiting.deadline import Deadline

# The flags of the three frames.
_FIRST, _READABLE, _NOT_READABLE = 0, 1, 2


class Greeting:
    """Greets the peers of one member. Thread-safe."""

    def __init__(self) -> None:
        # A peer that can read these bytes has found the right process.
        self._nonce = np.frombuffer(bytearray(secrets.token_bytes(32)), np.uint8)

    def begin(self, connection: ChannelConnection, deadline: Deadline) -> int:
        """Greet the peer of an outgoing connection, before it is polled.

        Returns the number of the last post that the peer has received. Raises TimeoutError past
        ``deadline``, OSError if the connection ends.
        """
        connection.send(Control.HELLO, 0, self._introduction(), flags=_FIRST)
        answer = connection.receive_one(deadline)
        if answer.kind != Control.HELLO:
            raise ConnectionError(f"expected a greeting, got a frame of kind {answer.kind}")
        connection.lends = answer.flags == _READABLE
        connection.memory = self._memory_of(answer)
        connection.send(Control.HELLO, 0, flags=self._flag(connection))
        return answer.number

    def on_hello(self, connection: ChannelConnection, frame: ChannelFrame, received: int) -> None:
        """Answer a greeting; ``received`` is the number of the peer's last received post."""
        if frame.flags != _FIRST:
            connection.lends = frame.flags == _READABLE
            return
        try:
            connection.memory = self._memory_of(frame)
        except (ValueError, KeyError, TypeError) as error:
            raise DistNetworkError(f"expected a greeting, got {bytes(frame.data)!r}") from error
        introduction, flag = self._introduction(), self._flag(connection)
        connection.send(Control.HELLO, received, introduction, flags=flag)

    def _flag(self, connection: ChannelConnection) -> int:
        return _READABLE if connection.memory is not None else _NOT_READABLE

    def _introduction(self) -> bytes:
        introduction = {
            "machine": this_machine(),
            "pid": os.getpid() if is_possible() else 0,
            "address": address(self._nonce),
            "nonce": self._nonce.tobytes().hex(),
        }
        return json.dumps(introduction).encode()

    def _memory_of(self, frame: ChannelFrame) -> ProcessMemory | None:
        """Return the memory of the peer's process, None if this process cannot read it."""
        introduction: dict[str, Any] = json.loads(bytes(frame.data))
        if (
            not is_possible()
            or not introduction["pid"]
            or introduction["machine"] != this_machine()
        ):
            return None
        memory, nonce = ProcessMemory(introduction["pid"]), bytes.fromhex(introduction["nonce"])
        found = np.empty(len(nonce), np.uint8)
        try:
            memory.read(introduction["address"], found)
        except OSError:
            return None
        return memory if found.tobytes() == nonce else None
