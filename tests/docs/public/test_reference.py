"""The reference has an entry for each public name, and the site's contents have each page."""

import importlib
import inspect
import re

import pytest
import yaml

import meshlib
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"
PACKAGES = [
    "parallel",
    "parallel.nn",
    "parallel.optim",
    "parallel.comm_hooks",
    "parallel.join",
    "parallel.samplers",
    "parallel.zero",
    "parallel.ddp",
    "parallel.tensor_parallel",
    "parallel.pipeline",
    "parallel.jax",
    "parallel.jax.fsdp",
    "parallel.elastic",
]
OTHERS = ["meshlib.extend", "meshlib.extend.jit", "meshlib.jit", "meshlib.checkpoint"]
OTHERS += ["meshlib.rpc", "parallel.rpc", "parallel.rpc.dist_autograd"]
ENTRIES = [
    entry
    for page in sorted((DOCS / "reference").rglob("*.md"))
    for entry in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
]
IMPORTS = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(
        r"^\| `(parallel[\w.]*)` \| (`.*) \|$",
        (DOCS / "parallelism/data-parallel.md").read_text(),
        re.MULTILINE,
    )
}


def value_of(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def public(package):
    module = importlib.import_module(package)
    names = {name: getattr(module, name) for name in module.__all__}
    return {name: value for name, value in names.items() if not inspect.ismodule(value)}


def test_each_name_of_meshlib_has_one_entry():
    assert len(set(ENTRIES)) == len(ENTRIES)
    entries = [entry.removeprefix("meshlib.") for entry in ENTRIES if entry.startswith("meshlib.")]
    assert sorted(name for name in entries if "." not in name) == meshlib.__all__


@pytest.mark.parametrize("package", [*PACKAGES, *OTHERS])
def test_each_name_of_a_package_has_an_entry(package):
    shown = [value_of(entry) for entry in ENTRIES]
    missing = [
        name for name, value in public(package).items() if not any(one is value for one in shown)
    ]
    assert not missing


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_says_where_each_name_is_imported_from(package):
    imported = [value_of(f"{module}.{name}") for module in IMPORTS for name in IMPORTS[module]]
    missing = [
        name for name, value in public(package).items() if not any(one is value for one in imported)
    ]
    assert not missing


def pages_of(entry):
    """Return the paths in a part of the site's contents, which may have parts of its own."""
    if isinstance(entry, str):
        return [entry]
    return [
        page
        for value in entry.values()
        for one in (value if isinstance(value, list) else [value])
        for page in pages_of(one)
    ]


def test_the_contents_have_each_page():
    nav = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text())["nav"]
    listed = [page for part in nav for page in pages_of(part)]
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(pages | {"index.md"})


def test_the_parts_of_the_contents_are_the_folders():
    nav = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text())["nav"]
    folders = [{page.partition("/")[0] for page in pages_of(part)} - {"index.md"} for part in nav]
    assert all(len(found) == 1 for found in folders)
    assert len(set().union(*folders)) == len(nav)
    assert folders[1:] == [{name.lower()} for part in nav[1:] for name in part]
