"""Fuzzes one target, guided by coverage: ``python tests/fuzz/with_atheris.py TARGET [options]``.

Needs ``pip install atheris``. Options are libFuzzer's, such as ``-max_total_time=60``. Stops at the
first finding, and writes its input into the working directory.
"""

from __future__ import annotations

import sys

import atheris  # pyright: ignore[reportMissingImports]

with atheris.instrument_imports(include=["transport", "meshlib"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"expected a target: {', '.join(TARGETS)}")
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[sys.argv[1]])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
