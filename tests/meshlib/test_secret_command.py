"""``meshlib secret``."""

from __future__ import annotations

import pytest

from meshlib._cli import main
from transport._net.secret_file import read_secret


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "meshlib" / "secret"


def test_it_is_written_once_and_never_shown(path, capsys):
    assert main(["secret"]) == 0
    secret = read_secret(path)
    assert main(["secret"]) == 0
    assert read_secret(path) == secret
    assert main(["secret", "--new"]) == 0
    assert read_secret(path) != secret
    out = capsys.readouterr().out
    assert [line.split(" in ")[0] for line in out.splitlines()] == [
        "a new secret is",
        "there is a secret already (--new replaces it)",
        "a new secret is",
    ]
    assert secret.hex() not in out


def test_print_writes_nothing(path, capsys):
    assert main(["secret", "--print"]) == 0
    assert len(bytes.fromhex(capsys.readouterr().out.strip())) == 32
    assert not path.exists()


def test_another_file(path, tmp_path, capsys):
    own = tmp_path / "own"
    assert main(["secret", "--file", str(own)]) == 0
    assert "MESHLIB_SECRET_FILE" in capsys.readouterr().out
    assert main(["secret", "--file", str(own)]) == 2
    assert "--new" in capsys.readouterr().err


def test_one_that_others_can_read(path, capsys):
    assert main(["secret"]) == 0
    path.chmod(0o644)
    assert main(["secret"]) == 2
    assert "chmod 600" in capsys.readouterr().err
