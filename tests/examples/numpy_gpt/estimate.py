"""What a run will take of each rank, by formulas: memory, and bytes sent in a step by mesh dim.

    meshlib explain estimate tests/examples/numpy_gpt/estimate.py FILE

Nothing is started, and no array is made. docs/which-dim.md has the formulas and their sources.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "examples")]  # for numpy_gpt and support

from meshlib import DeviceMesh  # noqa: E402
from numpy_gpt.config import Config  # noqa: E402
from numpy_gpt.dims import Sizes  # noqa: E402
from numpy_gpt.model import names_of  # noqa: E402
from parallel.pipeline import get_schedule_class, most_held  # noqa: E402

STATES = 2  # of AdamW: two moments for each value
INDEX = 8  # bytes of an int64
DIRECT_BYTES = 256 << 10  # what is smaller shares a message, see docs/fsdp.md


@dataclass
class Traffic:
    """What a rank sends in a step over each dim: calls, and bytes of bandwidth-optimal ones."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, dim: str, ranks: int, share: float, count: float, times: int = 1) -> None:
        """Note ``times`` calls over ``ranks`` ranks, in each of which one sends share * count."""
        if ranks > 1:
            self.calls[dim] += times
            self.bytes[dim] += round(times * share * count)

    def all_reduce(self, dim: str, ranks: int, count: float, times: int = 1) -> None:
        """Note all-reduces of ``count`` bytes."""
        self.add(dim, ranks, 2 * (ranks - 1) / ranks, count, times)

    def gather(self, dim: str, ranks: int, count: float, times: int = 1) -> None:
        """Note all-gathers to ``count`` bytes, reduce-scatters of them, or all-to-alls."""
        self.add(dim, ranks, (ranks - 1) / ranks, count, times)


