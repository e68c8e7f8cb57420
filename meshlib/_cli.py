"""The ``meshlib`` command: it imports and runs the subcommand that its first argument names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from meshlib._command_line import end_quietly, print_note
from meshlib._did_you_mean import did_you_mean

COMMANDS: dict[str, tuple[str, str]] = {
    "checkpoint": (
        "meshlib.checkpoint._command:main",
        "list, show, check, cut, compare checkpoints",
    ),
    "explain": (
        "meshlib._explain.command:main",
        "show a mesh, a plan, a schedule, or the memory and bytes of a step",
    ),
    "run": ("meshlib._launcher.__main__:main", "start a program on several ranks (also: meshrun)"),
    "secret": ("meshlib._secret_command:main", "write the secret that a job's processes share"),
    "top": (
        "meshlib._monitor.command:main",
        "show a running job: its ranks, their calls, and where they wait",
    ),
    "trace": ("meshlib._trace.command:main", "explain and draw the flight records of a failed job"),
    "tune": ("meshlib._tune.cli:main", "measure the sizes at which algorithms change"),
    "bench": ("meshlib._bench.cli:main", "time collectives, compared with other libraries"),
}
"""For each command ``module:function``, called with the remaining arguments, and a help text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the process's arguments) and return its exit code."""
    return end_quietly(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_usage())
        return 0 if arguments else 2
    command, *rest = arguments
    if command in ("-V", "--version"):
        from meshlib import __version__
        from transport._native import core, why_not

        built = f"none: {why_not}" if core is None else core.__file__
        sys.stdout.write(f"meshlib {__version__}\ncompiled core: {built}\n")
        return 0
    if command not in COMMANDS:
        expected = ", ".join(COMMANDS)
        hint = did_you_mean(command, COMMANDS)
        print_note("meshlib", f"{command!r} is not a command; expected {expected}{hint}")
        return 2
    module, _, function = COMMANDS[command][0].partition(":")
    run: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    return run(rest)


def _usage() -> str:
    lines = [f"  {name:10} {words}" for name, (_, words) in COMMANDS.items()]
    commands = "\n".join(lines)
    return (
        "usage: meshlib COMMAND ...\n\n"
        f"{commands}\n\n"
        "See meshlib COMMAND --help. meshlib --version prints the version, and the path of\n"
        "the compiled core or the reason for its absence.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
