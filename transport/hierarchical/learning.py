"""Sites that nobody has named, found by round trips: hosts much nearer to each other than to the
others.

Sites decide the order in which numbers are added, so they are found only where nothing is close: at
some length all round trips must fall into two kinds, those between hosts of a site and those
between sites, of which the least is ``CLEAR`` times the longest of the first kind, and ``FAR`` or
more. All hosts of a site must be near to each other. Otherwise there is one site.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from transport import environment
from transport.call import Call
from transport.communicators.store_waits import PeerKeys
from transport.hierarchical.hosts import Placement
from transport.links.communicator import LinkCommunicator

_LOGGER = logging.getLogger("meshlib.transport")

FAR = 2e-3
"""Seconds: shorter round trips never separate hosts."""

CLEAR = 5.0
"""How many times longer round trips between sites must be than inside them."""

# What a busy host makes of a shorter one means nothing.
_SHORTEST = 1e-4

Pair = tuple[int, int]


def hosts_to_measure(to_store: Sequence[float]) -> list[int]:
    """Return the hosts far from the store and, if there are such, the first one near it;
    ``to_store`` has the round trips in seconds, by host.

    One far host is measured as well: what it said may be a busy machine's doing.
    """
    near = [host for host, seconds in enumerate(to_store) if seconds < FAR]
    if len(near) == len(to_store):
        return []
    return [host for host, seconds in enumerate(to_store) if seconds >= FAR or host == near[0]]


def find_sites(
    to_store: Sequence[float], between: Mapping[Pair, float]
) -> tuple[tuple[int, ...], float, float] | None:
    """Return the site of each host, the longest round trip inside one and the shortest between two,
    in seconds; None where there is only one site, or not all is known.

    ``between`` has the round trips between each two of ``hosts_to_measure``, the lower number
    first. Whatever lies between two hosts one of which is near to the store is as long as the
    other's way to it, or to the one that was measured there, if that is shorter: only noise makes
    the one longer than the other.
    """
    if not all(between.get(pair) for pair in combinations(hosts_to_measure(to_store), 2)):
        return None
    lengths = _lengths(to_store, between)
    rising = sorted(set(lengths.values()))
    clear = [
        (low, high)
        for low, high in zip([_SHORTEST, *rising], rising, strict=False)
        if high >= FAR and high >= CLEAR * low
    ]
    if not clear:
        return None
    # The longest gap below which hosts are near: sites inside of sites are one.
    inside, across = clear[-1]
    sites: list[int] = []
    for host in range(len(to_store)):
        near = [other for other in range(host) if lengths[other, host] < across]
        together = [other for other in range(host) if near and sites[other] == sites[near[0]]]
        if near != together:
            return None
        sites.append(sites[near[0]] if near else max(sites, default=-1) + 1)
    return (tuple(sites), inside, across) if max(sites) else None


def _lengths(to_store: Sequence[float], between: Mapping[Pair, float]) -> dict[Pair, float]:
    """Return the round trips between each two hosts."""
    ways = list(to_store)
    near = next((host for host, seconds in enumerate(to_store) if seconds < FAR), None)
    for low, high in between if near is not None else ():
        if near in (low, high):
            far = high if near == low else low
            ways[far] = min(ways[far], between[low, high])
    found: dict[Pair, float] = {}
    for pair in combinations(range(len(to_store)), 2):
        known = None if near in pair else between.get(pair)
        found[pair] = max(_SHORTEST, known or max(ways[pair[0]], ways[pair[1]]))
    return found


def with_learnt_sites(
    placement: Placement, keys: PeerKeys, whole: LinkCommunicator, call: Call
) -> Placement:
    """Return ``placement`` with the sites that were learnt; unchanged where a host's site has a
    name, or there is one site. Every member calls, with an equal ``placement``, and computes the
    same.

    From each host the way to the store is known. Only where that is far from some, first members
    connect to each other, those and one that is near it, to learn how far apart they are.
    """
    measured = hosts_to_measure(placement.to_store)
    if len(measured) < 2 or any(placement.sites):
        return placement
    between = _measure(placement, measured, keys, whole, call)
    found = find_sites(placement.to_store, between)
    if found is None:
        return placement
    sites, inside, across = found
    if whole.rank == 0:
        _LOGGER.info(
            "%s: %d sites learnt from round trips: hosts of ranks %s; %.1f ms inside, %.1f ms"
            " between them (%s names sites, %s=0 has none learnt)",
            whole.membership.group,
            max(sites) + 1,
            _members(placement, sites),
            1e3 * inside,
            1e3 * across,
            environment.SITE,
            environment.LEARN_SITES,
        )
    return replace(placement, sites=tuple(f"learnt {site}" for site in sites))


def _measure(
    placement: Placement,
    hosts: Sequence[int],
    keys: PeerKeys,
    whole: LinkCommunicator,
    call: Call,
) -> dict[Pair, float]:
    """Return the round trips between some ``hosts``."""
    rank, first = whole.rank, {placement.hosts[host][0]: host for host in hosts}
    if rank in first:
        others = [member for member in first if member != rank]
        seconds = whole.round_trips(others, call)
        trips = dict(zip((first[member] for member in others), seconds, strict=True))
        # In a group that is made again, what was said first: all must read the same.
        whole.membership.store.post(_key(rank), json.dumps(trips), once=True)
    said = keys.read_all(_key, list(first), call)
    rows = {first[member]: json.loads(data) for member, data in said.items()}
    found: dict[Pair, float] = {}
    for low, high in combinations(hosts, 2):
        both = rows[low].get(str(high)), rows[high].get(str(low))
        found[low, high] = min((seconds for seconds in both if seconds), default=0.0)
    return found


def _key(rank: int) -> str:
    return f"round-trips/{rank}"


def _members(placement: Placement, sites: Sequence[int]) -> str:
    ranks: dict[int, list[int]] = {}
    for site, members in zip(sites, placement.hosts, strict=True):
        ranks.setdefault(site, []).extend(members)
    return " | ".join(str(sorted(members)) for members in ranks.values())
