"""The hosts of a group's members, and the sites of the hosts."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from transport._place import Place


class Spread(enum.Enum):
    """The distribution of a group's members over hosts, which decides the number of levels."""

    TOGETHER = "all on one host"
    APART = "each on a host of its own"
    LEVELS = "several on some hosts"


@dataclass(frozen=True, slots=True)
class MembersByHost:
    """The members of a group by host (``Place.machine``).

    ``hosts[a]`` has the group ranks on host a, ascending. Hosts are ordered by their first ranks.
    ``memory[a]`` is true if host a has several members and all can share memory. ``sites[a]`` is
    the site of host a's first member.
    """

    hosts: tuple[tuple[int, ...], ...]
    memory: tuple[bool, ...]
    sites: tuple[str, ...]

    @classmethod
    def of(cls, members: Sequence[Place]) -> MembersByHost:
        """Return the placement of ``members``, in order of their group ranks."""
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
        """Return the placement by site: each site counts as a host without shared memory."""
        by_site: dict[str, list[int]] = {}
        for ranks, site in zip(self.hosts, self.sites, strict=True):
            by_site.setdefault(site, []).extend(ranks)
        found = sorted(tuple(sorted(ranks)) for ranks in by_site.values())
        return MembersByHost(tuple(found), (False,) * len(found), ("",) * len(found))

    def within(self, members: tuple[int, ...]) -> MembersByHost:
        """Return the placement of ``members``, all those of some hosts, by place in ``members``."""
        kept = [host for host, ranks in enumerate(self.hosts) if ranks[0] in members]
        hosts = tuple(tuple(map(members.index, self.hosts[host])) for host in kept)
        memory = tuple(self.memory[host] for host in kept)
        return MembersByHost(hosts, memory, tuple(self.sites[host] for host in kept))

    def find(self, rank: int) -> tuple[int, int]:
        """Return the number of a member's host, and the member's index there.

        Raises ValueError for a rank that is not a member.
        """
        for number, ranks in enumerate(self.hosts):
            if rank in ranks:
                return number, ranks.index(rank)
        raise ValueError(f"rank {rank} is on none of the hosts {self.hosts}")
