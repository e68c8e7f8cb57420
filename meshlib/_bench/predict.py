"""The cost model compared with measurements, and its predictions for many hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshlib._bench.run import CaseResult
from meshlib._bench.sizes import format_size
from transport._calls.header import Kind
from transport._choosing.cost import Cost, work_of
from transport._choosing.tuning import Tuning
from transport._hierarchical.cost import HostsCost, Shape

KINDS = {
    "all_reduce": Kind.ALL_REDUCE,
    "broadcast": Kind.BROADCAST,
    "all_gather": Kind.ALL_GATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER,
    "all_to_all": Kind.ALL_TO_ALL,
    "barrier": Kind.BARRIER,
}
"""The benchmark's cases that the model supports."""


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts of a ``shape``, connected by network cards.

    A card needs ``latency`` seconds per frame, and moves ``bandwidth`` bytes per second in each
    direction.
    """

    shape: Shape
    latency: float
    bandwidth: float


def cost_of(tuning: Tuning, transport: str) -> Cost:
    """Return the costs of ``transport``; raise ValueError if the tuning lacks them."""
    entry = tuning.transports.get(transport)
    if entry is None or entry.cost is None:
        raise ValueError(
            f"the tuning has no cost of {transport!r}: {tuning.source}; expected a file of"
            " meshlib tune for this transport"
        )
    return entry.cost


def in_words(cost: Cost) -> str:
    """Return ``cost`` as text: the costs of frames and bytes, and the number of parallel ranks."""
    return (
        f"{1e6 * cost.alpha:.1f} µs a frame, {1e-9 / cost.beta:.2f} GB/s sent,"
        f" {1e-9 / cost.gamma:.2f} GB/s reduced, {cost.parallelism:g} at a time"
    )


def comparison(results: Sequence[CaseResult], tuning: Tuning, transport: str) -> str:
    """Return a table of the model's times and the times measured over ``transport``."""
    cost = cost_of(tuning, transport)
    lines = [
        f"Model of {transport}: {in_words(cost)}",
        f"({tuning.source})",
        "",
        f"{'collective':15}{'ranks':>6}{'size':>10}{'algorithm':>15}{'model µs':>12}"
        f"{'measured µs':>13}{'ratio':>8}",
    ]
    for result in results:
        kind = KINDS.get(result.case)
        if kind is None:
            continue
        table = tuning.thresholds(transport, result.ranks)
        work = work_of(kind, result.nbytes, result.ranks, table)
        model = cost.seconds(work)
        lines.append(
            f"{result.case:15}{result.ranks:>6}{format_size(result.nbytes):>10}"
            f"{work.algorithm.value:>15}{1e6 * model:>12,.1f}{1e6 * result.median:>13,.1f}"
            f"{model / result.median:>8.2f}"
        )
    return "\n".join(lines) + "\n"


def extrapolation(
    cases: Sequence[str], sizes: Sequence[int], tuning: Tuning, network: Network
) -> str:
    """Return a table of the model's times over ``network``, on one level and on two.

    Shared memory inside hosts has the tuning's costs. Its rate of reducing bytes also applies
    between hosts.
    """
    inside = cost_of(tuning, "shm")
    shape = network.shape
    across = Cost(network.latency, 1 / network.bandwidth, inside.gamma, shape.hosts)
    hosts = HostsCost(inside, across)
    of_ranks, of_hosts = (tuning.thresholds("tcp", count) for count in (shape.ranks, shape.hosts))
    lines = [
        f"Model of {shape.hosts:,} hosts × {shape.ranks_per_host} ranks:"
        f" {1e6 * network.latency:g} µs a frame, {1e-9 * network.bandwidth:g} GB/s a host",
        "",
        f"{'collective':15}{'size':>10}{'one level µs':>18}{'two levels µs':>18}{'ratio':>8}",
    ]
    for case in cases:
        kind = KINDS.get(case)
        if kind is None:
            continue
        for nbytes in sizes if kind is not Kind.BARRIER else [0]:
            flat = hosts.on_one_level(kind, nbytes, shape, of_ranks)
            levels = hosts.on_two_levels(kind, nbytes, shape, of_hosts)
            lines.append(
                f"{case:15}{format_size(nbytes):>10}{1e6 * flat:>18,.0f}{1e6 * levels:>18,.0f}"
                f"{levels / flat:>8.2f}"
            )
    return "\n".join(lines) + "\n"
