"""The program whose types are checked (``make check``) runs, too."""

import typed_user

from meshlib.testing import run_ranks


def test_the_typed_program_runs():
    ended = run_ranks(typed_user.main, 2)
    assert ended[0][0] == ended[1][0]
    for _, losses in ended:
        assert len(losses) == 2
