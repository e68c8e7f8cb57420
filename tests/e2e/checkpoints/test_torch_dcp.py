"""examples/convert_torch_dcp.py, where torch is installed: to DCP and back gives the same state."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshlib.checkpoint import load, save

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
EXAMPLE = Path(__file__).parents[3] / "examples" / "convert_torch_dcp.py"
STATE = {
    "model": {"0.weight": np.arange(12.0).reshape(3, 4), "bias": np.ones(3, "f4")},
    "optimizer": {"state": {"bias": {"step": 3}}, "groups": [{"lr": 0.5}]},
}


def convert(*arguments):
    subprocess.run([sys.executable, EXAMPLE, *map(str, arguments)], check=True, timeout=50)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_there_and_back(tmp_path):
    save(tmp_path / "ours", STATE, step=2)
    convert("to-dcp", tmp_path / "ours", tmp_path / "dcp")
    tensors = {"model": {"0.weight": torch.zeros(3, 4, dtype=torch.float64)}}
    dcp.load(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    np.testing.assert_array_equal(tensors["model"]["0.weight"].numpy(), STATE["model"]["0.weight"])
    convert("from-dcp", tmp_path / "dcp", tmp_path / "back", "--step", 7)
    back = load(tmp_path / "back", STATE, step=7)
    assert back["optimizer"] == STATE["optimizer"]
    for name, array in STATE["model"].items():
        assert back["model"][name].dtype == array.dtype
        np.testing.assert_array_equal(back["model"][name], array)
