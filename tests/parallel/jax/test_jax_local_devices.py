"""``DataParallel`` over several CPU devices of one process, which has to be started with them."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

PROGRAMS = Path(__file__).parent / "programs"

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

from parallel.jax import DataParallel  # noqa: E402

PROGRAM = (PROGRAMS / "local_devices.py").read_text()


def test_equal_to_one_device():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_bad_use():
    with pytest.raises(ValueError, match="devices is empty"):
        DataParallel(lambda p, x: x, [])
    with pytest.raises(ValueError, match=r"devices has .* twice"):
        DataParallel(lambda p, x: x, jax.local_devices()[:1] * 2)
    with pytest.raises(TypeError, match="devices must be a sequence of JAX's devices, got 4"):
        DataParallel(lambda p, x: x, 4)
    with pytest.raises(ValueError, match="dim must be at least 0, got -1"):
        DataParallel(lambda p, x: x, dim=-1)
    both = DataParallel(lambda p, x, y: x)
    with pytest.raises(ValueError, match=re.escape("have [2, 3] samples along dim 0")):
        both(0.0, np.ones((2, 5)), np.ones(3))
