"""``python -m meshlib.launcher`` is ``meshrun``."""

import sys

from meshlib.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
