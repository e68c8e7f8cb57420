"""The memory and the calls of one rank's step on a mesh, run here with fake other ranks."""

from __future__ import annotations

import argparse
import runpy
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from meshlib._explain.mesh import add_world_size, explain_mesh, needed_ranks, read_mesh
from meshlib._job.current import current_world
from meshlib._job.starting.init import destroy_process_group, init_process_group
from meshlib._mesh.device_mesh import DeviceMesh
from meshlib._plain_text import columns
from meshlib._recording.recorder import Record
from meshlib._trace import GroupInfo

Step = Callable[[], Mapping[str, Any]]
"""A function that does one step, and returns the arrays that this rank then holds, by purpose."""
MakeStep = Callable[[Path, DeviceMesh], Step]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the program, the mesh and the rank."""
    parser.add_argument(
        "program",
        type=Path,
        metavar="PROGRAM",
        help="a file, or a folder with a __main__.py: its make_step(FILE, mesh) returns a function"
        " that does one step and returns a dict of the arrays that the rank holds",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the program's config")
    parser.add_argument(
        "--over", metavar="DIMS", help="the mesh: dp=2,tp=2 (default: FILE's [mesh] table)"
    )
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank (default: 0)")
    add_world_size(parser)


def explain(given: argparse.Namespace) -> str:
    """Return the rank's place in the mesh, and the memory and calls of the program's step."""
    config = read_mesh(given.over or str(given.file))
    size = needed_ranks(config, given.world_size)
    place = explain_mesh(config, size, given.rank)
    if not given.file.is_file():
        raise ValueError(f"{given.file} is not a file; expected the program's config")
    make_step = _make_step_of(given.program)
    init_process_group("fake", rank=given.rank, world_size=size)
    try:
        return f"{place}\n{estimate(make_step, given.file, config.mesh_for(size))}"
    finally:
        destroy_process_group()


def _make_step_of(program: Path) -> MakeStep:
    """Return the function ``make_step`` of a program; raise ValueError if it has none."""
    # As Python does for scripts.
    sys.path.insert(0, str(program if program.is_dir() else program.parent))
    found = runpy.run_path(str(program), run_name="meshlib._explain").get("make_step")
    if not callable(found):
        raise ValueError(f"{program} has no function make_step(file, mesh)")
    return cast("MakeStep", found)


@dataclass(frozen=True)
class Estimate:
    """The memory of a step by purpose, in bytes, and the rank's calls."""

    memory: Mapping[str, int]
    calls: Sequence[CountedCalls]

    def __str__(self) -> str:
        memory = {**self.memory, "together": sum(self.memory.values())}
        lines = columns([(f"  {name}", _in_mb(size)) for name, size in memory.items()], [1])
        rows = [("  over", "call", "calls", "MB", "sent MB")]
        for row in self.calls:
            sizes = _in_mb(row.nbytes), _in_mb(row.sent)
            rows.append((f"  {row.over}", row.kind, str(row.calls), *sizes))
        calls = columns(rows, [2, 3, 4])
        return "\n".join(["memory, MB", *lines, "", "calls of a step", *calls]) + "\n"


def estimate(make_step: MakeStep, file: Path, mesh: DeviceMesh) -> Estimate:
    """Run two steps on this rank, and return the costs of the second one.

    The first step compiles, and exchanges the shapes of activations. Raises ValueError for a step
    that does not return a dict.
    """
    recorder = current_world().recorder
    memory = _JaxMemory() if "jax" in sys.modules else _PythonMemory()
    step = make_step(file, mesh)
    step()
    records, recorder.annotate = recorder.follow(), memory.at_call
    held = step()
    recorder.unfollow(records)
    recorder.annotate = None
    if not isinstance(held, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the step returned {held!r}; expected a dict of the rank's arrays")
    sizes = {name: sum(x.nbytes for x in memory.arrays_in(held[name])) for name in held}
    sizes |= memory.besides(sum(sizes.values()))
    return Estimate(sizes, count_calls(records, current_world().groups(), mesh))


def _in_mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3f}"


