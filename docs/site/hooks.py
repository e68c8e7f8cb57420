"""Makes the README the site's first page, and brings along the sources that pages link to."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README as ``index.md``, and what lies outside of ``docs`` under ``source/``."""
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=readme))
    style = Path(__file__).with_name("site.css")
    files.append(File.generated(config, style.name, abs_src_path=str(style)))
    linked = {_target(match[1], "README.md") for match in _LINK.finditer(readme)}
    for file in files.documentation_pages():
        for match in _LINK.finditer(file.content_string):
            linked.add(_target(match[1], _place(file.src_uri)))
    for path in sorted(linked):
        if not path.startswith("docs/") and (ROOT / path).is_file():
            uri = f"source/{path}"
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between those of the site."""
    here = page.file.src_uri

    def turn(match: re.Match[str]) -> str:
        path = _target(match[1], _place(here))
        if (ROOT / path).is_dir():
            return match[0]
        on_site = path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"
        return f"]({posixpath.relpath(on_site, posixpath.dirname(here) or '.')}"

    markdown = re.sub(r"\[([^]]+)\]\(\w+/\)", r"\1", markdown)  # a folder is no page
    return _LINK.sub(turn, markdown)


def _place(uri: str) -> str:
    """Return where in the repository the page at ``uri`` of the site comes from."""
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"


def _target(link: str, place: str) -> str:
    """Return the file in the repository that ``link`` means in the file at ``place``."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
