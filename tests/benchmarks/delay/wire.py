"""A network with delay between namespaces, as root: no kernel module, only /dev/net/tun.

    python3 wire.py ONE_WAY_MS SECONDS SITES NEAR_MS NAMESPACE NAMESPACE ...

Makes the device ``eth0`` (TAP) in each namespace and passes frames between them, each held back;
those inside each of SITES equal parts of the namespaces for as long as the second figure says.
Prints "up". SIGUSR1 cuts the network, or mends it: what is sent while it is cut is lost. With a C
compiler the frames are passed on by ``wire.c``. Frames are those of a network card that cuts them
into packets and sums them up by itself: up to 64 KiB, each behind a ``struct virtio_net_hdr``.
"""

import collections
import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_TUNSETIFF, _TAP_WITH_VIRTIO = 0x400454CA, 0x5002
_TUNSETOFFLOAD, _SUMS_AND_CUTS = 0x400454D0, 0x01 | 0x02 | 0x04
_HEADER = 10  # bytes of a struct virtio_net_hdr
_LIBC = ctypes.CDLL(None, use_errno=True)


def tap(namespace: str) -> int:
    """Return the descriptor of a new ``eth0`` in ``namespace``."""
    there, here = os.open(f"/var/run/netns/{namespace}", 0), os.open("/proc/self/ns/net", 0)
    if _LIBC.setns(there, 0):
        raise OSError(ctypes.get_errno(), f"no way into {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"eth0", _TAP_WITH_VIRTIO))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _SUMS_AND_CUTS)
    _LIBC.setns(here, 0)
    os.close(there)
    os.close(here)
    return device


def serve(taps: list[int], delay: float, end: float, sites: int, near: float) -> None:
    """Pass frames on until ``end``. A device's address ends in its number among ``taps``."""
    cut = False

    def toggle(*_: object) -> None:
        nonlocal cut
        cut = not cut

    signal.signal(signal.SIGUSR1, toggle)
    print("up", flush=True)
    queues = {(tap, near): collections.deque() for tap in range(len(taps)) for near in (0, 1)}
    clock = time.perf_counter
    while time.monotonic() < end:
        wait = 0.05
        now = clock()
        for (tap, _), queue in queues.items():
            while queue and queue[0][0] <= now:
                try:
                    os.write(taps[tap], queue[0][1])
                except BlockingIOError:
                    break
                except OSError:  # the device is not up yet, or no more
                    pass
                queue.popleft()
            if queue:
                wait = min(wait, max(0.0, queue[0][0] - clock()))
        for device in select.select(taps, [], [], wait)[0]:
            try:
                for _ in range(64):
                    frame = os.read(device, 70000)
                    if cut:
                        continue
                    read_at, here = clock(), taps.index(device)
                    for other in range(len(taps)):
                        to = frame[_HEADER : _HEADER + 6]
                        if (other != here) if to[0] & 1 else (other == to[5]):
                            same = here * sites // len(taps) == other * sites // len(taps)
                            leaves = read_at + (near if same else delay)
                            queues[other, int(same)].append((leaves, frame))
            except OSError:  # nothing more for now, or the device is not up
                pass


def serve_compiled(taps: list[int], delay: float, seconds: float, sites: int, near: float) -> None:
    """Become ``wire.c``; return where it cannot be compiled."""
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "wire")
        try:
            subprocess.run(["cc", "-O2", "-o", program, source], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"by Python's loop: {error}", file=sys.stderr)
            return
        binary = os.open(program, os.O_RDONLY)
    for device in (*taps, binary):
        os.set_inheritable(device, True)
    words = ["wire", str(int(delay * 1e9)), str(seconds), str(sites), str(int(near * 1e9))]
    words += map(str, taps)
    os.execve(binary, words, os.environ)


if __name__ == "__main__":
    os.nice(-15)  # a wire waits for no processor
    one_way, seconds, sites, near, *namespaces = sys.argv[1:]
    devices = [tap(namespace) for namespace in namespaces]
    parts = int(sites), float(near) / 1000
    serve_compiled(devices, float(one_way) / 1000, float(seconds), *parts)
    serve(devices, float(one_way) / 1000, time.monotonic() + float(seconds), *parts)
