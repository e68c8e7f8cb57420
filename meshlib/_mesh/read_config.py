"""Config files to dicts: TOML, JSON, YAML where PyYAML is installed. Repeated keys are errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast


def read_config(path: Path) -> dict[str, Any]:
    """Read the config file at ``path``; its suffix gives the format.

    Raises ValueError that names the file when its suffix is none of ``SUFFIXES``, or it is not well
    formed; OSError when it cannot be read; ImportError for YAML without PyYAML.
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
        """Refuses a key that comes twice; YAML demands that, PyYAML keeps the last one."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [
                self.construct_object(key, deep=True)
                for key, _ in node.value
                if key.tag != "tag:yaml.org,2002:merge"  # `<<`, which may come twice
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
"""The suffixes of config files. No other list exists."""

SUFFIXES_IN_WORDS = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
"""The same for messages."""
