"""An EtcdStore with several members, lost answers, leases, accounts and TLS."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.net.certificates import Authority
from tests.support.net.etcd_server import EtcdServer, etcd_of
from transport._errors import DistStoreError, StoreSilentError, StoreTimeoutError
from transport._store.etcd.address import EtcdAddress
from transport._store.etcd.store import EtcdStore

SOON = 30.0


@pytest.fixture
def url(etcd: EtcdServer) -> str:
    return etcd.url()


class LossyProxy:
    """Passes requests on to ``target``, and hangs up instead of the answer to each second one."""

    def __init__(self, target: str) -> None:
        host, port = target.split(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.lost = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        number = 0
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client, socket.create_connection(self._target) as server:
                while data := client.recv(1 << 20):
                    server.sendall(data)
                    if not data.endswith(b"}"):
                        continue  # the head alone
                    answer = server.recv(1 << 20)
                    number += 1
                    if number % 2 == 0:
                        self.lost += 1
                        break
                    client.sendall(answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(SOON)


@pytest.fixture
def lossy(etcd: EtcdServer) -> Iterator[LossyProxy]:
    proxy = LossyProxy(etcd.hosts[0])
    yield proxy
    proxy.close()


def test_a_request_whose_answer_is_lost_is_carried_out_once(lossy: LossyProxy) -> None:
    with EtcdStore(f"etcd://127.0.0.1:{lossy.port}/lossy", SOON, tls=None) as store:
        for number in range(1, 6):
            assert store.add("n", 1) == number
            store.append("log", f"{number}")
            store.queue_push("queue", f"{number}")
        assert store.get("log") == b"12345"
        assert [store.queue_pop("queue") for _ in range(5)] == [b"1", b"2", b"3", b"4", b"5"]
        assert store.compare_set("key", "", "mine") == b"mine"
        assert store.delete_key("n")
        assert lossy.lost > 10
        store.delete_key("log")
        store.delete_key("key")


def test_a_member_that_is_silent_or_gone_is_left_for_the_next(tmp_path: Path) -> None:
    with (
        etcd_of(tmp_path, members=3) as cluster,
        EtcdStore(cluster.url(), SOON, tls=None) as store,
        ThreadPoolExecutor(1) as pool,
    ):
        assert store.add("n", 1) == 1
        waiting = pool.submit(store.get, "late")
        cluster.kill(0)
        assert store.add("n", 1) == 2
        cluster.start(0)
        cluster.wait(0)
        cluster.signal(1, signal.SIGSTOP)
        assert store.add("n", 1) == 3
        store.set("late", "come")
        assert waiting.result(SOON) == b"come"
        cluster.kill(1)
        cluster.kill(2)  # one of three is not a majority
        with pytest.raises(DistStoreError, match="no answer to reading 'n' within 2 s: 127"):
            store.with_grace(2.0).add("n", 1)


def test_a_silent_member_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with EtcdStore(f"etcd://127.0.0.1:{port}/x", 0.2, tls=None) as store:
            words = f"no answer to setting 'k' within 0.2 s: 127.0.0.1:{port}: silent for"
            with pytest.raises(StoreSilentError, match=words):
                store.set("k", "v")


def test_keys_go_with_their_lease(url: str) -> None:
    with EtcdStore(url, SOON, tls=None) as root:
        lease = root.grant(60)
        with root.leased(lease, "job") as job, EtcdStore(job.url, SOON, tls=None) as rank:
            rank.add("n", 1)
            rank.append("log", "x")
            rank.queue_push("queue", "x")
            job.renew()
            job.revoke()
            assert rank.list_keys() == []
            assert rank.queue_len("queue") == 0
            with pytest.raises(DistStoreError, match="the lease has ended, and with it all keys"):
                job.renew()
            with pytest.raises(
                DistStoreError, match=r"refused setting 'k'.*lease not found: the lease"
            ):
                rank.set("k", "v")


def test_a_log_that_is_replaced_is_read_anew(url: str) -> None:
    with EtcdStore(url, SOON, tls=None) as store, store.clone() as writer:
        writer.append("log", "abc")
        assert store.tail("log", 0) == b"abc"
        writer.append("log", "de")
        assert store.tail("log", 3) == b"de"
        writer.set("log", "0123456")
        assert store.tail("log", 5) == b"56"
        writer.delete_key("log")
        with pytest.raises(StoreTimeoutError, match="more at the end of key 'log'"):
            store.tail("log", 7, timeout=0.05)
        writer.append("log", "01234567")
        assert store.tail("log", 7) == b"7"
        writer.delete_key("log")


def test_a_value_above_etcd_s_limit_names_key_and_reason(tmp_path: Path) -> None:
    with etcd_of(tmp_path) as cluster, EtcdStore(cluster.url(), SOON, tls=None) as store:
        with pytest.raises(DistStoreError, match=r"refused setting 'big'.*(too large|larger than)"):
            store.set("big", bytes(2 << 20))
        store.set("big", "small")


def test_another_program_is_no_etcd() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\noops")

        served = pool.submit(answer)
        url = f"etcd://127.0.0.1:{listener.getsockname()[1]}/x"
        words = r"404 and b'oops': expected etcd 3\.4"
        with EtcdStore(url, SOON, tls=None) as store, pytest.raises(DistStoreError, match=words):
            store.set("k", "v")
        served.result(SOON)


def post(host: str, path: str, **body: object) -> None:
    connection = http.client.HTTPConnection(host, timeout=SOON)
    connection.request("POST", f"/v3/auth/{path}", json.dumps(body))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status == 200, text


def test_a_user_with_a_password(tmp_path: Path) -> None:
    with etcd_of(tmp_path, options=("--auth-token-ttl", "2")) as cluster:
        (host,) = cluster.hosts
        for name in ("root", "mesh"):
            post(host, "user/add", name=name, password="p:@/w")
            post(host, "role/add", name=name)
            post(host, "user/grant", user=name, role=name)
        begin, end = (b64encode(key).decode() for key in (b"mine/", b"mine0"))
        permission = {"permType": "READWRITE", "key": begin, "range_end": end}
        post(host, "role/grant", name="mesh", perm=permission)
        post(host, "enable")
        with EtcdStore(f"etcd://mesh:p%3A%40%2Fw@{host}/mine", SOON, tls=None) as store:
            assert "p:@" not in repr(store)
            assert "p%3A" not in repr(store)
            store.set("k", "v")
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(store.get, "late")
                with EtcdStore(store.url, SOON, tls=None) as other:
                    other.set("late", "come")
                assert waiting.result(SOON) == b"come"
            store._client._token = "ended.7"
            assert store.get("k") == b"v"
        refusals = {
            f"etcd://mesh:wrong@{host}/mine": "refused the password of user 'mesh'",
            f"etcd://mesh:p%3A%40%2Fw@{host}/other": r"refused setting 'k'.*permission denied",
        }
        for url, words in refusals.items():
            with (
                EtcdStore(url, SOON, tls=None) as other,
                pytest.raises(DistStoreError, match=words),
            ):
                other.set("k", "v")


def test_inside_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    theirs, ours = authority.issue("etcd"), authority.issue("rank")
    options = ("--cert-file", theirs.cert, "--key-file", theirs.key)
    options += ("--client-cert-auth", "--trusted-ca-file", theirs.ca)
    with etcd_of(tmp_path, options=tuple(map(str, options)), scheme="https") as cluster:
        url = cluster.url()
        with EtcdStore(url, SOON, tls=ours.tls()) as store, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "late")
            store.set("late", bytes(100_000))
            assert waiting.result(SOON) == bytes(100_000)
        with EtcdStore(url, 1.0, tls=None) as plain, pytest.raises(DistStoreError):
            plain.set("k", "v")


def test_a_wrong_url_is_refused_without_its_password() -> None:
    with pytest.raises(ValueError, match="a URL with the scheme 'https'") as refused:
        EtcdStore("https://me:opensesame@h:1/x")
    assert "opensesame" not in str(refused.value)


@pytest.mark.parametrize("host", ["h", "10.0.0.1", "[::1]"])
def test_urls_are_what_they_were(host: str) -> None:
    url = f"etcd://u%20:p%40@{host}:1,{host}:2/a/b?lease=7"
    address = EtcdAddress.parse(url)
    assert (address.user, address.password, address.lease) == ("u ", "p@", 7)
    assert [port for _, port in address.members] == [1, 2]
    assert address.url == url
    assert address.shown == f"etcd://{host}:1,{host}:2/a/b"
