"""The pages as a reader has them: their code blocks, and what is said about each."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(page for page in (ROOT / "docs").rglob("*.md") if page.parents[1].name != "reference"),
    ],
    key=lambda path: path.stem,
)
LANGUAGES = {"python", "sh", "console", "toml", "yaml", "json", "text"}
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?: title=\"(?P<title>[\w./]+)\")?(?P<rest>[^\n]*)\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_NEEDS = re.compile(r"<!-- needs: ([\w, ]+) -->\n+ *$")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    A block with a ``title`` is a file: a program if it is Python, a script if it is shell. Other
    Python is a fragment. ``needs`` are the modules without which the block cannot run, as
    ``<!-- needs: torch -->`` before it says.
    """

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    needs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def compiled(self) -> object:
        """Return its code; a traceback then has the page's name and lines."""
        return compile("\n" * self.line + self.text, self.page.name, "exec")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        needs = _NEEDS.search(before)
        assert not match["rest"], f"{page.name}: {match[0].splitlines()[0]!r} is not understood"
        found.append(
            Block(
                page,
                before.count("\n") + 1,
                match["language"],
                match["title"],
                textwrap.dedent(match["text"]),
                tuple(re.split(r", *", needs[1])) if needs else (),
            )
        )
    return found


def without_blocks(page: Path) -> list[str]:
    """Return the page's lines, those of fenced blocks empty."""
    text = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
    return text.splitlines()


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
