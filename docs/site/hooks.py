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
_LINK_IN_HTML = re.compile(r'\b(?:href|src)="(?!\w+:)([^"#?]*)(?:\?[^"#]*)?(?:#([^"]*))?"')
_ANCHOR = re.compile(r'\bid="([^"]+)"')
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
    texts = [("README.md", readme)]
    texts += [(_place(page.src_uri), page.content_string) for page in files.documentation_pages()]
    added: set[str] = set()
    for place, text in texts:  # which grows: a page that is brought along has links as well
        for path in sorted({_target(match[1], place) for match in _LINK.finditer(text)} - added):
            if path.startswith("docs/") or not (ROOT / path).is_file():
                continue
            added.add(path)
            uri = f"source/{path}"
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
            if path.endswith(".md"):
                texts.append((path, (ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site.

    A link to a folder, which is not a page, becomes its text.
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
    """Fail where a page links to a file or an anchor that is not in the site."""
    texts = {page: page.read_text() for page in Path(config.site_dir).rglob("*.html")}
    anchors = {page: set(_ANCHOR.findall(text)) for page, text in texts.items()}
    for page, text in texts.items():
        if page.name == "404.html":  # whose links are absolute
            continue
        for path, anchor in set(_LINK_IN_HTML.findall(text)):
            target = (page.parent / path).resolve() if path else page
            if not target.is_file() or (anchor and anchor not in anchors.get(target, {anchor})):
                link = f"{path}#{anchor}" if anchor else path
                raise PluginError(f"{page.name} links to {link}, which is not there")


def _place(uri: str) -> str:
    """Return where in the repository the page at ``uri`` of the site comes from."""
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"


def _target(link: str, place: str) -> str:
    """Return the file in the repository that ``link`` means in the file at ``place``."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
