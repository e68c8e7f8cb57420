"""Ranks for a notebook: persistent processes that run the functions of cells.

``local_ranks`` starts ranks, ``attach`` finds the ranks of a job that runs ``meshrun -m
meshlib.notebook``. ``%load_ext meshlib.notebook`` adds the cell magic ``%%ranks``.
"""

from meshlib.notebook._magic import load_ipython_extension
from meshlib.notebook._ranks import Ranks, RankSet, attach, local_ranks

__all__ = ["RankSet", "Ranks", "attach", "load_ipython_extension", "local_ranks"]