@dataclass
class Weights:
    """How many values of parameters a rank has after tp and ep, before dp_shard."""

    dense: list[tuple[int, int]] = field(default_factory=list)
    """(rows, values in a row) of each parameter that all ranks but those of tp share."""
    experts: list[tuple[int, int]] = field(default_factory=list)

    def split(self, ranks: int) -> int:
        """Return how many values the first of ``ranks`` ranks has, that share rows."""
        return sum(-(-rows // ranks) * row for rows, row in self.dense + self.experts)

    def packed(self, itemsize: int) -> int:
        """Return the bytes of all, of which small ones are there twice."""
        sizes = [rows * row * itemsize for rows, row in self.dense + self.experts]
        return sum(size if size >= DIRECT_BYTES else 2 * size for size in sizes)


class Estimate:
    """Memory and traffic of the ranks at one place along pp."""

    def __init__(self, config: Config, sizes: Sizes, place: int) -> None:
        self.config, self.sizes = config, sizes
        self.table = get_schedule_class(config.parallel.pipeline).make_table(
            sizes.pp, config.data.microbatches, config.parallel.stages_per_rank
        )
        self.stages = [i for i, rank in enumerate(self.table.rank_of) if rank == place]
        names = names_of(config.model, self.table.stages)
        self.names = [name for stage in self.stages for name in names[stage]]
        self.itemsize = np.dtype(config.precision.dtype).itemsize
        self.weights = {name: self._weights(name) for name in self.names}
        microbatches = config.data.microbatches
        self.tokens = (config.data.batch_size // microbatches // sizes.replicas) * (
            config.model.context // sizes.cp
        )
        self.outside = self.tokens // sizes.tp if self._sequence else self.tokens
        # Of that many microbatches a rank keeps what its stages need for backward.
        self.in_flight = most_held(self.table)[place] / len(self.stages)
        self.memory = self._memory()
        self.traffic = self._traffic()

    @property
    def _sequence(self) -> bool:
        return self.config.parallel.sequence and self.sizes.tp > 1

    # ------------------------------------------------------------------ parameters

    def _weights(self, name: str) -> Weights:
        model, tp, ep = self.config.model, self.sizes.tp, self.sizes.ep
        width = model.width
        if name in ("embedding", "head"):
            return Weights([(model.vocabulary // tp, width)])
        if name == "norm":
            return Weights([(width, 1)])
        kv = width // model.heads * model.kv_heads
        found = Weights([(width // tp, width), (kv // tp, width), (kv // tp, width)])
        found.dense += [(width, width // tp), (width, 1), (width, 1)]
        if not model.has_experts(int(name.partition(".")[2])):
            found.dense += [(model.hidden // tp, width), (width, model.hidden // tp)]
            return found
        found.dense += [(model.experts, width)]
        if model.shared_hidden:
            shared = model.shared_hidden // tp
            found.dense += [(shared, width), (width, shared)]
        here, hidden = model.experts // ep, model.expert_hidden // tp
        found.experts += [(hidden, here * width), (width, here * hidden)]
        return found

    def _memory(self) -> dict[str, int]:
        """Return bytes by what they are for."""
        parts = sum(w.split(self.sizes.dp_shard) for w in self.weights.values())
        kept = sum(self._kept(name) for name in self.names)
        return {
            "parameters": parts * self.itemsize,
            "gradients": parts * self.itemsize,
            "optimizer": STATES * parts * self.itemsize,
            "gathered": self._gathered(),
            "activations": round(kept * self.in_flight),
            "working": self._working(),
        }

    def _gathered(self) -> int:
        """Return the bytes of whole parameters and gradients: of two parts at a time.

        With several microbatches all gradients are whole until the last one. What is small is
        packed for its messages, and is there twice. Over one rank they are the parts themselves.
        """
        if self.sizes.dp_shard == 1:
            return 0
        wholes = [w.packed(self.itemsize) for w in self.weights.values()]
        largest = sum(sorted(wholes, reverse=True)[:2])
        return largest + (sum(wholes) if self.config.data.microbatches > 1 else largest)

    def _working(self) -> int:
        """Return the bytes of what the most hungry layer makes and drops, about."""
        model, tp = self.config.model, self.sizes.tp
        tokens, length = self.tokens, self.config.model.context // self.sizes.cp
        features = [6 * model.hidden // tp]  # an activation's backward
        if any(model.has_experts(int(n.partition(".")[2])) for n in self.names if "." in n):
            features.append(model.top_k * (6 * model.expert_hidden // tp + 2 * model.width))
        features.append(3 * min(length, 128) * model.heads // tp)  # the softmax of 128 queries
        if "head" in self.names:
            features.append(4 * model.vocabulary // tp)
        return tokens * (max(features) + 2 * model.width) * self.itemsize

    # ------------------------------------------------------------------ activations

    def _kept(self, name: str) -> int:
        """Return the bytes that a part keeps of one microbatch from forward to backward."""
        model, tp, itemsize = self.config.model, self.sizes.tp, self.itemsize
        tokens, outside, width = self.tokens, self.outside, model.width
        norm = outside * (width + 1)
        if name == "embedding":
            return tokens * 4
        if name == "norm":
            return norm * itemsize
        if name == "head":  # the loss runs backward at once, and keeps nothing
            return outside * width * itemsize
        kv = width // model.heads * model.kv_heads
        turns = 2 * (model.context // self.sizes.cp) * (width // model.heads)
        attention = (
            tokens * width  # what the projections are made of
            + tokens * (2 * width + 2 * kv) // tp  # queries, keys, values, what comes out
            + tokens * model.heads // tp
            + turns
        )
        kept = 2 * norm + attention + tokens * width
        if not model.has_experts(int(name.partition(".")[2])):
            return (kept + 3 * tokens * model.hidden // tp) * itemsize
        rows = tokens * model.top_k
        kept += tokens * (model.experts + 2 * model.top_k)
        kept += rows * (2 * width + 3 * model.expert_hidden // tp)
        kept += 3 * tokens * model.shared_hidden // tp
        places = (2 if self.sizes.ep == 1 else 3) * rows * INDEX
        return kept * itemsize + places

    # ------------------------------------------------------------------ traffic

    def _traffic(self) -> Traffic:
        sent = Traffic()
        sizes, model = self.sizes, self.config.model
        microbatches = self.config.data.microbatches
        for name in self.names:
            self._of_tp(sent, name, microbatches)
            self._of_data(sent, self.weights[name], microbatches)
            if name.startswith("blocks"):
                self._of_cp(sent, microbatches)
                if model.has_experts(int(name.partition(".")[2])):
                    self._of_ep(sent, microbatches)
        size = self.outside * model.width * self.itemsize
        ends = [(i, j) for i in self.stages for j in (i - 1, i + 1) if 0 <= j < self.table.stages]
        away = sum(self.table.rank_of[i] != self.table.rank_of[j] for i, j in ends)
        sent.add("pp", sizes.pp, 1, size, microbatches * away)
        return sent

    def _of_tp(self, sent: Traffic, name: str, times: int) -> None:
        tp, model = self.sizes.tp, self.config.model
        whole = self.tokens * model.width * self.itemsize
        one = self.itemsize
        # An all-reduce without sequence parallel is a reduce-scatter and an all-gather with it.
        between = sent.gather if self._sequence else sent.all_reduce
        pairs = 2 if self._sequence else 1
        if name == "embedding":
            between("tp", tp, whole, times * (2 if self._sequence else 1))
        elif name == "head":
            between("tp", tp, whole, times * (3 if self._sequence else 1))
            sent.all_reduce("tp", tp, self.tokens * one, times)
            sent.all_reduce("tp", tp, 2 * self.tokens * one, times)
        elif name == "norm":
            if self._sequence:
                sent.all_reduce("tp", tp, model.width * one, times)
        else:
            if self._sequence:
                sent.all_reduce("tp", tp, model.width * one, 2 * times)
            between("tp", tp, whole, 2 * pairs * times)
            if not model.has_experts(int(name.partition(".")[2])):
                between("tp", tp, whole, 2 * pairs * times)
                return
            sent.all_reduce("tp", tp, whole, (4 if model.shared_hidden else 2) * times)
            sent.all_reduce("tp", tp, self.tokens * model.top_k * one, times)
            if self._sequence:
                sent.gather("tp", tp, whole, 2 * times)

    def _of_data(self, sent: Traffic, weights: Weights, microbatches: int) -> None:
        """Note the gathers and reductions of ``fully_shard``, of one part."""
        sizes, itemsize = self.sizes, self.itemsize
        for values, copies in (
            (weights.dense, sizes.dp_replicate * sizes.cp * sizes.ep),
            (weights.experts, sizes.dp_replicate * sizes.cp),
        ):
            if not values:
                continue
            whole = sum(rows * row for rows, row in values) * itemsize
            sent.gather("dp_shard", sizes.dp_shard, whole, 2 * microbatches + 1)
            sent.all_reduce("copies", copies, whole / sizes.dp_shard)

    def _of_ep(self, sent: Traffic, times: int) -> None:
        sizes, model = self.sizes, self.config.model
        rows = self.tokens * model.top_k * model.width * self.itemsize
        sent.gather("ep", sizes.ep, rows, 4 * times)
        sent.gather("ep", sizes.ep, model.experts * INDEX, times)
        sent.all_reduce("tokens", sizes.sharing, model.experts * INDEX, times)

    def _of_cp(self, sent: Traffic, times: int) -> None:
        """Note what one layer's attention sends: keys and values, forward and backward."""
        cp, model = self.sizes.cp, self.config.model
        width = model.width // self.sizes.tp
        kv = width // model.heads * model.kv_heads
        one = self.tokens * self.itemsize
        if self.config.parallel.attention == "ring":
            # In backward once more, and their gradients.
            sent.add("cp", cp, 1, 2 * kv * one, 3 * (cp - 1) * times)
            # By a byte ranks tell each other that there is room for the next ones.
            sent.add("cp", cp, 1, 1, 3 * (cp - 2) * times)
        else:
            sent.gather("cp", cp, (width + 2 * kv) * one, 2 * times)
            sent.gather("cp", cp, width * one, 2 * times)


def explain(path: Path, mesh: DeviceMesh) -> str:
    """Return what a run of the config at ``path`` takes on ``mesh``.

    Called by ``meshlib explain estimate``.
    Raises ValueError for what does not fit.
    """
    config = Config(path)
    sizes = Sizes.of(dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)))
    config.check(sizes)
    places = [Estimate(config, sizes, place) for place in range(sizes.pp)]
    lines = [f"memory of a rank, MB{'' if sizes.pp == 1 else ', by its place along pp'}"]
    rows = [["", *(str(place) for place in range(sizes.pp))]] if sizes.pp > 1 else []
    for what in places[0].memory:
        rows.append([f"  {what}", *(_in_mb(one.memory[what]) for one in places)])
    rows.append(["  together", *(_in_mb(sum(one.memory.values())) for one in places)])
    lines += _aligned(rows)
    lines += ["", "sent by a rank in a step"]
    dims = sorted({dim for one in places for dim in one.traffic.calls})
    rows = [["  over", "calls", "MB"]] if dims else [["  nothing"]]
    for dim in dims:
        busiest = max(places, key=lambda one: one.traffic.bytes[dim])
        rows.append(
            [f"  {dim}", str(busiest.traffic.calls[dim]), _in_mb(busiest.traffic.bytes[dim])]
        )
    return "\n".join(lines + _aligned(rows)) + "\n"


def _in_mb(count: float) -> str:
    return f"{count / 1e6:.3f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
