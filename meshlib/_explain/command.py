"""``meshlib explain TOPIC``: each topic is a module, see ``Topic``.

Other packages add topics with entry points in the group ``meshlib.explanations``: the name is the
topic, the value its module. ``parallel`` adds ``schedule`` in this way.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from meshlib._command_line import USAGE_ERROR, OneLineParser, print_note, print_result
from meshlib._did_you_mean import did_you_mean

_GROUP = "meshlib.explanations"
_OWN = {
    "estimate": "meshlib._explain.estimate",
    "mesh": "meshlib._explain.mesh",
    "plan": "meshlib._explain.plan",
}


class Topic(Protocol):
    """A module that explains one topic. The first line of its docstring describes the topic."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to ``parser``."""
        ...

    def explain(self, given: argparse.Namespace) -> str:
        """Return the explanation, several lines.

        Raises ValueError, OSError or ImportError for wrong arguments; the command prints one line.
        """
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Print the explanation for ``argv``; return the exit code: 0, or 2 for wrong input."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if name in ("", "-h", "--help", "help"):
        sys.stdout.write(_usage())
        return 0 if name else USAGE_ERROR
    topics = _topics() if name not in _OWN else _OWN
    if name not in topics:
        hint = did_you_mean(name, topics)
        names = ", ".join(topics)
        print_note("meshlib explain", f"{name!r} is not a topic; expected {names}{hint}")
        return USAGE_ERROR
    topic = _load(topics[name])
    parser = OneLineParser(prog=f"meshlib explain {name}", description=_words(topic))
    topic.add_arguments(parser)
    given = parser.parse_args(rest)
    return print_result(parser.prog, lambda: topic.explain(given))


def _topics() -> dict[str, str]:
    from importlib.metadata import entry_points  # slow to import

    added = {point.name: point.value for point in entry_points(group=_GROUP)}
    return dict(sorted({**added, **_OWN}.items()))


def _load(module: str) -> Topic:
    return cast(Topic, importlib.import_module(module))


def _words(topic: Topic) -> str:
    return (topic.__doc__ or "").partition("\n")[0]


def _usage() -> str:
    lines = [f"  {name:10} {_words(_load(module))}" for name, module in _topics().items()]
    return (
        "usage: meshlib explain TOPIC ...\n\n"
        + "\n".join(lines)
        + "\n\nSee meshlib explain TOPIC --help. No command starts a process.\n"
    )
