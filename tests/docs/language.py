"""Finds long sentences, bare relatives, translated idioms and house words in the prose.

``python -m tests.docs.language`` lists every finding; ``--write`` records their numbers in
``language.json``. A file may not gain findings (``test_language.py``).
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("language.json")
MOST_WORDS = 30
FOLDERS = ("meshlib", "transport", "parallel", "examples", "docs")

HOUSE_WORDS = re.compile(
    r"\b(doors?|lanes?|legs?|laps?|bereav\w+|bereft|mourners?|bur(?:y|ied)|doorbells?|outbox(?:es)?|"
    r"look-?outs?|beacons?|neighbou?rhoods?|told_to_all|standpoints?|leglane|dealtoutgoing)\b",
    re.IGNORECASE,
)
# "Who looks has seen": a relative clause without a noun, as a subject or as an object.
BARE_RELATIVE = re.compile(
    r"\b(?:whom|whoever)\b|(?:^|[.;:(\"] +|, (?:and|but|or) )(?:who|what|which of them) "
    r"(?:is|was|are|were|has|have|had|does|can|cannot|may|looks|waits|only|says|knows|comes|else)\b"
    r"(?![^.]*\?)",
    re.IGNORECASE,
)
# Idioms that English does not have: "for what is no number", "as TCPStore does", "and its like".
IDIOM = re.compile(
    r"\b(?:for|of|if) what (?:is|are) (?:no|not|neither)\b|^returns? what\b|"
    r"\braises? (?:what|as x)\b|"
    r"\b(?:that|which|it|one|x|rank) is no "
    r"(?!longer|more|other|different|reason|news|use\b|way)\w+|"
    r"\b(?:that|which) are no (?!longer|more|other)\w+|'s sake\b|\b(?:and|or) (?:its|their) like\b|"
    r"\bby way of\b|\bwho has not come\b|\bthe mend\b",
    re.IGNORECASE,
)
_SENTENCE_ENDS = re.compile(
    r"(?<=[.!?:;])[)\"'`*]*\s+(?=[\"'`(*]*[A-Z0-9]|\(?`)|\n\s*\n|\n\s*(?:[-*]|\d+\.) "
)
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\[([^\]]*)\]\([^)]*\)|https?://\S+")


def _python(text: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = node.body[0] if node.body else None
            if (
                isinstance(doc, ast.Expr)
                and isinstance(doc.value, ast.Constant)
                and isinstance(doc.value.value, str)
            ):
                yield doc.lineno, doc.value.value
        elif isinstance(node, ast.Raise) and node.exc is not None:
            found = [
                part.value
                for part in ast.walk(node.exc)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            if found:
                yield node.lineno, " ".join(found)
    run: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if run and token.start[0] != last + 1:
                yield first, "\n".join(run)
                run = []
            first = first if run else token.start[0]
            last = token.start[0]
            run.append(token.string.lstrip("#! "))
    if run:
        yield first, "\n".join(run)


def _c(text: str) -> Iterator[tuple[int, str]]:
    for found in re.finditer(r"/\*(.*?)\*/|//([^\n]*)", text, re.DOTALL):
        words = re.sub(r"^\s*\*", "", found[1] or found[2] or "", flags=re.MULTILINE)
        yield text.count("\n", 0, found.start()) + 1, words


def _page(text: str) -> Iterator[tuple[int, str]]:
    blank = re.sub(r"^ *```.*?^ *```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    line = 1
    for block in re.split(r"(\n\s*\n)", blank):
        if block.strip() and not block.lstrip().startswith(("|", "#", "<")):
            yield line, block
        line += block.count("\n")


READERS = {".py": _python, ".c": _c, ".h": _c, ".md": _page}


def findings(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (rule, line, sentence) for each finding in a file's prose."""
    for line, prose in READERS[path.suffix](path.read_text()):
        for sentence in _SENTENCE_ENDS.split(prose):
            plain = " ".join(_CODE.sub(lambda m: m[1] or "x", sentence).split())
            if len(plain.split()) > MOST_WORDS:
                yield "long sentence", line, plain
            if BARE_RELATIVE.search(plain):
                yield "bare relative", line, plain
            if IDIOM.search(plain):
                yield "idiom", line, plain
            if HOUSE_WORDS.search(plain):
                yield "house word", line, plain


def files() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in FOLDERS:
        found += (path for path in (ROOT / folder).rglob("*") if path.suffix in READERS)
    return sorted(path for path in found if "out" not in path.relative_to(ROOT).parts)


def class_names() -> dict[str, list[str]]:
    """Return where each class is defined: name without underscores → ``file:line`` of each one."""
    table: dict[str, list[str]] = {}
    for folder in ("meshlib", "transport", "parallel"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    table.setdefault(node.name.strip("_"), []).append(where)
    return table


def counts() -> dict[str, dict[str, int]]:
    """Return the numbers of findings: file → rule → how many; files without any are left out."""
    table = {}
    for path in files():
        if found := Counter(rule for rule, _, _ in findings(path)):
            table[str(path.relative_to(ROOT))] = dict(sorted(found.items()))
    return table


if __name__ == "__main__":
    if "--write" in sys.argv:
        RECORD.write_text(json.dumps(counts(), indent=1, sort_keys=True) + "\n")
    else:
        chosen = [Path(name).resolve() for name in sys.argv[1:]] or files()
        for path in chosen:
            for rule, line, sentence in findings(path):
                print(f"{path.relative_to(ROOT)}:{line}: {rule}: {sentence[:160]}")
