"""The example notebook: its cells in plain Python, and all of it in a kernel of Jupyter's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.meshlib.cells import Cells

pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

NOTEBOOK = Path(__file__).parents[3] / "examples" / "ranks_in_a_notebook.ipynb"


def test_its_cells_run_in_plain_python():
    cell = Cells()
    found = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(one["source"]) for one in found if one["cell_type"] == "code"]
    try:
        for source in sources:
            if not source.startswith("%"):
                cell(source)
    finally:
        if "ranks" in cell.names:
            cell.names["ranks"].close()
    losses = cell.names["losses"]
    assert list(losses) == [0, 1, 2, 3]
    assert max(losses.values()) < 1e-6


@pytest.mark.filterwarnings("default")  # of Jupyter's own
def test_it_runs_in_a_kernel():
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    shown = ["".join(out.get("text", "") for out in c.get("outputs", [])) for c in notebook.cells]
    assert "[rank 0] array([ 1. , -2. ,  0.5])\n" in shown
