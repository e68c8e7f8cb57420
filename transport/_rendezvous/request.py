"""A process's request to a rendezvous, with the parts of its URL."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from transport._checks import to_whole_number
from transport._net.secret_file import secret_from_environment
from transport._waiting.deadline import Deadline

Secret = bytes | EllipsisType | None
"""The job's secret; None means no secret, ``...`` the environment's."""


def known_secret(secret: Secret) -> bytes | None:
    """Return ``secret``, or the environment's if it is ``...``."""
    return secret_from_environment() if isinstance(secret, EllipsisType) else secret


@dataclass(frozen=True, slots=True)
class RendezvousRequest:
    """The parts of ``scheme://host:port/path?rank=R&world_size=N``, the timeout in seconds, and the
    name of the job.

    A missing number is -1. ``host`` has no brackets; ``path`` is decoded.
    """

    url: str
    host: str
    port: int
    path: str
    rank: int
    world_size: int
    timeout: float
    group_name: str
    given: Secret
    """The argument ``secret`` of ``rendezvous``."""

    @classmethod
    def parse(cls, url: str, timeout: float, group_name: str, secret: Secret) -> RendezvousRequest:
        """Return the request with the parts of ``url``; raise ValueError for an invalid URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"init_method {url!r} is not a URL: {error}") from None
        if not parts.scheme:
            raise ValueError(f"init_method must be a URL like 'tcp://host:port', got {url!r}")
        query = dict(parse_qsl(parts.query))
        return cls(
            url,
            parts.hostname or "",
            -1 if port is None else port,
            unquote(parts.path),
            _number(url, query, "rank"),
            _number(url, query, "world_size"),
            timeout,
            group_name,
            secret,
        )

    @property
    def secret(self) -> bytes | None:
        """The job's secret, or None."""
        return known_secret(self.given)

    def deadline(self) -> Deadline:
        """Return a deadline ``timeout`` seconds from now."""
        return Deadline.after(self.timeout)

    def check_place(self, *, rank_needed: bool = True) -> None:
        """Raise ValueError if the world size, or a needed rank, is missing or out of range."""
        if self.world_size < 0:
            raise ValueError(f"world_size is missing: pass it as an argument or in {self.url!r}")
        if self.world_size == 0:
            raise ValueError(f"world_size must be at least 1, got 0 ({self.url!r})")
        if rank_needed and self.rank < 0:
            raise ValueError(f"rank is missing: pass it as an argument or in {self.url!r}")
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank must be less than world_size={self.world_size}, got {self.rank}"
                f" ({self.url!r})"
            )

    def check_found(self, rank: int, world_size: int, why: str) -> None:
        """Raise ValueError if the URL contradicts the real rank or world size; ``why`` explains
        where these come from.
        """
        for name, given, real in (
            ("rank", self.rank, rank),
            ("world_size", self.world_size, world_size),
        ):
            if given not in (-1, real):
                raise ValueError(f"{name} is {given}, but {why}; expected {real}, or no {name}")


def with_place(url: str, rank: int, world_size: int) -> str:
    """Return ``url`` with rank and world size in its query, except for values of -1.

    Raises ValueError if the query contradicts them, TypeError for a value that is not a number.
    """
    base, _, text = url.partition("?")
    query = dict(parse_qsl(text))
    for name, value in (("rank", rank), ("world_size", world_size)):
        number = to_whole_number(value, name)
        if number == -1:
            continue
        if number < -1:
            raise ValueError(f"{name} must be >= 0, or -1 if not given; got {number}")
        if query.setdefault(name, str(number)) != str(number):
            raise ValueError(
                f"{name}={number} contradicts {name}={query[name]} in {url!r}; expected only one"
            )
    text = urlencode(query)
    return f"{base}?{text}" if text else base


def _number(url: str, query: dict[str, str], name: str) -> int:
    text = query.get(name)
    if text is None:
        return -1
    if not text.isdecimal():
        raise ValueError(f"{name} must be a whole number >= 0, got {text!r} in {url!r}")
    return int(text)
