"""The text, and which of it a rank reads in a step."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from numpy_gpt.config import Config
from numpy_gpt.dims import Dims

Codes = npt.NDArray[Any]


@cache
def read_library(characters: int) -> Codes:
    """Return the first characters of the standard library's modules, as ASCII codes (n,)."""
    pieces, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        pieces.append(path.read_text("ascii", errors="ignore"))
        total += len(pieces[-1])
        if total >= characters:
            break
    return np.frombuffer("".join(pieces)[:characters].encode("ascii"), np.uint8)


class Batches:
    """The batches of a run: a function of the step alone, so that resuming needs no state.

    A step's ``batch_size`` sequences are drawn anew. Microbatch m has the m-th part of them on
    whatever mesh; of that each rank of ``dims.sequences`` has an equal share, and of each sequence
    this rank's part along ``cp``.
    """

    def __init__(self, config: Config, dims: Dims, positions: npt.NDArray[np.int64]) -> None:
        self._text = read_library(config.data.characters)
        self._data, self._context = config.data, config.model.context
        self._seed = config.run.seed
        replicas = dims.sequences
        rows = np.arange(config.data.batch_size).reshape(config.data.microbatches, -1)
        share = rows.shape[1] // replicas.size()
        begin = replicas.process_group.rank() * share
        self._rows = rows[:, begin : begin + share].reshape(-1)
        self._positions = positions

    def at(self, step: int) -> tuple[Codes, Codes]:
        """Return this rank's inputs and targets of a step, (sequences, length), int32.

        Microbatch after microbatch.
        """
        rng = np.random.default_rng([self._seed, step])
        last = len(self._text) - self._context - 1
        starts = rng.integers(0, last, self._data.batch_size)[self._rows]
        windows = starts[:, None] + self._positions
        return self._text[windows].astype(np.int32), self._text[windows + 1].astype(np.int32)
