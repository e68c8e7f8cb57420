"""Which members of a group share a host, and which hosts a site, as each says in their store."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from transport._call import Call
from transport._communicators.runtime import Membership
from transport._communicators.store_waits import PeerKeys
from transport._errors import DistNetworkError
from transport._place import Place

_PLACEMENT = "placement"


class Spread(enum.Enum):
    """How a group's members lie on hosts, which decides whether it has levels."""

    TOGETHER = "all on one host"
    APART = "each on a host of its own"
    LEVELS = "several on some hosts"


@dataclass(frozen=True, slots=True)
class Placement:
    """The members of a group by host (``Place.machine``): ``hosts[a]`` are group ranks, rising, and
    the hosts are in the order of their first ones. ``memory[a]`` says whether there are several
    members on host a, who can all share it, ``sites[a]`` at which site host a is: that of its first
    member.
    """

    hosts: tuple[tuple[int, ...], ...]
    memory: tuple[bool, ...]
    sites: tuple[str, ...]

    @classmethod
    def of(cls, members: Sequence[Place]) -> Placement:
        """Return how ``members``, by group rank, are placed."""
        by_machine: dict[str, list[int]] = {}
        for rank, place in enumerate(members):
            by_machine.setdefault(place.machine, []).append(rank)
        groups = tuple(tuple(ranks) for ranks in by_machine.values())
        shares = [not place.obstacle for place in members]
        memory = tuple(len(ranks) > 1 and all(shares[rank] for rank in ranks) for ranks in groups)
        sites = tuple(members[ranks[0]].site for ranks in groups)
        return cls(groups, memory, sites)

    @property
    def spread(self) -> Spread:
        """How the members lie on the hosts."""
        if len(self.hosts) == 1:
            return Spread.TOGETHER
        return Spread.APART if all(len(r) == 1 for r in self.hosts) else Spread.LEVELS

    def by_site(self) -> Placement:
        """Return the same as if each site were a host, whose members cannot share memory."""
        by_site: dict[str, list[int]] = {}
        for ranks, site in zip(self.hosts, self.sites, strict=True):
            by_site.setdefault(site, []).extend(ranks)
        found = sorted(tuple(sorted(ranks)) for ranks in by_site.values())
        return Placement(tuple(found), (False,) * len(found), ("",) * len(found))

    def within(self, members: tuple[int, ...]) -> Placement:
        """Return how some ``members``, all those of a few hosts, are placed, by their numbers."""
        kept = [host for host, ranks in enumerate(self.hosts) if ranks[0] in members]
        hosts = tuple(tuple(map(members.index, self.hosts[host])) for host in kept)
        memory = tuple(self.memory[host] for host in kept)
        return Placement(hosts, memory, tuple(self.sites[host] for host in kept))

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
            memory, sites = tuple(map(bool, fields["memory"])), tuple(map(str, fields["sites"]))
            placement = cls(hosts, memory, sites)
        except (ValueError, TypeError, KeyError) as error:
            raise DistNetworkError(
                f"expected the hosts of a group in the store, got {data[:80]!r}"
            ) from error
        members = sorted(rank for ranks in hosts for rank in ranks)
        counts = {len(hosts), len(placement.memory), len(placement.sites)}
        if members != list(range(size)) or len(counts) > 1:
            raise DistNetworkError(f"expected the hosts of {size} members, got {hosts}")
        return placement


def publish_place(membership: Membership, place: Place) -> None:
    """Say where this rank is. The last member to do so puts the whole together, so that each of the
    others reads one value, not as many as there are members.
    """
    store, size = membership.store, membership.size
    store.post(_host_key(membership.rank), place.encode())
    # A group that is made again after all have closed it counts on.
    if store.add("hosts-known", 1) % size == 0:
        found = store.multi_get([_host_key(rank) for rank in range(size)])
        store.post(_PLACEMENT, Placement.of([Place.decode(data) for data in found]).encode())


def await_placement(membership: Membership, keys: PeerKeys, call: Call) -> Placement:
    """Return where all members are, waiting until they have said so; raises as ``keys`` does."""
    data = keys.read_from_last(_PLACEMENT, _host_key, call)
    return Placement.decode(data, membership.size)


def _host_key(rank: int) -> str:
    return f"host/{rank}"
