"""The engine's C protocol under the thread sanitizer: a short form of ``make sanitize``."""

from __future__ import annotations

import shutil
from errno import EFAULT
from pathlib import Path

import pytest

from tests.transport.native import sanitize

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not (shutil.which("gcc") and shutil.which("setarch")), reason="needs gcc and setarch"
    ),
]


def test_calls_and_messages_of_threads_over_one_mapping(tmp_path: Path) -> None:
    program = sanitize.compile_protocol(tmp_path / "threads", *sanitize.THREADS)
    done = sanitize.run(program, "calls", "3", "300", "7")
    assert done.returncode == 0, done.stderr


def test_damaged_memory_crashes_nothing(tmp_path: Path) -> None:
    program = sanitize.compile_protocol(tmp_path / "memory", *sanitize.MEMORY)
    done = sanitize.run(program, "damage", "3", "10", "7")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sanitize.RACES)
def test_a_relaxed_order_is_a_race(tmp_path: Path, name: str) -> None:
    assert sanitize.run(sanitize.relaxed(tmp_path, name), *sanitize.RUN).returncode != 0


def test_no_wake_up_is_lost() -> None:
    assert not sanitize.can_miss(sanitize.orders())


@pytest.mark.parametrize("name", sanitize.HANDSHAKE)
def test_a_weaker_order_loses_a_wake_up(name: str) -> None:
    assert sanitize.can_miss(sanitize.orders() | {name: "acq_rel"})


def test_pages_are_allocated_on_a_kernel_without_populate(tmp_path: Path) -> None:
    """They are there, with what was in them; one that cannot be is an error and no signal."""
    source = Path(__file__).with_name("pages.c")
    program = sanitize.compile_protocol(tmp_path / "pages", program=source)
    done = sanitize.run(program)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "1", "1", "0", "0", str(EFAULT)])
