"""All settings of a run, from one TOML file, and the six dims that a mesh may have."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from meshlib import DeviceMesh
from parallel.pipeline import get_schedule_class

NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


class Dims:
    """A mesh with all six dims; a dim that the given mesh lacks has one rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        names = mesh.mesh_dim_names or ()
        for name in set(names) - set(NAMES):
            raise ValueError(f"the mesh has dim {name!r}; expected some of {', '.join(NAMES)}")
        missing = [name for name in NAMES if name not in names]
        if missing:
            ones = (1,) * len(missing)
            mesh = mesh.unflatten(names[-1], (-1, *ones), (names[-1], *missing))
        self.mesh = mesh
        self.pp, self.cp, self.tp, self.ep = (mesh[name] for name in ("pp", "cp", "tp", "ep"))
        self.sequences = mesh["dp_replicate", "dp_shard", "ep"]
        """The ranks with different sequences, over which a step's batch is divided."""
        self.tokens = mesh["dp_replicate", "dp_shard", "ep", "cp"]
        """The ranks with different tokens, over which losses and gradients are averaged."""
        mesh["dp_replicate", "ep", "cp"].flatten("copies")
        mesh["dp_replicate", "cp"].flatten("copies_of_experts")
        self.dense = mesh["copies", "dp_shard"]
        """The dims that replicate parameters, and the dim that shards them."""
        self.experts = mesh["copies_of_experts", "dp_shard"]
        """Likewise for the parameters of experts, which are split over ``ep``."""

    def sizes(self) -> dict[str, int]:
        """Return the number of ranks of each of the six dims."""
        return {name: self.mesh[name].size() for name in NAMES}


class Config:
    """All settings: the tables of a TOML file. Missing keys have the values of ``gpt.toml``.

    Raises ValueError with the file and the key for a wrong setting.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            given = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None
        self.tables = tomllib.loads(Path(__file__).with_name("gpt.toml").read_text())
        for name in self.tables.keys() - {"mesh"}:
            self._take(name, given.get(name, {}))
        self.model, self.data, self.optimizer, self.parallel, self.run = (
            SimpleNamespace(**self.tables[name])
            for name in ("model", "data", "optimizer", "parallel", "run")
        )
        model = self.model
        self._one_of("run", "dtype", "float32", "float64")
        self._one_of("parallel", "attention", "ring", "all_to_all")
        self._divides("model", "width", model.heads, "heads")
        self._divides("model", "heads", model.kv_heads, "kv_heads")
        if model.experts and not 0 < model.top_k <= model.experts:
            self.wrong("model", "top_k", f"of {model.experts} experts")

    def check(self, dims: Dims) -> None:
        """Raise ValueError for a setting that does not fit the mesh; sends nothing."""
        sizes, model, sequence = dims.sizes(), self.model, self.parallel.sequence
        pp, cp, tp, ep = (sizes[name] for name in ("pp", "cp", "tp", "ep"))
        replicas = dims.sequences.size()
        what = f"microbatches × the {replicas} ranks that share a batch"
        self._divides("data", "batch_size", self.data.microbatches * replicas, what)
        hidden = ["hidden", *(["expert_hidden", "shared_hidden"] if model.experts else [])]
        for key in ("vocabulary", "heads", "kv_heads", *hidden):
            self._divides("model", key, tp, "ranks of tp")
        parts = (2 * cp if cp > 1 else 1) * (tp if sequence else 1)
        self._divides("model", "context", parts, "parts of cp and tp")
        if cp > 1 and self.parallel.attention == "all_to_all":
            for key in ("heads", "kv_heads"):
                self._divides("model", key, tp * cp, "ranks of tp × cp")
        if ep > 1 and not model.experts:
            self.wrong("model", "experts", f"and the mesh has ep = {ep}; expected some")
        self._divides("model", "experts", ep, "ranks of ep")
        stages = pp * self.parallel.stages_per_rank
        if stages > model.layers:
            self.wrong("model", "layers", f"fewer than the {stages} stages of pp")
        try:
            schedule = get_schedule_class(self.parallel.pipeline)
            schedule.make_table(pp, self.data.microbatches, self.parallel.stages_per_rank)
        except ValueError as error:
            self.wrong("parallel", "pipeline", f"with pp = {pp}: {error}")

    def wrong(self, table: str, key: str, why: str) -> NoReturn:
        """Raise the ValueError for a value that does not fit another setting."""
        value = self.tables[table][key]
        raise ValueError(f"{self.path}: [{table}] {key} is {value!r}, {why}")

    def _take(self, name: str, given: dict[str, Any]) -> None:
        table = self.tables[name]
        for key, value in given.items():
            if key not in table:
                raise ValueError(f"{self.path}: [{name}] {key}: expected one of {', '.join(table)}")
            kind, table[key] = type(table[key]), value
            if type(value) is not kind and (kind, type(value)) != (float, int):
                self.wrong(name, key, f"expected a value of type {kind.__name__}")
            if kind in (int, float) and value < 0:
                self.wrong(name, key, "expected 0 or more")

    def _one_of(self, table: str, key: str, *values: str) -> None:
        if self.tables[table][key] not in values:
            self.wrong(table, key, f"expected {' or '.join(map(repr, values))}")

    def _divides(self, table: str, key: str, number: int, what: str) -> None:
        if self.tables[table][key] % max(number, 1):
            self.wrong(table, key, f"which is not divisible by {number} ({what})")
