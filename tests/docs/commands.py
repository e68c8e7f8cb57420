"""The command lines in the pages: whether what they name exists, and running them."""

import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from meshlib._cli import COMMANDS
from meshlib._launcher.options.parser import make_parser as launcher_parser
from tests.docs.pages import ROOT
from tests.support.net.ports import reserved_port

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = {
    target
    for file in ("Makefile", "tests/others.mk")
    for targets in re.findall(r"^\.PHONY: (.*)", (ROOT / file).read_text(), re.MULTILINE)
    for target in targets.split()
}
# Of other projects: the pages tell them for comparison.
OF_OTHERS = {"torchrun", "mpirun", "mpiexec", "srun", "sbatch", "salloc", "kubectl"}
OF_OTHERS |= {"git", "cd", "export", "etcd"}


def command_lines(text: str) -> list[str]:
    """Return the commands of a ``sh`` block, without comments and with continued lines joined."""
    joined = text.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def words_of(line: str) -> list[str]:
    """Return the words of a command after the settings of variables in front of it."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    return words


def check(line: str) -> None:
    """Raise unless the programs, files, options and targets that ``line`` names exist."""
    words = words_of(line)
    command, rest = Path(words[0]).name, words[1:]
    if command in {"meshrun", "meshlib"}:
        if command == "meshlib" and rest[0].startswith("-"):
            assert rest[0] in _options_of(), rest[0]
        elif command == "meshlib" and rest[0] != "run":
            assert rest[0] in COMMANDS, rest[0]
            # A command may have words of its own: meshlib checkpoint show.
            several = rest[0] in ("checkpoint", "explain")
            known = _options_of(*rest[: 2 if several else 1])
            for option in rest[1:]:
                assert not option.startswith("--") or option in known, option
        else:
            launcher_parser().parse_args(rest[command == "meshlib" :])
        for word in rest:
            path = ROOT / word
            runs = path.is_file() or (path / "__main__.py").is_file()
            assert not word.startswith("examples/") or runs, word
    elif command == "make":
        assert set(rest) <= TARGETS, rest
    elif command == "pip":
        for extras in re.findall(r"\[([\w,-]+)\]", line):
            assert set(extras.split(",")) <= set(EXTRAS), extras
    elif command.startswith("python"):
        if rest[0] == "-m" and rest[1] != "venv":
            assert find_spec(rest[1]), rest[1]
        elif rest[0] == "-c":
            compile(rest[1], line, "exec")
    else:
        assert command in OF_OTHERS, f"{command} is not understood: {line}"


@cache
def _options_of(*words: str) -> set[str]:
    done = run([sys.executable, "-m", "meshlib._cli", *words, "--help"], ROOT)
    return set(re.findall(r"--[\w-]+", done.stdout))


def run(words: list[str], directory: Path, timeout: float = 50) -> subprocess.CompletedProcess[str]:
    """Run a command or a shell script of a page, by the interpreter that runs the tests.

    A script finds a free port in ``PORT``.
    """
    ours = {"meshrun": "meshlib._launcher", "meshlib": "meshlib._cli"}
    if words[0] == "sh":
        function = f'meshrun() {{ {shlex.quote(sys.executable)} -m meshlib._launcher "$@"; }}'
        with reserved_port() as port:
            script = f"PORT={port}; {function}; . ./{words[1]}"
            return _run(["sh", "-c", script], directory, timeout)
    if words[0] in ours:
        words = [sys.executable, "-m", ours[words[0]], *words[1:]]
    else:
        words = [sys.executable if word == "python" else word for word in words]
    return _run(words, directory, timeout)


def _run(words: list[str], directory: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=directory, capture_output=True, text=True, timeout=timeout, check=False
    )
