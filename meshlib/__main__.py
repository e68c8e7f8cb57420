"""``python -m meshlib`` is the command ``meshlib``."""

import sys

from meshlib._cli import main

if __name__ == "__main__":
    sys.exit(main())
