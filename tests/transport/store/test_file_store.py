"""The store in a file: its removal, and the remains of crashed jobs."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transport._errors import DistStoreError, StoreTimeoutError
from transport._store import FileStore
from transport._store.file.log import FileLog, _pack
from transport._waiting.deadline import Deadline

SOON = 30.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    prelude = "import os, sys\nfrom transport._store import FileStore\n"
    command = [sys.executable, "-c", prelude + code, *map(str, arguments)]
    return subprocess.run(command, timeout=30, text=True, capture_output=True, check=False)


class TestLife:
    def test_the_last_user_removes_it(self, path: Path) -> None:
        one, other = FileStore(path), FileStore(path)
        one.set("k", "v")
        one.close()
        assert path.exists()
        assert other.get("k") == b"v"
        other.close()
        assert not path.exists()

    def test_not_before_all_were_there(self, path: Path) -> None:
        first = FileStore(path, 2)
        first.set("k", "v")
        first.close()
        second = FileStore(path, 2)
        assert second.get("k") == b"v"
        second.close()
        assert not path.exists()

    def test_a_clone_is_no_member(self, path: Path) -> None:
        store = FileStore(path, 2)
        store.clone().close()
        store.close()
        assert path.exists()
        FileStore(path, 2).close()
        assert not path.exists()

    def test_a_file_removed_by_hand_goes_on_for_its_users(self, path: Path) -> None:
        with FileStore(path, timeout=SOON) as store:
            path.unlink()
            store.set("k", "v")
            with store.clone() as clone:
                assert clone.get("k") == b"v"
            with FileStore(path) as other:
                assert not other.check(["k"])
            assert not path.exists()

    def test_opened_and_removed_at_once(self, path: Path) -> None:
        """Nobody ends up with a file that was just removed under it."""

        def use(number: int) -> None:
            for i in range(20):
                with FileStore(path, timeout=SOON) as store:
                    store.add("n", 1)
                    store.set(f"{number}/{i}", "v")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(use, range(4)))
        assert not path.exists()

    def test_nothing_is_left(self, path: Path) -> None:
        files = set(os.listdir("/proc/self/fd"))
        for _ in range(3):
            FileStore(path).close()
        assert set(os.listdir("/proc/self/fd")) <= files

    def test_an_unclosed_store_warns(self, path: Path) -> None:
        store = FileStore(path)
        with pytest.warns(ResourceWarning, match="unclosed FileStore"):
            del store

    def test_wrong_places(self, tmp_path: Path) -> None:
        with pytest.raises(DistStoreError, match=r"file_name must be .*/no/such': No such file"):
            FileStore("/no/such")
        with pytest.raises(DistStoreError, match="file_name must be"):
            FileStore(tmp_path)
        stranger = tmp_path / "stranger"
        stranger.write_text("Dear diary")
        with pytest.raises(DistStoreError, match="begins with b'Dear diary'"):
            FileStore(stranger)
        assert stranger.read_text() == "Dear diary"
        with pytest.raises(ValueError, match="world_size must be at least 1"):
            FileStore(tmp_path / "new", 0)
        with pytest.raises(TypeError, match="world_size must be a whole number, got '1'"):
            FileStore(tmp_path / "new", "1")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="file_name must be a path, got int: 3"):
            FileStore(3)  # type: ignore[arg-type]
        assert not (tmp_path / "new").exists()

    def test_only_the_owner_may_read_it(self, path: Path) -> None:
        with FileStore(path):
            assert path.stat().st_mode & 0o777 == 0o600


class TestProcesses:
    def test_two_processes(self, path: Path) -> None:
        with FileStore(path, 2, timeout=SOON) as store:
            code = """
store = FileStore(sys.argv[1], 2, timeout=10)
store.set("answer", b"<" + store.get("question") + b">")
store.close()
"""
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(run, code, path)
                store.set("question", "?")
                assert store.get("answer") == b"<?>"
                assert done.result(SOON).returncode == 0
        assert not path.exists()

    def test_adds_of_several_processes(self, path: Path) -> None:
        code = """
store = FileStore(sys.argv[1], 3, timeout=10)
for _ in range(100):
    store.add("n", 1)
