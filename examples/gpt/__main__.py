"""Train a GPT on the source of Python's own library, over any mesh; see ``gpt.toml``.

    meshrun --mesh pp=2,dp_shard=2,tp=2 examples/gpt --config examples/gpt/gpt.toml

The six dims are pp, dp_replicate, dp_shard, cp, tp and ep; those that the mesh does not name have
one rank. Whichever it is, the losses are the same. ``meshlib explain estimate
examples/gpt/estimate.py examples/gpt/gpt.toml`` says what a run will take, before it begins.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for gpt and support

from gpt.run import main

if __name__ == "__main__":
    main()
