"""A measured or declared network between hosts, and the levels on which groups use it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from transport._hierarchical.hosts import MembersByHost, Spread

FORMAT = 1
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Path:
    """A path between two hosts: round trip in seconds, and bytes per second one way or 0."""

    round_trip: float
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """The ranks of each host, the name of its site ("" if unknown), and the paths between hosts.

    The keys of ``paths`` are pairs of host numbers, the lower one first.
    """

    hosts: tuple[tuple[int, ...], ...]
    sites: tuple[str, ...]
    paths: Mapping[Pair, Path]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.hosts))

    def encode(self) -> str:
        """Return the network as JSON."""
        hosts = [
            {"ranks": ranks, "site": site}
            for ranks, site in zip(self.hosts, self.sites, strict=True)
        ]
        paths = [
            {"hosts": pair, "round_trip": path.round_trip, "rate": path.rate}
            for pair, path in sorted(self.paths.items())
        ]
        return json.dumps({"format": FORMAT, "hosts": hosts, "paths": paths}, indent=1)

    @classmethod
    def load(cls, file: FilePath) -> HostNetwork:
        """Return the network in ``file``; raise ValueError for a file that is not a network."""
        try:
            return cls._of(json.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{file} is not a network file: {what}; expected a file from meshlib bench"
                " --between --write-network"
            ) from error

    @classmethod
    def _of(cls, document: Any) -> HostNetwork:
        if document["format"] != FORMAT:
            raise ValueError(f"format is {document['format']!r}, expected {FORMAT}")
        hosts = tuple(tuple(int(rank) for rank in host["ranks"]) for host in document["hosts"])
        ranks = sorted(rank for host in hosts for rank in host)
        if ranks != list(range(len(ranks))) or not all(hosts):
            raise ValueError(f"hosts have ranks {ranks}, expected each of 0, 1, … once")
        paths: dict[Pair, Path] = {}
        for entry in document["paths"]:
            one, other = sorted(int(host) for host in entry["hosts"])
            path = Path(float(entry["round_trip"]), float(entry.get("rate", 0.0)))
            if not 0 <= one < other < len(hosts) or not path.round_trip > 0:
                raise ValueError(f"path {entry!r}, expected two hosts and a round trip above 0 s")
            paths[one, other] = path
        sites = tuple(str(host.get("site", "")) for host in document["hosts"])
        return cls(hosts, sites, paths)

    def placement(self, ranks: Sequence[int]) -> MembersByHost:
        """Return the placement of a group of ``ranks``, with the sites of its hosts."""
        members = {
            host: tuple(ranks.index(rank) for rank in sorted(there, key=ranks.index))
            for host, all_there in enumerate(self.hosts)
            if (there := [rank for rank in all_there if rank in ranks])
        }
        order = sorted(members, key=lambda host: members[host][0])
        sites = tuple(self.sites[host] for host in order)
        return MembersByHost(tuple(members[host] for host in order), (True,) * len(order), sites)


def levels_in_words(placement: MembersByHost) -> str:
    """Return a description of the levels on which ``auto`` runs a group's collectives."""
    sites = placement.by_site()
    if sites.spread is Spread.APART and len(sites.hosts) > 1:
        return f"one level: all {len(sites.hosts)} ranks over TCP"
    if sites.spread is Spread.TOGETHER:
        return _on_hosts(placement)
    inside = {_on_hosts(placement.within(ranks)) for ranks in sites.hosts}
    return f"between {len(sites.hosts)} sites, and inside each {' or '.join(sorted(inside))}"


def _on_hosts(placement: MembersByHost) -> str:
    count = len(placement.hosts)
    if placement.spread is Spread.TOGETHER:
        alone = len(placement.hosts[0]) == 1
        return "one rank" if alone else "one level: shared memory on one host"
    if placement.spread is Spread.APART:
        return f"one level: all {count} ranks over TCP"
    return f"two levels: between {count} hosts, and inside each"


def levels_of_groups(
    network: HostNetwork, groups: Mapping[str, Sequence[Sequence[int]]]
) -> list[str]:
    """Return lines with the levels of the ``groups`` along each dim over ``network``.

    Raises ValueError for a rank that is on none of the network's hosts.
    """
    lines = ["levels, with backend auto"]
    width = max(map(len, groups))
    for name, along in groups.items():
        found: dict[str, int] = {}
        for ranks in along:
            if max(ranks) >= network.size:
                raise ValueError(f"rank {max(ranks)} is on no host: there are {network.size} ranks")
            words = levels_in_words(network.placement(list(ranks)))
            found[words] = found.get(words, 0) + 1
        for words, count in found.items():
            groups_of = "1 group" if count == 1 else f"{count} groups"
            lines.append(f"  {name:{width}}  {groups_of}: {words}")
    return lines
