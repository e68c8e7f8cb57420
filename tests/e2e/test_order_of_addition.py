"""One bit pattern of sums among processes: on one host and on several, with what numbers are drawn.

Among threads see ``tests/transport/test_one_bit_pattern.py``.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import ml_dtypes  # noqa: F401 (bfloat16 by name)
import numpy as np
import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.processes

SUMS = (PROGRAMS / "sums.py").read_text()


def tree(count: int, dtype: str, op: str, size: int) -> str:
    """The sum as docs/inside/algorithms.md has it, by NumPy."""
    kind = np.dtype(dtype)
    inputs = [
        np.random.default_rng(rank).standard_normal(count).astype(kind) for rank in range(size)
    ]
    values = [each.astype(np.float32) if kind.itemsize == 2 else each for each in inputs]
    add = np.multiply if op == "PRODUCT" else np.add
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [add(*pair) if len(pair) > 1 else pair[0] for pair in pairs]
    total = values[0] / values[0].dtype.type(size) if op == "AVG" else values[0]
    return hashlib.sha256(total.astype(kind).tobytes()).hexdigest()


def draw_sums(chance: random.Random) -> list[tuple[int, str, str]]:
    kinds = ["float32", "float64", "float16", "bfloat16"]
    counts = [chance.randint(1, 40), chance.randint(1000, 20_000), chance.randint(200_000, 600_000)]
    return [(n, chance.choice(kinds), chance.choice(["SUM", "AVG", "PRODUCT"])) for n in counts]


@pytest.mark.netns
@pytest.mark.parametrize("network", [2, 3, 4], indirect=True)
def test_hosts_and_processes_add_by_one_tree(meshrun, network, start_hosts):
    chance = random.Random(len(network.names))
    cases, ranks = draw_sums(chance), chance.choice([1, 2, 3]) if len(network.names) < 4 else 1
    backends = ["auto", "tcp"]
    arguments = [json.dumps(cases), json.dumps(backends)]
    results = [meshrun.finish(host) for host in start_hosts(SUMS, arguments=arguments, ranks=ranks)]
    assert [(result.code, result.err) for result in results] == [(0, "")] * len(results)
    check_sums(
        [line for result in results for line in result.out.splitlines()], cases, len(backends)
    )


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("compiled", [True, False])
def test_processes_of_one_host_add_by_the_same_tree(meshrun, size, compiled):
    """With the compiled engine, through shared memory and TCP, and without it by TCP."""
    cases = draw_sums(random.Random(size))
    backends = ["auto", "tcp", "shm"] if compiled else ["auto", "tcp"]
    arguments = [json.dumps(cases), json.dumps(backends)]
    env = {} if compiled else {"MESHLIB_NATIVE": "0"}
    result = meshrun.run(f"--nproc-per-node={size}", meshrun.script(SUMS), *arguments, env=env)
    assert result.code == 0, result
    check_sums(result.out.splitlines(), cases, len(backends))


def check_sums(lines: list[str], cases: list[tuple[int, str, str]], times: int) -> None:
    found = dict(json.loads(line) for line in lines)
    expected = [tree(*case, len(found)) for case in cases] * times
    assert all(found[rank] == expected for rank in range(len(found))), cases
