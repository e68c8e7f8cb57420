"""The page over HTTP, of a live job whose ranks are threads."""

import http.client
import json
import re
import shutil
import subprocess
import threading
import time

import numpy as np
import pytest

import meshlib as dist
from meshlib._job.current import current_world
from meshlib._monitor.server import PageServer, page
from meshlib._monitor.view import JobView
from meshlib._monitor.watch import JobWatch
from meshlib.testing import run_ranks
from transport._errors import DistStoreError, StoreTimeoutError
from transport._store import HashStore

SECONDS = 30.0


def until(what):
    """Return what ``what()`` returns as soon as it is true."""
    end = time.monotonic() + SECONDS
    while not (found := what()):
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.01)
    return found


def whole_store():
    store = current_world().store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.clone()


class Page:
    """Requests to the page of ``server``."""

    def __init__(self, server):
        self.server = server

    def request(self, path, method="GET", body=None, **headers):
        """Return the status and the body; ``headers`` have _ for -."""
        given = {"Authorization": f"Bearer {self.server.token}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=SECONDS)
        try:
            connection.putrequest(method, path, skip_host="Host" in given)
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name, value)
            data = None if body is None else body.encode()
            if data is not None:
                connection.putheader("Content-Length", str(len(data)))
            connection.endheaders(data)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def job(self):
        status, text = self.request("/job")
        assert status == 200
        return json.loads(text)


def test_a_live_job_is_seen_and_asked():
    before = set(threading.enumerate())
    begun, done = threading.Event(), threading.Event()

    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh["tp"].all_reduce(np.ones(100))
        if dist.get_rank() == 3:
            waits_in_the_users_code()
            mesh["dp"].all_reduce(np.ones(10))
            return None
        if dist.get_rank() == 0:
            found = look(whole_store())
            done.set()
        else:
            found = None
        mesh["dp"].all_reduce(np.ones(10))
        return found

    def waits_in_the_users_code():
        begun.set()
        assert done.wait(SECONDS)

    def look(store):
        watch = JobWatch(store, JobView("train.py"), every=0.05)
        server = PageServer(watch)
        try:
            watch.start()
            page = Page(server)

            def seen():
                ranks = page.job()["ranks"]
                awaited = [call["waiting_for"] for rank in ranks[1:2] for call in rank["calls"]]
                there = len(ranks) == 4 and all(rank["mesh"] for rank in ranks)
                return ranks if there and awaited == [3] else None

            def up():
                status, text = page.request("/metrics")
                assert status == 200
                return 'meshlib_rank_up{rank="3"} 1' in text.splitlines()

            ranks = until(seen)
            until(up)
            assert begun.wait(SECONDS)
            answers = [
                page.request("/stacks", "POST", json.dumps({"rank": rank})) for rank in (3, 9)
            ]
            return ranks, *answers
        finally:
            server.close()
            watch.close()

    ranks, stacks, stranger = run_ranks(program, 4)[0]
    assert [[one["index"] for one in rank["mesh"]] for rank in ranks] == [
        [0, 0],
        [0, 1],
        [1, 0],
        [1, 1],
    ]
    (call,) = ranks[1]["calls"]
    assert call["group"] == "dp"
    assert call["site"].startswith(__file__)
    assert stacks[0] == 200
    assert "waits_in_the_users_code" in "\n".join(json.loads(stacks[1])["main"])
    assert (stranger[0], "no rank 9" in stranger[1]) == (404, True)
    left = {t.name for t in set(threading.enumerate()) - before}
    assert not left & {"meshlib-page", "meshlib-monitor"}


def test_ranks_post_no_more_when_nobody_watches():
    gone = threading.Event()

    def program():
        if dist.get_rank() == 0:
            watch = JobWatch(whole_store(), JobView(), every=0.05)

            def all_there():
                watch.look()
                return watch.read(lambda view: len(view.there(time.time())) == 2)

            until(all_there)
            assert posting()
            watch.close()
            until(lambda: not posting())
            gone.set()
        assert gone.wait(SECONDS)
        dist.barrier()

    def posting():
        return [t for t in threading.enumerate() if t.name == "meshlib-samples"]

    run_ranks(program, 2)


