"""The hosts of a group's members, and the sites of the hosts."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from transport._place import Place


class Spread(enum.Enum):
    """The distribution of a group's members over hosts. It decides whether there are levels."""

    TOGETHER = "all on one host"
    APART = "each on a host of its own"
    LEVELS = "several on some hosts"


@dataclass(frozen=True, slots=True)
class MembersByHost:
    """The members of a group by host (``Place.machine``).

    ``hosts[a]`` are the group ranks on host a, rising. The hosts are ordered by their first ranks.
    ``memory[a]`` says whether host a has several members, all of which can share memory.
    Host a is at site ``sites[a]``, that of its first member.
    """

    hosts: tuple[tuple[int, ...], ...]
    memory: tuple[bool, ...]
    sites: tuple[str, ...]

    @classmethod
    def of(cls, members: Sequence[Place]) -> MembersByHost:
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
        """The distribution of the members over the hosts."""
        if len(self.hosts) == 1:
            return Spread.TOGETHER
        return Spread.APART if all(len(r) == 1 for r in self.hosts) else Spread.LEVELS

    def by_site(self) -> MembersByHost:
        """Return the same as if each site were a host, whose members cannot share memory."""
        by_site: dict[str, list[int]] = {}
        for ranks, site in zip(self.hosts, self.sites, strict=True):
            by_site.setdefault(site, []).extend(ranks)
        found = sorted(tuple(sorted(ranks)) for ranks in by_site.values())
        return MembersByHost(tuple(found), (False,) * len(found), ("",) * len(found))

    def within(self, members: tuple[int, ...]) -> MembersByHost:
        """Return how some ``members``, all those of a few hosts, are placed, by their numbers."""
        kept = [host for host, ranks in enumerate(self.hosts) if ranks[0] in members]
        hosts = tuple(tuple(map(members.index, self.hosts[host])) for host in kept)
        memory = tuple(self.memory[host] for host in kept)
        return MembersByHost(hosts, memory, tuple(self.sites[host] for host in kept))

    def find(self, rank: int) -> tuple[int, int]:
        """Return on which host a member is, and which one it is there."""
        for number, ranks in enumerate(self.hosts):
            if rank in ranks:
                return number, ranks.index(rank)
        raise ValueError(f"rank {rank} is on none of the hosts {self.hosts}")
