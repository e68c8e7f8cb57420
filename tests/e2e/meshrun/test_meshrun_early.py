"""Events before the program runs under ``meshrun``: Ctrl-C, an address that is taken."""

from __future__ import annotations

import signal
import socket
import time

import pytest

from meshlib._launcher.nodes.agents_log import SharedLog
from meshlib._launcher.nodes.coordinator import Coordinator, Verdict
from meshlib._launcher.options.launch import LaunchOptions, NodeOptions, RankProgram
from transport._net import sockets

pytestmark = pytest.mark.processes

SLOW_TO_LOAD = """
    import sys, time

    class Slow:
        def find_spec(self, name, path=None, target=None):
            if name == "meshlib._launcher.options.arguments":
                open("here", "w").close()
                try:
                    time.sleep(600)
                except KeyboardInterrupt as error:  # as Python 3.11 does in __set_name__
                    raise RuntimeError("an import failed") from error

    sys.meta_path.insert(0, Slow())
"""
SLOW_TO_BEGIN = """
    import os, time

    if os.environ.get("RANK") == "1":
        open("here", "w").close()
        time.sleep(1)
"""
SLOW_TO_FORK = """
    import os, time

    if "MESHLIB_RUN_ID" in os.environ:
        open("here", "w").close()
        time.sleep(1)
"""


@pytest.mark.parametrize(
    ("slow", "start", "message"),
    [
        (SLOW_TO_LOAD, "fork", "received SIGINT"),
        (SLOW_TO_BEGIN, "exec", "received SIGINT; ended ranks 0-1"),
        (SLOW_TO_FORK, "fork", "received SIGINT; ended ranks 0-1"),
    ],
    ids=["the launcher", "a rank", "what ranks are forked from"],
)
def test_ctrl_c_before_anything_runs_is_quiet(meshrun, slow, start, message):
    """Python runs ``sitecustomize`` when it begins, in the launcher and in the ranks."""
    meshrun.script(slow, "sitecustomize.py")
    script = meshrun.script("import time; time.sleep(600)")
    variables = {"PYTHONPATH": str(meshrun.folder)}
    launcher = meshrun.start("-n", "2", "--start", start, script, env=variables)
    assert meshrun.wait_for((meshrun.folder / "here").exists)
    launcher.send_signal(signal.SIGINT)
    result = meshrun.finish(launcher)
    assert (result.code, result.out, result.err) == (130, "", f"meshrun: {message}\n")


@pytest.mark.parametrize("flags", [["--no-python", "cat"], ["read.py"]])
def test_a_program_can_be_interrupted(meshrun, flags):
    """The signal mask that holds Ctrl-C back while a rank begins is not left to the program."""
    meshrun.script("print(open('/proc/self/status').read())", "read.py")
    status = meshrun.run(*flags, *["/proc/self/status"] * (flags[-1] == "cat")).out
    masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Sig"))
    held = int(masks["SigBlk"], 16) | int(masks["SigIgn"], 16)
    assert not held & 1 << (signal.SIGINT - 1)


def test_an_address_in_use_names_the_option(meshrun):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = meshrun.run(f"--master-port={port}", meshrun.script(""))
    assert result.code == 1
    assert f"port {port}: Address already in use" in result.err
    assert result.err.endswith("--master-port, or leave it out to use any free port\n")


def test_a_name_that_no_machine_has_is_said(monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(sockets.socket, "getaddrinfo", unknown)
    nodes = NodeOptions(2, 2, 1, host="nodeA", port=29500, join_timeout=0.3, is_host=0)
    options = LaunchOptions(RankProgram("script", "x"), 1, nodes=nodes)
    node = Coordinator(options, "agent", SharedLog(options, "agent", lambda: None))
    try:
        node.join()
        end = time.monotonic() + 60
        while not (events := node.poll()) and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        node.close()
    (verdict,) = events
    assert isinstance(verdict, Verdict)
    assert "nodeA:29500: cannot resolve nodeA" in verdict.error