# ---------------------------------------------------------------------- calls


@dataclass
class CountedCalls:
    """This rank's calls of one kind over some dims: the bytes of its arrays, and bytes sent."""

    over: str
    kind: str
    calls: int = 0
    nbytes: int = 0
    sent: float = 0.0


def count_calls(
    records: Iterable[Record], groups: Iterable[GroupInfo], mesh: DeviceMesh
) -> list[CountedCalls]:
    """Sum ``records`` by the dims of ``mesh`` along which the group's ranks differ, and by kind.

    Calls on groups of one rank are omitted.
    """
    known = {group.id: (_dims_of(group.ranks, mesh), len(group.ranks)) for group in groups}
    found: dict[tuple[str, str], CountedCalls] = {}
    for record in records:
        over, ranks = known.get(record.group, ("destroyed groups", 2))
        if ranks > 1:
            row = found.setdefault((over, record.kind), CountedCalls(over, record.kind))
            row.calls += 1
            row.nbytes += record.nbytes
            row.sent += _sent_share(record.kind, ranks) * record.nbytes
    return sorted(found.values(), key=lambda row: (-row.sent, row.over, row.kind))


def _dims_of(ranks: Iterable[int], mesh: DeviceMesh) -> str:
    places = zip(*(mesh.coordinate_of(rank) or () for rank in ranks), strict=True)
    names = zip(mesh.mesh_dim_names or (), places, strict=True)
    return " × ".join(name for name, along in names if len(set(along)) > 1)


def _sent_share(kind: str, ranks: int) -> float:
    """Return the share of its array that a rank sends with bandwidth-optimal algorithms."""
    others = (ranks - 1) / ranks
    shares = {"all_gather": others, "reduce_scatter": others, "all_reduce": 2 * others, "recv": 0}
    return shares.get(kind, 1)


# ---------------------------------------------------------------------- memory


class _JaxMemory:
    """JAX's live arrays, measured at each call, and XLA's statistics of its programs."""

    def __init__(self) -> None:
        import jax

        self._jax: Any = jax
        self._most = 0

    def at_call(self, _name: str) -> AbstractContextManager[None]:
        """Measure the live memory; ``FlightRecorder.annotate`` runs it at each call."""
        alive = {x.unsafe_buffer_pointer(): x.nbytes for x in self._jax.live_arrays()}
        self._most = max(self._most, sum(alive.values()))
        return nullcontext()

    def arrays_in(self, tree: Any) -> list[Any]:
        return [leaf for leaf in self._jax.tree.leaves(tree) if hasattr(leaf, "nbytes")]

    def besides(self, held: int) -> dict[str, int]:
        """Return the bytes of the step besides those ``held`` at its end, by what they are."""
        from jax.extend.backend import get_backend

        self._jax.effects_barrier()
        self.at_call("")
        programs = [one.get_compiled_memory_stats() for one in get_backend().live_executables()]
        results, temporaries = max(
            (
                (p.output_size_in_bytes - p.alias_size_in_bytes, p.temp_size_in_bytes)
                for p in programs
            ),
            key=sum,
            default=(0, 0),
        )
        return {
            "activations": max(0, self._most - held),
            "XLA's results": results,
            "XLA's temporaries": temporaries,
        }


class _PythonMemory:
    """All memory that Python allocates from now on, including NumPy's arrays."""

    def __init__(self) -> None:
        tracemalloc.start()

    def at_call(self, _name: str) -> AbstractContextManager[None]:
        """Do nothing: ``tracemalloc`` counts all memory."""
        return nullcontext()

    def arrays_in(self, tree: Any) -> Iterator[Any]:
        if hasattr(tree, "nbytes"):
            yield tree
        elif isinstance(tree, Mapping | list | tuple):
            inner = tree.values() if isinstance(tree, Mapping) else tree
            for one in inner:
                yield from self.arrays_in(one)

    def besides(self, held: int) -> dict[str, int]:
        """Return the bytes of the step besides those ``held`` at its end, by what they are."""
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return {"activations": max(0, most - held)}
