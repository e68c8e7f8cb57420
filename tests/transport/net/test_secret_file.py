"""The secret of machines that share a home."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from transport._net.secret_file import (
    home_secret_file,
    read_secret,
    secret_from_environment,
    write_secret,
)


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def test_where_it_is() -> None:
    assert home_secret_file({"HOME": "/h"}) == Path("/h/.config/meshlib/secret")
    assert home_secret_file({"HOME": "/h", "XDG_CONFIG_HOME": "/c"}) == Path("/c/meshlib/secret")
    assert home_secret_file({}) is None


def test_written_and_read(home: dict[str, str]) -> None:
    assert secret_from_environment(home) is None
    path = home_secret_file(home)
    assert path is not None
    secret = write_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret_from_environment(home) == secret
    assert [file.name for file in path.parent.iterdir()] == ["secret"]
    assert write_secret(path) != secret


def test_a_variable_is_stronger(home: dict[str, str], tmp_path: Path) -> None:
    path = home_secret_file(home)
    assert path is not None
    write_secret(path)
    named = write_secret(tmp_path / "other")
    by_file = {**home, "MESHLIB_SECRET_FILE": str(tmp_path / "other")}
    assert secret_from_environment(by_file) == named
    assert secret_from_environment({**by_file, "MESHLIB_SECRET": "00ff"}) == b"\x00\xff"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_one_that_others_can_read_is_refused(home: dict[str, str], mode: int) -> None:
    path = home_secret_file(home)
    assert path is not None
    write_secret(path)
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"mode {mode:04o}.*chmod 600"):
        secret_from_environment(home)


@pytest.mark.parametrize("text", ["", "password", "abcd", "\xff"])
def test_no_secret_in_a_file_that_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    with pytest.raises(ValueError, match="at least 32 hexadecimal") as caught:
        read_secret(path)
    assert "password" not in str(caught.value)
    with pytest.raises(FileNotFoundError):
        secret_from_environment({"MESHLIB_SECRET_FILE": str(tmp_path / "missing")})
