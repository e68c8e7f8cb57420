"""Makes the README the site's first page, and brings along the sources that pages link to."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
_LINK_IN_HTML = re.compile(r'\b(?:href|src)="(?!\w+:)([^"#?]+)')
_WHOLE_LINK = re.compile(r"\[([^]]+)" + _LINK.pattern + r"\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README as ``index.md``, what lies outside of ``docs`` under ``source/``, and the
    site's own style and script.
    """
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=readme))
    for name in ("site.css", "iframe-worker.js"):
        path = Path(__file__).with_name(name)
        files.append(File.generated(config, name, abs_src_path=str(path)))
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
    """Turn links between files of the repository into links between those of the site.

    A link to a folder, which is no page, becomes its text.
    """
    here = page.file.src_uri

    def unlink_folder(match: re.Match[str]) -> str:
        return match[1] if (ROOT / _target(match[2], _place(here))).is_dir() else match[0]

    def turn(match: re.Match[str]) -> str:
        path = _target(match[1], _place(here))
        on_site = path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"
        return f"]({posixpath.relpath(on_site, posixpath.dirname(here) or '.')}"

    return _LINK.sub(turn, _WHOLE_LINK.sub(unlink_folder, markdown))


def on_post_build(config: Any) -> None:
    """Fail where a page links to what is not in the site."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # whose links are absolute
            continue
        for link in set(_LINK_IN_HTML.findall(page.read_text())):
            if not (page.parent / link).is_file():
                raise PluginError(f"{page.relative_to(site)} links to {link}, which is not there")


def _place(uri: str) -> str:
    """Return where in the repository the page at ``uri`` of the site comes from."""
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"


def _target(link: str, place: str) -> str:
    """Return the file in the repository that ``link`` means in the file at ``place``."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
