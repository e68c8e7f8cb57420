"""Which members of a group share a host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from transport.errors import DistNetworkError
from transport.shm.board.futex import unsupported_reason
from transport.tcp.address import this_machine


@dataclass(frozen=True, slots=True)
class Host:
    """Where one member runs.

    ``machine`` is equal for members on one host. Memory is handed over through sockets that live
    in a network namespace, so that two namespaces of one machine are two hosts here. ``memory``
    says whether the member can share any at all.
    """

    machine: str
    memory: bool

    def encode(self) -> bytes:
        """Return the host as the bytes that are published."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Host:
        """Return the host in ``data``; raise DistNetworkError when there is none."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise DistNetworkError(
                f"expected the host of a rank in the store, got {data[:80]!r}"
            ) from error


def this_host() -> Host:
    """Return the host of this process, by boot id and network namespace, never by its name."""
    return Host(this_machine(), unsupported_reason() is None)


@dataclass(frozen=True, slots=True)
class Placement:
    """The members of a group by host: ``hosts[a]`` are group ranks, rising, and the hosts are in
    the order of their first ones. ``memory[a]`` says whether all members on host a can share it.
    """

    hosts: tuple[tuple[int, ...], ...]
    memory: tuple[bool, ...]

    @classmethod
    def of(cls, members: Sequence[Host]) -> Placement:
        """Return how ``members``, by group rank, are placed."""
        by_machine: dict[str, list[int]] = {}
        for rank, host in enumerate(members):
            by_machine.setdefault(host.machine, []).append(rank)
        groups = tuple(tuple(ranks) for ranks in by_machine.values())
        return cls(groups, tuple(all(members[rank].memory for rank in ranks) for ranks in groups))

    def find(self, rank: int) -> tuple[int, int]:
        """Return on which host a member is, and which one it is there."""
        for number, ranks in enumerate(self.hosts):
            if rank in ranks:
                return number, ranks.index(rank)
        raise ValueError(f"rank {rank} is on none of the hosts {self.hosts}")

    def encode(self) -> bytes:
        """Return the placement as the bytes that are published."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes, size: int) -> Placement:
        """Return the placement of ``size`` members in ``data``; raise DistNetworkError for none."""
        try:
            fields = json.loads(data)
            hosts = tuple(tuple(map(int, ranks)) for ranks in fields["hosts"])
            placement = cls(hosts, tuple(map(bool, fields["memory"])))
        except (ValueError, TypeError, KeyError) as error:
            raise DistNetworkError(
                f"expected the hosts of a group in the store, got {data[:80]!r}"
            ) from error
        members = sorted(rank for ranks in hosts for rank in ranks)
        if members != list(range(size)) or len(placement.memory) != len(hosts):
            raise DistNetworkError(f"expected the hosts of {size} members, got {hosts}")
        return placement