def test_the_newest_process_group_is_watched():
    watch_it = []

    def program():
        if dist.get_rank() == 0:
            watch_it.append(JobWatch(whole_store(), JobView("", 2), every=0.05))
        dist.barrier()
        for _ in range(2):
            dist.init_process_group()
            dist.barrier()
            if dist.get_rank() == 0:
                until(lambda: there(watch_it[0]))
            dist.barrier()
            dist.destroy_process_group()

    def there(watch):
        watch.look()
        return watch.read(lambda view: len(view.there(time.time())) == 2)

    run_ranks(program, 2)
    (watch,) = watch_it
    watch.look()
    assert watch.read(lambda view: [note.kind for note in view.notes].count("begin")) >= 1
    watch.close()


def test_a_rank_that_does_not_answer_is_named():
    def program():
        if dist.get_rank() == 0:
            watch = JobWatch(whole_store(), JobView("", 9), every=0.05)
            watch.look()
            with pytest.raises(StoreTimeoutError, match="rank 7 has not answered"):
                watch.stacks(7, timeout=0.01)
            watch.close()
        dist.barrier()

    run_ranks(program, 2)


def test_a_store_that_is_gone_ends_the_view():
    store = HashStore()
    watch = JobWatch(store, JobView(), every=0.05)
    store.close()
    with pytest.raises(DistStoreError):
        watch.look()
    watch.start()
    until(lambda: watch.read(lambda view: view.over))
    watch.close()


# ------------------------------------------------------------------ who may ask what


@pytest.fixture(scope="module")
def empty():
    watch = JobWatch(HashStore(), JobView("train.py", 2))
    server = PageServer(watch)
    yield Page(server)
    server.close()
    watch.close()


def test_the_page_needs_no_token_and_tells_nothing(empty):
    status, text = empty.request("/", Authorization=None)
    assert status == 200
    assert "train.py" not in text
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)
    assert "url(" not in text


@pytest.mark.parametrize("path", ["/job", "/metrics"])
@pytest.mark.parametrize("token", [None, "", "Bearer", "Bearer x", "Basic {}", "Bearer {}x", "ü"])
def test_without_the_token_nothing_is_told(empty, path, token):
    given = token and token.format(empty.server.token)
    status, text = empty.request(path, Authorization=given)
    assert (status, "token" in text) == (401, True)
    assert empty.request(path)[0] == 200


def test_a_rank_is_not_asked_without_the_token(empty):
    assert empty.request("/stacks", "POST", '{"rank": 0}', Authorization=None)[0] == 401


@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("127.0.0.1:{}", True),
        ("localhost:{}", True),
        ("LOCALHOST", True),
        ("[::1]:9000", True),  # by a tunnel, say
        ("192.0.2.7:80", True),
        ("evil.example:{}", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
    ],
)
def test_names_that_are_not_this_machines_are_refused(empty, host, good):
    for path in ("/", "/job"):
        status, _ = empty.request(path, Host=host.format(empty.server.port))
        assert status == (200 if good else 421)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/../job", 404),
        ("GET", "/stacks", 404),
        ("POST", "/job", 404),
        ("PUT", "/job", 501),
        ("GET", "/job?x=1", 200),
    ],
)
def test_there_is_nothing_else(empty, method, path, status):
    assert empty.request(path, method)[0] == status


@pytest.mark.parametrize(
    "body", ["", "x", "[]", "{}", '{"rank": "0"}', '{"rank": 0.5}', "[" * 1000, "1" * 2000]
)
def test_a_wrong_question_is_told_what_is_expected(empty, body):
    status, text = empty.request("/stacks", "POST", body)
    assert (status, "expected" in text) == (400, True)


def test_a_rank_before_any_has_come(empty):
    assert empty.request("/stacks", "POST", '{"rank": 0}')[0] == 404


def test_a_browser_runs_nothing_but_the_pages_own_script():
    text, policy = page()
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert len(re.findall(rb"<script", text)) == len(re.findall(rb"<style", text)) == 1
    assert not re.search(rb"\son\w+=|\sstyle=|innerHTML", text)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_the_script_is_javascript(tmp_path):
    script = page()[0].decode().partition("<script>")[2].partition("</script>")[0]
    (tmp_path / "page.js").write_text(script)
    assert subprocess.run(["node", "--check", tmp_path / "page.js"], check=False).returncode == 0
