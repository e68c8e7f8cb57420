"""All settings of a run, from one TOML file; what is wrong or does not fit is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.settings import SettingsFile

from numpy_gpt.dims import Sizes
from parallel.pipeline import get_schedule_class


@dataclass(frozen=True)
class Model:
    """The table ``[model]``."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    experts: int
    top_k: int
    expert_hidden: int
    shared_hidden: int
    balance_weight: float

    def has_experts(self, layer: int) -> bool:
        """True if a layer's feed-forward network is a mixture of experts: each second one is."""
        return self.experts > 0 and layer % 2 == 1


@dataclass(frozen=True)
class Data:
    """The table ``[data]``; ``batch_size`` is that over all ranks."""

    characters: int
    batch_size: int
    microbatches: int


@dataclass(frozen=True)
class Optimizer:
    """The table ``[optimizer]``."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    clip: float


@dataclass(frozen=True)
class Schedule:
    """The table ``[schedule]``."""

    steps: int
    warmup: int
    final: float


@dataclass(frozen=True)
class Parallel:
    """The table ``[parallel]``."""

    pipeline: str
    stages_per_rank: int
    sequence: bool
    attention: str


@dataclass(frozen=True)
class Checkpoints:
    """The table ``[checkpoints]``."""

    folder: str
    every: int
    keep: int


@dataclass(frozen=True)
class Precision:
    """The table ``[precision]``."""

    dtype: str


@dataclass(frozen=True)
class Run:
    """The table ``[run]``."""

    seed: int


class Config:
    """All settings. Raises ValueError with file and key for what is wrong."""

    def __init__(self, path: Path) -> None:
        self.file = file = SettingsFile(path)
        model = ["vocabulary", "layers", "width", "heads", "kv_heads", "hidden", "context"]
        self.model = file.read("model", Model, model)
        self.data = file.read("data", Data, ["characters", "batch_size", "microbatches"])
        self.optimizer = file.read("optimizer", Optimizer, ["lr", "clip"])
        self.schedule = file.read("schedule", Schedule, ["steps"])
        self.parallel = file.read("parallel", Parallel, ["stages_per_rank"])
        self.checkpoints = file.read("checkpoints", Checkpoints, ["every", "keep"])
        self.precision = file.read("precision", Precision)
        self.run = file.read("run", Run)
        if self.precision.dtype not in ("float32", "float64"):
            file.wrong("precision", "dtype", "expected 'float32' or 'float64'")
        if self.parallel.attention not in ("ring", "all_to_all"):
            file.wrong("parallel", "attention", "expected 'ring' or 'all_to_all'")
        self._divides("model", "width", [("heads", self.model.heads)])
        self._divides("model", "heads", [("kv_heads", self.model.kv_heads)])
        if self.model.experts:
            for key in ("top_k", "expert_hidden"):
                if not getattr(self.model, key):
                    file.wrong("model", key, "expected more than 0, as there are experts")
            if self.model.top_k > self.model.experts:
                file.wrong("model", "top_k", f"of {self.model.experts} experts")

    def check(self, sizes: Sizes) -> None:
        """Raise ValueError for what does not fit the sizes of the mesh's dims: before any byte."""
        tp, cp, ep, pp = sizes.tp, sizes.cp, sizes.ep, sizes.pp
        model, sequence = self.model, self.parallel.sequence
        ranks = sizes.replicas
        pieces = [
            (f"microbatches × the {ranks} ranks that share a batch", self.data.microbatches * ranks)
        ]
        self._divides("data", "batch_size", pieces)
        for key in ("vocabulary", "heads", "kv_heads", "hidden"):
            self._divides("model", key, [("ranks of tp", tp)])
        parts = [("parts that cp has for each rank, times tp", 2 * cp * (tp if sequence else 1))]
        if cp > 1:
            self._divides("model", "context", parts)
        elif sequence:
            self._divides("model", "context", [("ranks of tp", tp)])
        if cp > 1 and self.parallel.attention == "all_to_all":
            for key in ("heads", "kv_heads"):
                self._divides("model", key, [("ranks of tp × cp", tp * cp)])
        if ep > 1:
            if not model.experts:
                self.file.wrong("model", "experts", f"and the mesh has ep = {ep}; expected some")
            self._divides("model", "experts", [("ranks of ep", ep)])
        if model.experts:
            for key in ("expert_hidden", "shared_hidden"):
                self._divides("model", key, [("ranks of tp", tp)])
        stages = pp * self.parallel.stages_per_rank
        if stages > model.layers:
            self.file.wrong("model", "layers", f"fewer than the {stages} stages of pp")
        try:
            schedule = get_schedule_class(self.parallel.pipeline)
            schedule.make_table(pp, self.data.microbatches, self.parallel.stages_per_rank)
        except ValueError as error:
            self.file.wrong("parallel", "pipeline", f"with pp = {pp}: {error}")

    def _divides(self, table: str, key: str, by: Sequence[tuple[str, int]]) -> None:
        value = getattr(getattr(self, table), key)
        for what, number in by:
            if value % number:
                self.file.wrong(table, key, f"which does not divide by {number} ({what})")
