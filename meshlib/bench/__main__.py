"""``python -m meshlib.bench``: the same as ``meshlib bench``."""

from __future__ import annotations

import sys

from meshlib.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
