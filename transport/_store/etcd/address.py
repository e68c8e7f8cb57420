"""The URL of a store in etcd: ``etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/PREFIX[?lease=ID]``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import parse_qs, quote, unquote, urlsplit

from transport._net.sockets import format_address

SCHEME = "etcd://"
_EXPECTED = "expected etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/PREFIX"


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """The members of a cluster, by host and port, and the prefix of all keys.

    ``lease`` is the lease of all keys, 0 for none.
    """

    members: tuple[tuple[str, int], ...]
    prefix: str
    user: str = ""
    password: str = ""
    lease: int = 0

    @classmethod
    def parse(cls, url: str) -> EtcdAddress:
        """Return the address in ``url``; raise ValueError with the reason if it is malformed."""
        parts = urlsplit(url)
        if parts.scheme != "etcd":
            # The message omits the rest, which may contain a password.
            raise ValueError(f"{_EXPECTED}, got a URL with the scheme {parts.scheme!r}")
        account, at, hosts = parts.netloc.rpartition("@")
        user, colon, password = account.partition(":")
        shown = f"etcd://{hosts}{parts.path}"  # without the password
        if at and not (user and colon):
            raise ValueError(f"{_EXPECTED}, got a user without a password in {shown!r}")
        prefix = unquote(parts.path).strip("/")
        if not prefix:
            raise ValueError(f"{_EXPECTED}, got no /PREFIX, which keeps jobs apart, in {shown!r}")
        members = tuple(_member(text, shown) for text in hosts.split(","))
        query = parse_qs(parts.query, keep_blank_values=True)
        lease = query.pop("lease", ["0"])[-1]
        if query or parts.fragment or not lease.isdigit():
            raise ValueError(f"{_EXPECTED}, got {parts.query or parts.fragment!r} behind {shown!r}")
        return cls(members, prefix, unquote(user), unquote(password), int(lease))

    def leased(self, lease: int, part: str = "") -> EtcdAddress:
        """Return the address of the keys under ``part`` of the prefix, with ``lease``."""
        return replace(self, prefix=f"{self.prefix}/{part}".rstrip("/"), lease=lease)

    @property
    def url(self) -> str:
        """The whole URL, with the password."""
        account = f"{quote(self.user, '')}:{quote(self.password, '')}@" if self.user else ""
        lease = f"?lease={self.lease}" if self.lease else ""
        return f"{SCHEME}{account}{self._hosts}/{quote(self.prefix)}{lease}"

    @property
    def shown(self) -> str:
        """The URL for messages: without the account."""
        return f"{SCHEME}{self._hosts}/{quote(self.prefix)}"

    @property
    def _hosts(self) -> str:
        return ",".join(format_address(host, port) for host, port in self.members)


def _member(text: str, shown: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= 65535:
        raise ValueError(f"{_EXPECTED}, got {text!r} for HOST:PORT in {shown!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
