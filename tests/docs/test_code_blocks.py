"""Every code block of README, CONTRIBUTING and docs/ runs as it stands there.

- A Python block with a title (``title="train.py"``) is a program: it is run by the commands of its
  page that name it, else by itself. A shell block with a title is run by a ``console`` block.
- All other Python is a fragment: the fragments of a page run in their order, in one namespace for
  each rank, ranks being threads. ``preambles/PAGE.py`` runs first and makes what the page takes for
  granted; ``RANKS`` there is how many ranks there are (else 4).
- A ``console`` block is run, and its output compared. Of a ``sh`` block, whatever its commands name
  must exist.
- Configurations are read.
"""

import importlib.util
import json
import re
import shutil
import tomllib

import pytest

from meshlib._mesh.config import MeshConfig
from meshlib.testing import run_ranks
from tests.docs.commands import check, command_lines, run, words_of
from tests.docs.pages import BLOCKS, LANGUAGES, PAGES, ROOT, without_blocks

PREAMBLES = ROOT / "tests" / "docs" / "preambles"
PYTHON = [block for block in BLOCKS if block.language == "python"]
FRAGMENTS = {
    page: [block for block in PYTHON if block.page == page and not block.title] for page in PAGES
}
FRAGMENTS = {page: blocks for page, blocks in FRAGMENTS.items() if blocks}
PROGRAMS = [block for block in PYTHON if block.title]
COMMANDS = [
    (block, line)
    for block in BLOCKS
    if block.language == "sh" and not block.title
    for line in command_lines(block.text)
]
STARTERS = {"meshrun", "python", "mpirun"}
CONSOLES = [block for block in BLOCKS if block.language == "console"]
SCRIPTS = [block for block in BLOCKS if block.language == "sh" and block.title]


def is_here(module):
    return importlib.util.find_spec(module) is not None


def write_files(page, directory):
    for block in BLOCKS:
        if block.page == page and block.title:
            (directory / block.title).write_text(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_is_in_fences_that_name_their_language(page):
    for block in BLOCKS:
        assert block.page != page or block.language in LANGUAGES, str(block)
    lines = ["", *without_blocks(page)]
    indented = [
        number
        for number, line in enumerate(lines)
        if re.match(r" {4,}\S", line) and not lines[number - 1].strip()
    ]
    assert not indented, f"{page.name}: indented blocks, which no test sees, at lines {indented}"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles(block):
    block.compiled()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", FRAGMENTS, ids=lambda page: page.name)
def test_the_fragments_of_a_page_run_in_their_order(page, tmp_path, monkeypatch):
    runnable = [block for block in FRAGMENTS[page] if all(map(is_here, block.needs))]
    if not runnable:
        pytest.skip(f"needs {FRAGMENTS[page][0].needs}")
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    path = PREAMBLES / f"{page.stem}.py"
    preamble = path.read_text() if path.exists() else ""
    ranks = int(found[1]) if (found := re.search(r"^RANKS = (\d+)\b", preamble, re.M)) else 4
    if "import jax" in preamble:
        importlib.import_module("jax")  # before the threads begin

    def program():
        names = {"__name__": page.stem}
        exec(compile(preamble, path, "exec"), names)
        for block in runnable:
            exec(block.compiled(), names)

    run_ranks(program, ranks, timeout=100)


@pytest.mark.processes
@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: f"{block}-{block.title}")
def test_a_program_runs(block, tmp_path):
    for module in block.needs:
        pytest.importorskip(module)
    write_files(block.page, tmp_path)
    named = [words_of(line) for other, line in COMMANDS if other.page == block.page]
    named = [words for words in named if words[0] in STARTERS and block.title in words]
    runners = [other for other in CONSOLES + SCRIPTS if other.page == block.page]
    if any(block.title in other.text for other in runners):
        return  # test_a_console_shows_what_really_comes runs it
    for words in named or [["python", block.title]]:
        if words[0] == "mpirun" and not shutil.which("mpirun"):
            pytest.skip("needs mpirun")
        done = run(words, tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: f"{block}-{block.title}")
def test_a_console_runs_each_script(block):
    consoles = [other for other in CONSOLES if other.page == block.page]
    assert any(f"$ sh {block.title}\n" in other.text for other in consoles)


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "sh" and not b.title], ids=str
)
def test_what_the_commands_name_exists(block):
    for line in command_lines(block.text):
        check(line)


@pytest.mark.processes
@pytest.mark.parametrize("block", CONSOLES, ids=str)
def test_a_console_shows_what_really_comes(block, tmp_path):
    for module in block.needs:
        pytest.importorskip(module)
    write_files(block.page, tmp_path)
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        done = run(words_of(command), tmp_path)
        # Ranks write when they get there; nothing else about a line is left to chance.
        assert sorted(done.stdout.splitlines()) == sorted(expected.splitlines()), done.stderr


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("toml", "json")], ids=str)
def test_a_configuration_is_read(block):
    if block.language == "json":
        json.loads(block.text)
    elif "mesh" in (read := tomllib.loads(block.text)):
        MeshConfig.from_dict(read).resolve(16)
