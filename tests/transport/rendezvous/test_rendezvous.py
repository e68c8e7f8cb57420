"""How ranks find each other over ``tcp://`` and ``file://``, and what is no way."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.transport.rendezvous_ranks import (
    SOON,
    check_together,
    meet,
    meeting,
    run_processes,
)
from transport._errors import (
    AuthenticationError,
    DistError,
    DistNetworkError,
    DistStoreError,
    StorePlaceError,
    StoreTimeoutError,
)
from transport._rendezvous import register_rendezvous_handler, rendezvous
from transport._rendezvous import registry as registry_module
from transport._rendezvous.request import RendezvousRequest, with_place
from transport._store import FileStore, HashStore


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "rank", "world_size", "expected"),
        [
            ("env://", -1, -1, "env://"),
            ("env://", 1, 2, "env://?rank=1&world_size=2"),
            ("tcp://[::1]:80", 0, 1, "tcp://[::1]:80?rank=0&world_size=1"),
            ("tcp://h:80?rank=3", -1, 4, "tcp://h:80?rank=3&world_size=4"),
            ("tcp://h:80?rank=3", 3, 4, "tcp://h:80?rank=3&world_size=4"),
            ("file:///a/b%20c", 0, -1, "file:///a/b%20c?rank=0"),
        ],
    )
    def test_places_go_into_the_query(
        self, url: str, rank: int, world_size: int, expected: str
    ) -> None:
        assert with_place(url, rank, world_size) == expected

    def test_parts(self) -> None:
        address = RendezvousRequest.parse(
            "tcp://[ff15::1]:23456?rank=1&world_size=4", 1.0, "", None
        )
        assert (address.host, address.port, address.rank, address.world_size) == (
            "ff15::1",
            23456,
            1,
            4,
        )
        assert RendezvousRequest.parse("file:///a/b%20c", 1.0, "", None).path == "/a/b c"

    @pytest.mark.parametrize(
        ("url", "rank", "world_size", "message"),
        [
            ("carrier-pigeon://x", 0, 1, r"'carrier-pigeon'.*one of env://, file://, .*tcp://"),
            ("/a/path", 0, 1, "scheme ''"),
            ("tcp://h", 0, 1, "must be tcp://host:port, got 'tcp://h"),
            ("tcp://:80", 0, 1, "must be tcp://host:port"),
            ("tcp://h:0", 0, 1, "must be tcp://host:port"),
            ("tcp://h:99999", 0, 1, "is not a URL: Port out of range"),
            ("tcp://h:80", -1, 2, "rank is missing"),
            ("tcp://h:80", 1, -1, "world_size is missing"),
            ("tcp://h:80", 0, 0, "world_size must be at least 1, got 0"),
            ("tcp://h:80", 2, 2, "rank must be less than world_size=2, got 2"),
            ("tcp://h:80", -2, 2, "rank must be >= 0, or -1 if not given; got -2"),
            ("tcp://h:80?rank=1", 0, 2, "rank=0 contradicts rank=1 in"),
            ("tcp://h:80?rank=one", -1, 2, "rank must be a whole number >= 0, got 'one'"),
            ("tcp://[::1:80", 0, 1, "Invalid IPv6 URL"),
            ("tcp://224.1.1.1:80", 5, 5, "rank must be less than world_size=5"),
            ("tcp://224.1.1.1:80", -1, -1, "world_size is missing"),
            ("file:relative", 0, 1, "must be file:///absolute/path"),
            ("file://host/path", 0, 1, "must be file:///absolute/path"),
            ("file:///path", 0, -1, "world_size is missing"),
        ],
    )
    def test_wrong_ones(self, url: str, rank: int, world_size: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            meet(url, rank, world_size)

    def test_no_url(self) -> None:
        with pytest.raises(TypeError, match="url must be a str, got int: 3"):
            rendezvous(3)  # type: ignore[arg-type]

    def test_one_rendezvous_a_call(self, tmp_path: Path) -> None:
        found = rendezvous(f"file://{tmp_path}/file", 0, 1)
        next(found)[0].close()
        with pytest.raises(DistError, match="expected no second"):
            next(found)


class TestHandlers:
    def test_registered_ones_are_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry_module, "_HANDLERS", dict(registry_module._HANDLERS))
        seen = []

        def handler(url: str, **others: object):
            seen.append((url, others))
            yield HashStore(), 1, 2

        register_rendezvous_handler("mine", handler)
        assert meet("mine://x", 1, 2, timeout=3, colour="red")[1:] == (1, 2)
        url, others = seen[0]
        assert url == "mine://x?rank=1&world_size=2"
        assert others["timeout"] == 3.0
        assert others["colour"] == "red"
        with pytest.raises(ValueError, match="'mine' is already registered"):
            register_rendezvous_handler("mine", handler)
        with pytest.raises(ValueError, match="'tcp' is already registered"):
            register_rendezvous_handler("tcp", handler)
        for scheme in (3, "", "two words", "a://"):
            with pytest.raises(ValueError, match="scheme must be a URL's scheme such as 'tcp'"):
                register_rendezvous_handler(scheme, handler)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="handler must be callable, got int: 3"):
            register_rendezvous_handler("other", 3)  # type: ignore[arg-type]
        register_rendezvous_handler("Other", handler)
        assert meet("other://x", 1, 2)[1:] == (1, 2)


class TestTcp:
    @pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
    def test_ranks_meet(self, host: str, free_port: int) -> None:
        with meeting(f"tcp://{host}:{free_port}", range(4)) as met:
            check_together(met, range(4))
            assert [rank for _, rank, _ in met] == [0, 1, 2, 3]

    def test_places_in_the_query(self, free_port: int) -> None:
        url = f"tcp://127.0.0.1:{free_port}?world_size=2"
        with ThreadPoolExecutor(2) as pool:
            met = list(pool.map(lambda rank: meet(f"{url}&rank={rank}"), range(2)))
        check_together(met, range(2))
        for store, _, _ in met[::-1]:
            store.close()

    def test_groups_are_apart_on_one_port(self, free_port: int) -> None:
        url = f"tcp://127.0.0.1:{free_port}"
        with (
            meeting(url, range(2), group_name="one") as one,
            meeting(url, range(3), group_name="two") as two,
        ):
            one[0][0].set("whose", "one's")
            two[0][0].set("whose", "two's")
            assert one[1][0].get("whose") == b"one's"
            assert two[1][0].get("whose") == b"two's"

    def test_jobs_one_after_the_other_on_one_port(self, free_port: int) -> None:
        """A rank that is early for the next job does not join the former one."""
        url = f"tcp://127.0.0.1:{free_port}"
        with ThreadPoolExecutor(1) as pool:
            with meeting(url, range(2)) as met:
                met[0][0].set("job", "first")
                met[1][0].close()
                early = pool.submit(meet, url, 1, 2)
                time.sleep(0.2)
                assert not early.done()
            last, _, _ = meet(url, 0, 2)
            store = early.result(SOON)[0]
            last.set("job", "second")
            assert store.get("job") == b"second"
            store.close()
            last.close()

    def test_two_processes_with_one_rank(
        self, monkeypatch: pytest.MonkeyPatch, free_port: int
    ) -> None:
        monkeypatch.setattr("transport._rendezvous.rank_claims._STRANGER_SECONDS", 0.2)
        url = f"tcp://127.0.0.1:{free_port}"
        with meeting(url, range(2)):
            monkeypatch.setattr("os.getpid", lambda real=threading.get_native_id: real() + 10**6)
            with pytest.raises(
                DistStoreError, match=r"no rank within .* rank 1 has already joined"
            ):
                meet(url, 1, 2)
            monkeypatch.undo()

    def test_nobody_serves(self, free_port: int) -> None:
        with pytest.raises(DistNetworkError, match=r"127\.0\.0\.1:.*ECONNREFUSED"):
            meet(f"tcp://127.0.0.1:{free_port}", 1, 2, timeout=0.2)

    def test_another_secret(self, free_port: int) -> None:
        url = f"tcp://127.0.0.1:{free_port}"
        store, _, _ = meet(url, 0, 2, secret=b"one")
        with pytest.raises(AuthenticationError, match="another secret"):
            meet(url, 1, 2, secret=b"other")
        store.close()

    def test_the_stores_timeout(self, free_port: int) -> None:
        store, _, _ = meet(f"tcp://127.0.0.1:{free_port}", 0, 1, timeout=12.5)
        assert store.timeout.total_seconds() == 12.5
        store.close()

    @pytest.mark.processes
    def test_processes(self, free_port: int) -> None:
        url = f"tcp://localhost:{free_port}"
        assert run_processes([(url, rank, 3) for rank in range(3)]) == ["0 3", "1 3", "2 3"]


class TestFile:
    def test_ranks_are_assigned(self, tmp_path: Path) -> None:
        with meeting(f"file://{tmp_path}/file", [-1] * 5) as met:
            check_together(met, range(5))
        assert not list(tmp_path.iterdir())

    def test_ranks_are_given(self, tmp_path: Path) -> None:
        with meeting(f"file://{tmp_path}/a%20file", [2, 0, 1]) as met:
            assert [rank for _, rank, _ in met] == [2, 0, 1]
            check_together(met, range(3))
            assert (tmp_path / "a file").exists()
        assert not list(tmp_path.iterdir())

    def test_jobs_one_after_the_other_in_one_file(self, tmp_path: Path) -> None:
        for _ in range(3):
            with meeting(f"file://{tmp_path}/file", [-1] * 3) as met:
                assert not met[0][0].check(["mark"])
                check_together(met, range(3))
                met[0][0].set("mark", "")
        assert not list(tmp_path.iterdir())

    def test_one_too_many(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        url = f"file://{tmp_path}/file"
        with (
            meeting(url, [-1] * 2),
            pytest.raises(DistStoreError, match="world_size=2 processes have already joined"),
        ):
            meet(url, -1, 2, timeout=0.2)

    def test_a_stale_file(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        crashed = FileStore(path, 2)
        crashed.set("rendezvous/rank/0", "crashed")
        crashed.set("old", "")
        crashed._log.close()  # as the end of its process does
        with meeting(f"file://{path}", [0, 1]) as met:
            assert not met[0][0].check(["old"])
            check_together(met, range(2))
        assert not list(tmp_path.iterdir())

    def test_a_missing_directory(self) -> None:
        with pytest.raises(DistStoreError, match=r"file_name must be .*'/no/such': No such file"):
            meet("file:///no/such", 0, 1, timeout=0.1)

    def test_a_place_that_never_will_be_is_not_waited_for(self, tmp_path: Path) -> None:
        with pytest.raises(StorePlaceError, match="No such file"):
            meet(f"file://{tmp_path}/no/such", 0, 1, timeout=SOON)
        with pytest.raises(StorePlaceError, match="Is a directory"):
            meet(f"file://{tmp_path}", 0, 1, timeout=SOON)
        (tmp_path / "diary").write_text("Dear diary")
        with pytest.raises(StorePlaceError, match="begins with b'Dear diary'"):
            meet(f"file://{tmp_path}/diary", 0, 1, timeout=SOON)

    def test_groups_are_apart_in_one_file(self, tmp_path: Path) -> None:
        url = f"file://{tmp_path}/file"
        with (
            meeting(url, [-1] * 2, group_name="one") as one,
            meeting(url, [-1] * 2, group_name="two") as two,
        ):
            check_together(one, range(2))
            check_together(two, range(2))
            one[0][0].set("mine", "")
            assert not two[0][0].check(["mine"])

    @pytest.mark.processes
    def test_processes(self, tmp_path: Path) -> None:
        url = f"file://{tmp_path}/file"
        assert run_processes([(url, -1, 3)] * 3) == ["0 3", "1 3", "2 3"]
        assert not list(tmp_path.iterdir())


def test_a_missing_rank(free_port: int) -> None:
    store, _, _ = meet(f"tcp://127.0.0.1:{free_port}", 0, 2)
    store.set_timeout(0.1)
    with pytest.raises(StoreTimeoutError, match=r"rank 1.*TCPStore|TCPStore.*rank 1"):
        store.wait(["rank 1"])
    store.close()
