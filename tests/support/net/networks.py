"""Several hosts on this machine: network namespaces, joined by a switch."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class Network:
    """Hosts with an address each, joined by a switch; all are namespaces of this machine."""

    def __init__(self, size):
        self.tag = secrets.token_hex(3)
        self.names = [f"mr{self.tag}n{i}" for i in range(size)]
        self.hub = f"mr{self.tag}hub"
        _ip("netns", "add", self.hub)
        _ip("-n", self.hub, "link", "add", "name", "switch", "type", "bridge")
        _ip("-n", self.hub, "link", "set", "dev", "switch", "up")
        for index, name in enumerate(self.names):
            _ip("netns", "add", name)
            port = f"p{index}"
            pair = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self.hub, "link", "add", "name", port, *pair)
            _ip("-n", self.hub, "link", "set", "dev", port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "dev", "eth0", "up")
            _ip("-n", name, "link", "set", "dev", "lo", "up")

    def address(self, index):
        return f"10.200.0.{index + 1}"

    def command(self, index):
        return ("ip", "netns", "exec", self.names[index])

    def cut_off(self, index):
        """Unplug a host: packets vanish, nobody is told."""
        _ip("-n", self.hub, "link", "set", "dev", f"p{index}", "nomaster")

    def plug_in(self, index):
        """Undo ``cut_off``."""
        _ip("-n", self.hub, "link", "set", "dev", f"p{index}", "master", "switch")

    def close(self):
        for name in (*self.names, self.hub):
            _ip("netns", "delete", name)


def can_make_networks():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"mr{secrets.token_hex(4)}"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "name", "one", "type", "veth", "peer", "name", "two")
        _ip("-n", name, "link", "add", "name", "switch", "type", "bridge")
    except subprocess.CalledProcessError:
        return False
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", name)
    return True
