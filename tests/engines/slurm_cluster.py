"""A Slurm of two nodes on this machine: each in a network namespace, with a name of its own.

What happens between real machines (names, loopback, secrets, daemons that die) happens here. It
needs root, iproute2, util-linux, and Debian's slurm-wlm and munge; everything is in one folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

NODES = 2
SUBNET = "10.78.31"
COMMANDS = ("slurmctld", "slurmd", "munged", "srun", "ip", "unshare", "nsenter")
KILL_WAIT = 6

_CONF = """\
ClusterName=test
SlurmctldHost={controller}({subnet}.254)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
SlurmctldPort=17001
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait={kill_wait}
SlurmdTimeout=20
"""


def why_not() -> str | None:
    """Return why there can be no such cluster here, None when there can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces and start daemons"
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    return f"needs {', '.join(missing)} (Debian: slurm-wlm munge iproute2)" if missing else None


class SlurmCluster:
    """Up when made, down after ``close``; ``environment`` is what its commands need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix = f"sl{os.getpid() % 10000}n"
        self.hosts = [f"{self.prefix}{number}" for number in range(1, NODES + 1)]
        self.environment = dict(os.environ) | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._namespaces: list[str] = []
        try:
            self._make_network()
            self._start_daemons()
            self._wait_until_idle()
        except BaseException:
            self.close()
            raise

    def run(self, *command: str, timeout: float = 60, **variables: str) -> tuple[int, str]:
        """Run a command of Slurm's to its end; return its exit code and all that it printed."""
        done = subprocess.run(
            command,
            env=self.environment | variables,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        return done.returncode, done.stdout

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command of Slurm's."""
        return subprocess.Popen(
            command,
            env=self.environment | variables,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def job_ids(self) -> list[str]:
        """Return the jobs that are queued or run."""
        return self.run("squeue", "-h", "-o", "%i")[1].split()

    def wait_until_empty(self, timeout: float = 40) -> None:
        """Wait until no job is left, and every node idle again."""
        for job in self.job_ids():
            self.run("scancel", job)
        self._wait_until_idle(timeout)

    def close(self) -> None:
        """End the daemons, by their process ids, and remove the network."""
        for file in [*self.folder.glob("slurmd.*.pid"), *self.folder.glob("*d.pid")]:
            with contextlib.suppress(OSError, ValueError):
                _end(int(file.read_text()))
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        bridge = f"{self.prefix}br"
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)

    def log(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(
            f"{file.name}:\n{file.read_text()[-1500:]}" for file in self.folder.glob("log/*.log")
        )

    def _make_network(self) -> None:
        bridge = f"{self.prefix}br"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{SUBNET}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        names = [f"127.0.0.1 localhost\n{SUBNET}.254 {self.prefix}ctl\n"]
        for number, host in enumerate(self.hosts, 1):
            _ip("netns", "add", host)
            self._namespaces.append(host)
            _ip("link", "add", f"{host}v", "type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("link", "set", f"{host}v", "master", bridge, "up")
            _ip("-n", host, "addr", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")
            names.append(f"{SUBNET}.{number} {host}\n")
        (self.folder / "hosts").write_text("".join(names))

    def _start_daemons(self) -> None:
        folder = self.folder
        for part in ("state", "log"):
            (folder / part).mkdir()
        folder.chmod(0o755)
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        subprocess.run(
            [
                "munged",
                "--force",
                f"--key-file={key}",
                f"--socket={folder}/munge.socket",
                f"--pid-file={folder}/munged.pid",
                f"--log-file={folder}/log/munged.log",
                f"--seed-file={folder}/munge.seed",
            ],
            check=True,
            timeout=20,
            capture_output=True,
        )
        conf = _CONF.format(
            controller=os.uname().nodename.partition(".")[0],
            subnet=SUBNET,
            folder=folder,
            kill_wait=KILL_WAIT,
        )
        for number, host in enumerate(self.hosts, 1):
            conf += f"NodeName={host} NodeHostname={host} NodeAddr={SUBNET}.{number}"
            conf += " Port=17002 CPUs=4\n"
        conf += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        (folder / "slurm.conf").write_text(conf)
        self._daemon(["slurmctld"])
        for host in self.hosts:
            # Not by ip netns exec: its /sys has no cgroups, and slurmd refuses to start.
            inner = f"mount --bind {folder}/hosts /etc/hosts; hostname {host}; exec nsenter"
            inner += f" --net=/var/run/netns/{host} slurmd -N {host}"
            self._daemon(["unshare", "-m", "-u", "sh", "-c", inner])

    def _daemon(self, command: list[str]) -> None:
        # It stays as a daemon: nothing of it may keep a pipe of ours open.
        subprocess.run(
            command,
            env=self.environment,
            check=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _wait_until_idle(self, timeout: float = 40) -> None:
        until = time.monotonic() + timeout
        while self.run("sinfo", "-h", "-t", "idle", "-o", "%D")[1].strip() != str(NODES):
            if time.monotonic() > until:
                raise TimeoutError(f"the nodes are not idle:\n{self.run('sinfo')[1]}\n{self.log()}")
            time.sleep(0.1)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    for _ in range(50):
        time.sleep(0.1)
        os.kill(pid, 0)
    os.kill(pid, signal.SIGKILL)
