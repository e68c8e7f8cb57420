"""Linux as if it were macOS: with ``PYTHONPATH=tests/portable`` Python lacks what it lacks there.

The kernel stays Linux's, so this finds names that are missing, not other behaviour of a kernel.
``make test-portable`` runs tests like this.
"""

import builtins
import ctypes
import errno
import io
import os
import select
import selectors
import signal
import socket
import sys
import sysconfig
import time

_LACKING = {
    os: (
        "memfd_create MFD_* eventfd* EFD_* sched_getaffinity sched_setaffinity sched_*scheduler"
        " sched_*param sched_rr_get_interval pidfd_open PIDFD_* pipe2 fdatasync posix_fadvise"
        " posix_fallocate O_TMPFILE O_DIRECT O_PATH O_NOATIME O_LARGEFILE getrandom GRND_*"
        " copy_file_range splice SPLICE_* setns unshare CLONE_* *xattr *resuid *resgid P_PIDFD"
        " RWF_* process_cpu_count POSIX_FADV_*"
    ),
    select: "epoll EPOLL* POLLRDHUP",
    socket: (
        "TCP_INFO SO_PEERCRED SO_PASSCRED SOCK_CLOEXEC SOCK_NONBLOCK MSG_NOSIGNAL MSG_CMSG_CLOEXEC"
        " MSG_ERRQUEUE MSG_MORE TCP_KEEPIDLE TCP_USER_TIMEOUT TCP_QUICKACK TCP_CORK TCP_CONGESTION"
        " TCP_NOTSENT_LOWAT TCP_DEFER_ACCEPT TCP_SYNCNT TCP_LINGER2 TCP_WINDOW_CLAMP SO_MARK"
        " SO_BINDTODEVICE SO_DOMAIN SO_PROTOCOL SO_INCOMING_CPU SO_PRIORITY AF_PACKET AF_NETLINK"
        " AF_VSOCK AF_ALG AF_CAN AF_TIPC IP_BIND_ADDRESS_NO_PORT SO_EE*"
    ),
    signal: (
        "SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL SIGCLD sigtimedwait sigwaitinfo"
        " pidfd_send_signal"
    ),
    time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
    selectors: "EpollSelector",
}
_LACKING_BEFORE_3_13 = "waitid waitid_result P_ALL P_PID P_PGID WEXITED WNOWAIT WSTOPPED"
_LACKING_IN_C = {"prctl", "process_vm_readv", "syscall", "malloc_trim", "sched_getcpu", "gettid"}
_LACKING_FOLDERS = ("/proc", "/sys", "/dev/shm")


def _matches(name: str, pattern: str) -> bool:
    head, star, tail = pattern.partition("*")
    return name.startswith(head) and name.endswith(tail) if star else name == pattern


def _take_away(module: object, patterns: str) -> None:
    for pattern in patterns.split():
        for name in [name for name in dir(module) if _matches(name, pattern)]:
            delattr(module, name)


for _module, _patterns in _LACKING.items():
    _take_away(_module, _patterns)
if sys.version_info < (3, 13):
    _take_away(os, _LACKING_BEFORE_3_13)
selectors.DefaultSelector = selectors.PollSelector  # there it is KqueueSelector
socket.TCP_KEEPALIVE = getattr(socket, "TCP_KEEPALIVE", 4)  # Linux's TCP_KEEPIDLE


def _hide_folders(module: object, name: str) -> None:
    real = getattr(module, name)

    def hiding(path: object = ".", *args: object, **options: object) -> object:
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if any(text == folder or text.startswith(f"{folder}/") for folder in _LACKING_FOLDERS):
            raise FileNotFoundError(errno.ENOENT, "no such folder on this system", path)
        return real(path, *args, **options)

    setattr(module, name, hiding)


for _module, _name in (
    (builtins, "open"),
    (io, "open"),
    *((os, name) for name in ("open", "listdir", "scandir", "stat", "lstat", "readlink")),
):
    _hide_folders(_module, _name)


class _CDLL(ctypes.CDLL):
    def __getattr__(self, name: str) -> object:
        if name in _LACKING_IN_C:
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


class _Socket(socket.socket):
    """No packets over Unix sockets, and no abstract names."""

    def __init__(
        self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None
    ) -> None:
        if family == socket.AF_UNIX and type == socket.SOCK_SEQPACKET:
            raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")
        super().__init__(family, type, proto, fileno)

    def bind(self, address: object) -> None:
        if self.family == socket.AF_UNIX and (not address or address[:1] in (b"\0", "\0")):
            raise OSError(errno.EINVAL, "no abstract names on this system")
        super().bind(address)


sysconfig.get_config_vars()  # from a file that is called after sys.platform
ctypes.CDLL = _CDLL
socket.socket = _Socket
sys.platform = "darwin"
