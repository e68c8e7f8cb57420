"""The tables of docs/reference/c10d.md: each name exists, or the table says why it does not.

``tests/pytorch/test_names.py`` compares them with the names of PyTorch.
"""

import importlib
import re

import pytest

from tests.docs.pages import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/reference/c10d.md").read_text().splitlines()
    if line.startswith("| `")
]
COMPARED = [row for row in ROWS if len(row) == 3]


def test_the_tables_are_found():
    assert len(COMPARED) > 100
    assert ["`gather_single`", "`meshlib.gather_single`", ""] in COMPARED


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: row[0].strip("`"))
def test_a_name_is_here_or_left_out_with_a_reason(row):
    name, here, why = row
    if here == "—":
        assert len(why.split()) >= 2, f"{name} is left out without a reason"
        return
    for path in re.findall(r"`((?:meshlib|parallel)(?:\.\w+)+)`", here):
        found = importlib.import_module(path.partition(".")[0])
        for part in path.split(".")[1:]:
            found = getattr(found, part, None) or importlib.import_module(
                f"{found.__name__}.{part}"
            )
