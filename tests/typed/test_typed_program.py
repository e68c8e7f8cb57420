"""The program whose types are checked runs, too."""

import typed_program

from meshlib.testing import run_ranks


def test_the_typed_program_runs():
    ended = run_ranks(typed_program.main, 2)
    assert ended[0][0] == ended[1][0]
    assert all(losses[1] < losses[0] for _, losses in ended)
