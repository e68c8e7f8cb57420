"""A job's metrics for Prometheus, in version 0.0.4 of its text exposition format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshlib._monitor.view import JobView, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SHARE = "The mean share of the time that ranks"
_OF_DIMS = (
    ("waiting", "dim_waiting_ratio", f"{_SHARE} wait for others in calls on a mesh dim."),
    ("inside", "dim_inside_ratio", f"{_SHARE} are inside calls on a mesh dim."),
    (
        "bandwidth",
        "dim_bytes_per_second",
        "Bytes per second of all ranks' arrays in calls on a mesh dim.",
    ),
    ("calls", "dim_calls_per_second", "Calls per second of all ranks on a mesh dim."),
)
"""The fields of ``DimShare``, each with its metric's name and help text."""


def metrics(view: JobView, now: float) -> str:
    """Return the job's metrics. Times are in seconds, shares from 0 to 1."""
    lines: list[str] = []

    def gauge(
        name: str, words: str, samples: Iterable[tuple[Mapping[str, object], float]], kind: str = ""
    ) -> None:
        lines.append(f"# HELP meshlib_{name} {words}")
        lines.append(f"# TYPE meshlib_{name} {kind or 'gauge'}")
        for labels, value in samples:
            inner = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in labels.items())
            lines.append(f"meshlib_{name}{'{' + inner + '}' if inner else ''} {value:.9g}")

    ranks = view.ordered()
    there = view.there(now)
    sampled = [(one, one.sample) for one in ranks if one.sample is not None]
    states = [one.state(now) for one in ranks]
    gauge(
        "ranks",
        "Ranks by state.",
        [({"state": state}, float(states.count(state))) for state in State],
    )
    gauge(
        "rank_up",
        "1 for a rank that is in the job and sends samples, else 0.",
        [({"rank": one.rank}, float(one in there)) for one in ranks],
    )
    gauge("epoch", "The number of the job's epoch.", [({}, float(view.epoch))])
    if view.committed >= 0:
        gauge(
            "steps_total",
            "Steps that the training loop has committed.",
            [({}, float(view.committed))],
            "counter",
        )
    gauge(
        "step_seconds",
        "Seconds from one step to the next.",
        [({"rank": one.rank}, one.step) for one in there if one.step],
    )
    gauge(
        "rank_inside_calls_ratio",
        "The share of the time that a rank is inside calls.",
        [({"rank": one.rank}, one.smooth.inside) for one in there],
    )
    gauge(
        "rank_straggles",
        "1 for a rank that the others wait for, else 0.",
        [({"rank": one.rank}, float(one.rank in view.slow)) for one in there],
    )
    gauge(
        "rank_calls_total",
        "Calls of a rank on all groups.",
        [({"rank": one.rank}, float(sample.total)) for one, sample in sampled],
        "counter",
    )
    gauge(
        "rank_oldest_call_seconds",
        "Seconds since a rank's oldest open call began; 0 if it has none.",
        [
            ({"rank": one.rank}, max(map(sample.age, sample.open_calls), default=0.0))
            for one, sample in sampled
            if one in there
        ],
    )
    for field, name, words in _OF_DIMS:
        gauge(name, words, [({"dim": dim.name}, getattr(dim, field)) for dim in view.dims])
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