store.close()
"""
        with ThreadPoolExecutor(2) as pool, FileStore(path, 3, timeout=SOON) as store:
            done = [pool.submit(run, code, path) for _ in range(2)]
            for _ in range(100):
                store.add("n", 1)
            assert [each.result(SOON).returncode for each in done] == [0, 0]
            assert store.get("n") == b"300"

    @pytest.mark.parametrize("world_size", [-1, 1, 2])
    def test_what_a_crashed_job_left_is_thrown_away(self, path: Path, world_size: int) -> None:
        code = """
store = FileStore(sys.argv[1], int(sys.argv[2]))
store.set("old", "value")
if os.fork() == 0:  # a child that is left over does not count as a user
    import time
    os.close(1), os.close(2)
    time.sleep(3)
    os._exit(0)
os.kill(os.getpid(), 9)
"""
        assert run(code, path, world_size).returncode == -9
        assert path.exists()
        with FileStore(path, world_size, timeout=SOON) as store:
            assert not store.check(["old"])
            assert store.num_keys() == 0

    def test_a_dead_user_among_living_ones(self, path: Path) -> None:
        with FileStore(path, 2, timeout=SOON) as store:
            store.set("k", "v")
            code = """
store = FileStore(sys.argv[1], 2)
store.set("mine", "v")
os.kill(os.getpid(), 9)
"""
            assert run(code, path).returncode == -9
            assert store.get("mine") == b"v"
        assert not path.exists()

    def test_a_fork_cannot_use_its_parents_store(self, path: Path) -> None:
        code = """
store = FileStore(sys.argv[1])
if os.fork() == 0:
    try:
        store.get("k")
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    store.close()
    os._exit(0)
os.wait()
store.set("k", "v")
assert store.get("k") == b"v"
store.close()
"""
        result = run(code, path)
        assert result.returncode == 0, result.stderr
        assert "DistStoreError" in result.stdout
        assert "cannot be used in its fork" in result.stdout

    def test_a_record_that_was_cut_off(self, path: Path) -> None:
        """As by a process that died, or a disk that was full, in the middle of a write."""
        with FileStore(path, timeout=SOON) as store:
            store.set("k", "v")
            with open(path, "ab") as file:
                file.write(b"\xff\x00\x00\x00\x01half")
            assert store.get("k") == b"v"
            with pytest.raises(StoreTimeoutError):
                store.get("late", timeout=0.05)
            store.set("late", "v")
            with FileStore(path) as other:
                assert other.multi_get(["k", "late"]) == [b"v", b"v"]

    def test_a_file_that_stays_locked(self, path: Path) -> None:
        with FileStore(path, timeout=0.2) as store, ThreadPoolExecutor(1) as pool:
            log = FileLog(store.path, -1, Deadline.after(SOON), beside=store._log)
            with (
                log.locked(Deadline.after(SOON)),
                pytest.raises(DistStoreError, match=r"cannot be locked: .*0.2 s"),
            ):
                pool.submit(store.set, "k", "v").result(SOON)
            log.leave(Deadline.after(SOON))
            store.set("k", "v")

    def test_its_arguments_are_those_of_its_users(self) -> None:
        assert list(inspect.signature(FileStore).parameters) == [
            "file_name",
            "world_size",
            "timeout",
        ]

    def test_waiting_does_not_burn(self, path: Path) -> None:
        with FileStore(path) as store:
            begin = time.thread_time()
            with pytest.raises(StoreTimeoutError):
                store.get("never", timeout=0.5)
            assert time.thread_time() - begin < 0.25


RECORDS = st.lists(
    st.builds(
        _pack,
        st.integers(0, 25) | st.integers(253, 255),
        st.lists(st.binary(max_size=5), max_size=3),
    )
    | st.binary(max_size=20),
    max_size=4,
).map(b"".join)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=RECORDS, ours=st.booleans())
def test_any_file(path: Path, data: bytes, ours: bool) -> None:
    """A file of any content is refused or read, and never hangs or kills."""
    path.write_bytes((b"meshlib FileStore 2\n" if ours else b"") + data)
    try:
        store = FileStore(path, timeout=1.0)
    except DistStoreError as error:
        message = str(error)
    else:
        message = ""
        store.set("k", "v")
        assert store.get("k") == b"v"
        store.close()
    assert not message or "damaged" in message or "begins with" in message
