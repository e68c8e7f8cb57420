"""Parsers of config files: TOML, JSON, and YAML with PyYAML. Repeated keys are errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast


def read_config(path: Path) -> dict[str, Any]:
    """Read the config file at ``path``; its suffix gives the format.

    Raises ValueError, which names the file, for a suffix outside of ``SUFFIXES`` and a malformed
    file; OSError for an unreadable file; ImportError for YAML without PyYAML.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ValueError(f"{path}: suffix {path.suffix!r}; expected {SUFFIXES_IN_WORDS}")
    try:
        content = parse(path.read_bytes().decode())
    except ValueError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    except ImportError as error:
        raise ImportError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds {type(content).__name__}, expected a table of tables")
    return cast(dict[str, Any], content)


def _parse_toml(text: str) -> object:
    import tomllib  # slow to import, and only needed for TOML

    return tomllib.loads(text)


def _parse_json(text: str) -> object:
    import json

    return json.loads(text, object_pairs_hook=_once_each)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that occurs twice; JSON does not define its meaning."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} comes twice")
    return dict(pairs)


def _parse_yaml(text: str) -> object:
    try:
        import yaml
    except ImportError:
        raise ImportError(
            "reading YAML needs PyYAML, which is not installed;"
            " `pip install 'meshlib-spmd[yaml]'`, or write the config as TOML"
        ) from None

    class Loader(yaml.SafeLoader):
        """A loader that refuses repeated keys, as YAML demands; PyYAML keeps the last one."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [
                self.construct_object(key, deep=True)
                for key, _ in node.value
                if key.tag != "tag:yaml.org,2002:merge"  # `<<`, which may be repeated
            ]
            for key in keys:
                if keys.count(key) > 1:
                    raise ValueError(f"key {key!r} comes twice {node.start_mark}")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506 (the loader is a SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


_PARSERS: dict[str, Callable[[str], object]] = {
    ".toml": _parse_toml,
    ".json": _parse_json,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}

SUFFIXES = tuple(_PARSERS)
"""The suffixes of config files."""

SUFFIXES_IN_WORDS = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
"""``SUFFIXES`` as text for messages."""
