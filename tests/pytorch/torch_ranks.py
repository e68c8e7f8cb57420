"""Ranks of PyTorch: the programs in ``programs``, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


def run(program: str, ranks: int, folder: Path, *arguments: str) -> list[str]:
    """Run ``program`` on ``ranks`` ranks, which meet in ``folder``; return what each printed."""
    command = [sys.executable, "-W", "ignore", str(PROGRAMS / program)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        return [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
