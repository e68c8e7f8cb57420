"""``DataParallel`` over several real GPUs of this process."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
import training

from transport._cuda import cuda_driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("default"),  # CuPy's and its libraries' warnings are not ours
]


@pytest.mark.parametrize("outer", [0, 1])
def test_training_ends_where_it_ends_on_the_host(outer: int) -> None:
    if cuda_driver().device_count() < 2:
        pytest.skip("needs two GPUs, one is visible")
    cupy = import_module("cupy")
    expected = training.parameters(training.train(training.make_model(), steps=10))

    def check() -> None:
        got = training.train_on_devices(cupy, [0, 1], outer, cupy.cuda.Device, steps=10)
        training.assert_close([got], expected, 1e-9)

    check()
    # Streams that wait for no other one unless told so.
    streams = []
    for device in (0, 1):
        with cupy.cuda.Device(device):
            streams.append(cupy.cuda.Stream(non_blocking=True))
            streams[-1].use()
    try:
        check()
    finally:
        for device in (0, 1):
            with cupy.cuda.Device(device):
                cupy.cuda.Stream.null.use()
