"""``meshrun --hosts``: one meshrun on each host, over an ``ssh`` that a script plays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SSH = """\
#!/bin/sh
# ssh, for hosts that are this machine, or one of its network namespaces.
while true; do
    case "$1" in
        -o) [ "$2" = BatchMode=yes ] && batch=1; shift 2 ;;
        -G) echo "hostname ADDRESS"; exit 0 ;;
        *) break ;;
    esac
done
[ "$batch" ] || exit 3
host=$1
shift
case "$host" in
    nowhere) echo "ssh: Could not resolve hostname nowhere" >&2; exit 255 ;;
    mr*) exec ip netns exec "$host" env -i PATH="$PATH" TMPDIR="$TMPDIR" MARK sh -c "$*" ;;
esac
echo "$host $*" >> "$CALLS"
exec sh -c "$*"
"""
PROGRAM = """
    import os
    import numpy as np
    import meshlib as dist

    dist.init_process_group()
    x = dist.all_reduce(np.full(1000, dist.get_rank() + 1.0))
    print(int(x[0]), os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"], os.getcwd())
    print(os.environ.get("CHOSEN"), os.environ.get("OTHER"))
"""
FOREVER = """
    import time
    import numpy as np
    import meshlib as dist

    dist.init_process_group()
    dist.all_reduce(np.ones(1))
    open(f"running{dist.get_rank()}", "w").close()
    while True:
        dist.all_reduce(np.ones(1))
        time.sleep(0.01)
"""


@pytest.fixture
def hosts(meshrun, free_port):
    """Start ``meshrun --hosts NAMES`` with such an ssh on the PATH."""
    folder = meshrun.folder / "bin"
    folder.mkdir()
    calls = meshrun.folder / "calls"

    def start(names, script, *flags, address="127.0.0.1", loopback=True, env=None):
        path = meshrun.script(script)
        name, _, value = meshrun._mark.partition("=")
        text = SSH.replace("ADDRESS", address).replace("MARK", f"{name}={value}")
        (folder / "ssh").write_text(text)
        (folder / "ssh").chmod(0o755)
        variables = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls)} | (env or {})
        meeting = ["--master-port", str(free_port)]
        meeting += ["--master-addr", "127.0.0.1"] if loopback else []
        return meshrun.start("--hosts", names, *meeting, *flags, path, env=variables)

    start.calls = calls
    return start


def all_running(meshrun, count):
    return meshrun.wait_for(
        lambda: all((meshrun.folder / f"running{rank}").exists() for rank in range(count))
    )


def test_ranks_on_all_hosts_and_their_output(meshrun, hosts):
    chosen = {"CHOSEN": "1", "OTHER": "2"}
    job = hosts("a,b:2", PROGRAM, "--prefix", "--env", "CHOSEN=yes", env=chosen)
    done = meshrun.finish(job)
    assert done.code == 0, done.err
    here = meshrun.folder
    lines = sorted(line for line in done.out.splitlines() if "yes" not in line)
    assert lines == [
        f"[a] [rank 0] 6 0 0 {here}",
        f"[b] [rank 1] 6 1 0 {here}",
        f"[b] [rank 2] 6 1 1 {here}",
    ]
    assert done.out.count("yes 2") == 3  # a script has no other machine: OTHER is inherited


def test_the_secret_is_in_no_command_line(meshrun, hosts):
    secret = "ab" * 32
    done = meshrun.finish(hosts("a,b", PROGRAM, env={"MESHLIB_SECRET": secret}))
    assert done.code == 0, done.err
    commands = hosts.calls.read_text()
    assert sorted(line.split()[0] for line in commands.splitlines()) == ["a", "b"]
    assert secret not in commands


def test_one_host_alone(meshrun, hosts):
    done = meshrun.finish(hosts("a:2", PROGRAM, loopback=False))
    assert done.code == 0, done.err
    assert done.out.count("[a] 3 0") == 2


def test_the_report_of_a_failure_comes_once(meshrun, hosts):
    script = """
        import sys
        import numpy as np
        import meshlib as dist
        dist.init_process_group()
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        dist.all_reduce(np.ones(1))
    """
    done = meshrun.finish(hosts("a,b", script))
    assert done.code == 1
    assert done.err.count("Traceback") == 1, done.err
    assert "[a] meshrun: rank 1 on" in done.err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_reach_all_hosts(meshrun, hosts, number, code):
    job = hosts("a,b", FOREVER)
    assert all_running(meshrun, 2)
    job.send_signal(number)
    done = meshrun.finish(job)
    assert done.code == code, done.err
    assert done.err.count(f"meshrun: received {number.name}") == 1


def test_nothing_is_left_when_the_first_is_killed(meshrun, hosts):
    job = hosts("a,b", FOREVER)
    assert all_running(meshrun, 2)
    job.send_signal(signal.SIGKILL)
    assert meshrun.wait_until_gone() == []


def test_the_death_of_one_hosts_launcher_ends_all(meshrun, hosts):
    job = hosts("a,b", FOREVER)
    assert all_running(meshrun, 2)
    launchers = [pid for pid in meshrun.processes() if controls(pid)]
    assert len(launchers) == 2
    os.kill(max(launchers), signal.SIGKILL)
    done = meshrun.finish(job)
    assert done.code not in (0, 255)


def controls(pid):
    """True if a process is a host's launcher, not its guardian."""
    parent = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    return is_controlled(pid) and not is_controlled(parent)


def is_controlled(pid):
    words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
    return b"meshlib._launcher.controlled" in words


def test_a_host_that_cannot_be_reached_ends_all(meshrun, hosts):
    done = meshrun.finish(hosts("a,nowhere", FOREVER))
    assert done.code != 0
    assert "[nowhere] ssh: Could not resolve hostname nowhere" in done.err
    assert "meshrun: nowhere: ssh has failed" in done.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--hosts", "a,,b"), "expected HOST or HOST:RANKS"),
        (("--hosts", "a:0"), "expected HOST or HOST:RANKS"),
        (("--hosts", "-oProxyCommand=x"), "--hosts"),
        (("--hosts", "a,a"), "'a' is given twice"),
        (("--hosts", "a,b", "--nnodes", "2"), "--hosts and --nnodes were both given"),
        (("--hosts", "a,b", "--node-rank", "1"), "--hosts and --node-rank were both given"),
        (("--hosts", "a,b", "--env", "NO_SUCH_NAME"), "--env NO_SUCH_NAME"),
        (("--hosts", "a,b", "--ssh-command", " "), "--ssh-command is empty"),
        (("--env", "A=1"), "--env needs --hosts"),
    ],
)
def test_what_makes_no_sense_is_refused(meshrun, flags, message):
    done = meshrun.run(*flags, meshrun.script("pass"))
    assert done.code == 2
    assert message in done.err


def test_a_loopback_address_for_several_hosts_is_refused(meshrun, hosts):
    done = meshrun.finish(hosts("a,b", PROGRAM, loopback=False))
    assert done.code == 1
    assert "the other hosts cannot reach a at 127.0.0.1; expected --master-addr" in done.err


@pytest.mark.netns
@pytest.mark.parametrize("network", [2], indirect=True)
def test_hosts_with_networks_of_their_own(meshrun, network, hosts):
    names = ",".join(f"{name}:2" for name in network.names)
    job = hosts(names, PROGRAM, loopback=False, address=network.address(0), env={"OTHER": "2"})
    done = meshrun.finish(job)
    assert done.code == 0, done.err
    assert done.out.count(" 10 0 ") == 2
    assert done.out.count(" 10 1 ") == 2
    assert done.out.count("None None") == 4  # only what --env names goes along
