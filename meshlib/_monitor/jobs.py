"""Discovery of running jobs: by the file that each ``meshrun`` writes for its user, or by address.

A launcher has a folder that only its user may enter, and that is removed when the launcher ends. A
file in it has the job's address and secret.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transport._net.secret_file import secret_from_environment

if TYPE_CHECKING:
    from transport._store.base import Store

FOLDERS = "meshrun-"
"""The prefix of launchers' folders, in the folder for temporary files."""
_FILE = "job.json"
_CONNECT_SECONDS = 5.0
_ADDRESS = re.compile(r"(.*[^:]|\[.*\]):(\d+)")


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job whose store is at ``host`` and ``port``, or in an etcd at ``url``.

    ``secret`` is in hexadecimal digits, ``name`` that of the launch, ``program`` the ranks'
    program, ``pid`` the launcher's process id, and ``ranks`` their number.
    """

    name: str
    host: str
    port: int
    secret: str = ""
    program: str = ""
    pid: int = 0
    ranks: int = 0
    url: str = ""

    def connect(self) -> Store:
        """Return a client of the job's store.

        Raises DistNetworkError or AuthenticationError if that fails.
        """
        # Imported here because launchers, which only write the file, need not load it.
        from transport._store.opening import open_store

        secret = bytes.fromhex(self.secret) if self.secret else None
        seconds = _CONNECT_SECONDS
        return open_store(self.host, self.port, self.url, timeout=seconds, secret=secret)


def write(folder: Path, job: RunningJob) -> None:
    """Write ``job`` to a file in its launcher's ``folder``, atomically."""
    unfinished = folder / f"{_FILE}.part"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(job), file)
    unfinished.replace(folder / _FILE)


def running() -> list[RunningJob]:
    """Return the running jobs of this user's launchers on this machine, the newest last."""
    found: list[tuple[float, RunningJob]] = []
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*/{_FILE}"):
        with suppress(OSError, ValueError, TypeError):
            about = path.stat()
            if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
                continue  # another user's, or accessible to other users
            job = RunningJob(**json.loads(path.read_text(encoding="utf-8")))
            os.kill(job.pid, 0)
            found.append((about.st_mtime, job))
    # Several launchers of one job, one per node, may run on this machine.
    by_store = {
        (job.host, job.port, job.url): job for _, job in sorted(found, key=lambda pair: pair[0])
    }
    return list(by_store.values())


def find(text: str | None) -> RunningJob:
    """Return the job that ``text`` names; for None, the only job that runs here.

    ``text`` is a launcher's process id, the beginning of a launch's name or of its program, or
    HOST:PORT of a job's store. Raises ValueError unless exactly one job matches.
    """
    if text is not None and (address := _ADDRESS.fullmatch(text)):
        host, port = address[1].removeprefix("[").removesuffix("]"), int(address[2])
        secret = secret_from_environment()
        return RunningJob(text, host, port, secret.hex() if secret is not None else "")
    jobs = running()
    chosen = [job for job in jobs if text is None or _means(text, job)]
    if len(chosen) == 1:
        return chosen[0]
    if not jobs:
        raise ValueError(
            "no job of this user's runs on this machine; expected HOST:PORT of a job's store"
        )
    if not chosen:
        raise ValueError(f"no running job matches {text!r}; expected one of {_list(jobs)}")
    raise ValueError(f"several jobs run here; expected JOB to be one of {_list(chosen)}")


def _means(text: str, job: RunningJob) -> bool:
    names = (job.name, job.program, os.path.basename(job.program))
    return text == str(job.pid) or any(name.startswith(text) for name in names)


def _list(jobs: list[RunningJob]) -> str:
    return ", ".join(f"{job.pid} ({job.program}, {job.name})" for job in jobs)
