"""A job of processes, seen on its page and in the terminal, that leaves nothing behind."""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.processes

PROGRAM = (PROGRAMS / "lose_rank_1_in_a_call.py").read_text()


def test_a_job_is_seen(meshrun):
    script = meshrun.script(PROGRAM)
    job = meshrun.start("--monitor", "--on-failure", "continue", "-n", "2", script)
    line = job.stderr.readline()
    found = re.fullmatch(r"meshrun: this job can be seen at (http://127.0.0.1:\d+/)#(\S+)\n", line)
    assert found, line
    url, token = found.groups()

    def fetch(path, **options):
        request = urllib.request.Request(url + path, **options)
        request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read().decode()

    def ranks():
        return {one["rank"]: one for one in json.loads(fetch("job"))["ranks"]}

    def rank_0_waits():
        calls = ranks()[0]["calls"]
        return calls and calls[0]["waiting_for"] == 1

    def rank_1_waits():
        stacks = json.loads(fetch("stacks", data=b'{"rank": 1}', method="POST"))
        return "waits_for_a_file" in "\n".join(stacks["main"])

    assert meshrun.wait_for(rank_0_waits)
    assert ranks()[1]["mesh"] == [{"name": "dp", "index": 1, "size": 2}]
    assert meshrun.wait_for(rank_1_waits)
    top = [str(Path(sys.executable).with_name("meshlib")), "top", str(job.pid)]
    environment = meshrun.environment()
    shown = subprocess.run(
        top, capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "waits for rank 1" in shown.stdout
    assert "dp →" in shown.stdout
    (meshrun.folder / "go").touch()
    assert meshrun.wait_for((meshrun.folder / "lost").exists)
    assert meshrun.wait_for(lambda: ranks()[1]["state"] == "lost")
    assert meshrun.wait_for(lambda: "SIGKILL" in ranks()[1]["how"])
    assert 'meshlib_rank_up{rank="1"} 0' in fetch("metrics")
    (meshrun.folder / "end").touch()
    assert meshrun.finish(job).code == 0
    with pytest.raises(urllib.error.URLError):
        fetch("job")
