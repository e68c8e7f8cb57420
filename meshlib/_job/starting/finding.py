"""Finding the other ranks of a job, by a URL or through a store that the user passes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, NamedTuple

from meshlib._job.thread_rank import thread_rank
from transport import _environment as environment
from transport._checks import to_whole_number
from transport._choosing.tuning import agree, from_environment
from transport._communicators.runtime import Runtime
from transport._net.secret_file import secret_from_environment
from transport._net.tls_choice import tls_from_environment
from transport._rendezvous import ForeignStore, foreign_rendezvous, rendezvous
from transport._rendezvous.rank_claims import in_group, next_job_part
from transport._store.base import Store
from transport._store.hash_store import HashStore

DEFAULT_INIT_METHOD = "env://"


class FoundJob(NamedTuple):
    """The shared store, this rank, the number of ranks, and the settings of connections."""

    store: Store
    rank: int
    size: int
    runtime: Runtime


def find_others(
    init_method: str | None,
    store: Store | ForeignStore | None,
    rank: int,
    world_size: int,
    group_name: str,
    *,
    default: str,
    timeout: float,
    networked: bool,
) -> FoundJob:
    """Return the store that the ranks share, and this rank's number.

    ``default`` is the URL if neither ``init_method`` nor ``store`` is given; ``networked``: the
    ranks are processes. Waits up to ``timeout`` seconds. Raises the errors of
    ``init_process_group``.
    """
    check_group_name(group_name)
    if init_method is not None and not isinstance(init_method, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"init_method must be a URL such as 'env://', got {init_method!r}")
    rank = to_whole_number(rank, "rank")
    world_size = to_whole_number(world_size, "world_size")
    tuning = from_environment()
    tls = tls_from_environment() if networked else None
    secret = secret_from_environment() if networked else None
    if store is None:
        url = init_method or default
        shared, rank, world_size = _rendezvous(url, rank, world_size, timeout, group_name)
    else:
        _check_given(store, init_method, rank, world_size)
        if isinstance(store, Store):
            # The user may use the store again, so the job gets a separate part of it.
            shared = next_job_part(in_group(store.clone(), group_name), rank)
        else:
            shared, secret = foreign_rendezvous(
                store, rank, world_size, timeout=timeout, group_name=group_name
            )
    with ExitStack() as undo:
        undo.callback(shared.close)
        agree(tuning, shared, rank)
        undo.pop_all()
    runtime = Runtime(secret, os.environ.get(environment.HOST), tls, tuning=tuning)
    return FoundJob(shared, rank, world_size, runtime)


def find_alone(
    init_method: str | None, store: object, rank: int, world_size: int, group_name: object
) -> FoundJob:
    """Return the job of a rank without other processes, with a store of its own.

    ``rank`` and ``world_size`` default to the environment's. Raises the errors of
    ``init_process_group``.
    """
    check_group_name(group_name)
    for name, value in (("init_method", init_method), ("store", store)):
        if value is not None:
            raise ValueError(
                f"{name}={value!r} was given with backend='fake'; expected neither an init_method"
                " nor a store, because no other process takes part"
            )
    world_size = _number("world_size", world_size, environment.WORLD_SIZE)
    rank = _number("rank", rank, environment.RANK)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"backend='fake' needs 0 <= rank < world_size, got rank={rank}, world_size={world_size}"
        )
    return FoundJob(HashStore(), rank, world_size, Runtime(tuning=from_environment()))


def check_group_name(group_name: object) -> None:
    """Raise TypeError unless ``group_name`` is a str."""
    if not isinstance(group_name, str):
        raise TypeError(f"group_name must be a str, got {group_name!r}")


def _number(name: str, given: int, variable: str) -> int:
    """Return the argument ``name``, or the environment's ``variable`` if it is -1."""
    number = to_whole_number(given, name)
    if number != -1:
        return number
    text = os.environ.get(variable)
    if text is None:
        raise ValueError(f"backend='fake' needs {name}, as an argument or in {variable}")
    if not text.isdecimal():
        raise ValueError(f"environment variable {variable} is {text!r}; expected a whole number")
    return int(text)


def _check_given(store: Any, init_method: str | None, rank: int, world_size: int) -> None:
    if init_method is not None:
        raise ValueError(f"init_method={init_method!r} and store were both given; expected one")
    if not isinstance(store, (Store, ForeignStore)):
        raise TypeError(
            "store must be a Store, or another library's with set, get and add; got"
            f" {type(store).__name__}: {store!r}"
        )
    if world_size <= 0 or not 0 <= rank < world_size:
        raise ValueError(
            "an explicit store needs rank and world_size with 0 <= rank < world_size, got "
            f"rank={rank}, world_size={world_size}"
        )


def _rendezvous(
    url: str, rank: int, world_size: int, timeout: float, group_name: str
) -> tuple[Store, int, int]:
    mine = thread_rank()
    if mine is not None and url == DEFAULT_INIT_METHOD:
        return mine.join(rank, world_size)
    found = rendezvous(url, rank, world_size, timeout=timeout, group_name=group_name)
    store, rank, world_size = next(iter(found))
    store.set_timeout(timeout)
    return store, rank, world_size
