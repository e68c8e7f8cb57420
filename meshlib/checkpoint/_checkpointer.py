"""``save`` and ``load``, and ``Checkpointer``: a folder of checkpoints that a job writes."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Literal, Self

from meshlib._job.current import Group
from meshlib.checkpoint._files.folder import entries_of, latest_step
from meshlib.checkpoint._files.keeping import Keeping
from meshlib.checkpoint._files.locations import Location, open_storage
from meshlib.checkpoint._files.storage import Storage
from meshlib.checkpoint._loading import load_like
from meshlib.checkpoint._participants import Participants
from meshlib.checkpoint._pieces import ChunkShares, Room
from meshlib.checkpoint._saving import Save
from transport._waiting.interrupts import join


def save(
    path: Location,
    state: Any,
    *,
    step: int,
    group: Group = None,
    metric: float | None = None,
    sync: bool = True,
) -> str:
    """Write ``state`` as a checkpoint ``step-N`` into the folder ``path``. A collective.

    The save is atomic: even if a rank dies, the checkpoint exists completely or not at all. It
    exists when the call returns. One rank writes each byte. Partial values are reduced. A plain
    array must be equal on all ranks, which share the work; use a ``DArray`` for values that differ
    by rank. A complete checkpoint replaces an earlier one of the same step. At the end, unfinished
    saves of other jobs in the folder are removed; a job that is still writing one gets a
    CheckpointError.

    Args:
        path: A folder that all ranks share, created if necessary; or a URL, which needs fsspec.
        state: Dicts, lists, tuples and dataclasses of arrays (DArray, NumPy, CuPy, JAX) and of
            None, numbers, str and bytes; equal trees on all ranks.
        step: An integer of at least 0. The newest checkpoint is the one whose save began last,
            even if an earlier one has a higher step.
        group: The ranks that save: a mesh or a process group. By default all ranks of the job;
            without a job, this process.
        metric: The value that ``Checkpointer(keep_best=...)`` compares; equal on all ranks.
        sync: Wait for the disk, so that the checkpoint survives power loss. Without it, the
            checkpoint still survives the death of processes.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: On every rank, for trees, values, shapes, steps or metrics that differ
            between ranks; the message has both values. Also if ``path`` is not one folder on all
            ranks, and if another job has removed the checkpoint meanwhile.
        TypeError: On every rank, for an object that could not be restored; the message has its
            path in the tree.
        ValueError: On every rank, for a negative step or a metric that is not finite.
        OSError: On every rank, if one cannot write. No new checkpoint exists then.
        RankFailedError: If a rank dies. Other errors of collectives are possible, too.
    """
    storage = partial(open_storage, path, sync=sync)
    return Save(Participants(group), storage, state, step, metric).write(Keeping())


def load(
    path: Location,
    like: Any = ...,
    *,
    step: int | None = None,
    group: Group = None,
    strict: bool = True,
    verify: bool = True,
) -> Any:
    """Return the state of a checkpoint, laid out as ``like``. A collective.

    Any number of ranks may load, on any mesh, in any sharding. Each rank reads only the chunks that
    it needs. The arrays are new; ``like`` is not changed.

    Args:
        path: A checkpoint, or a folder of them, of which the newest complete one is loaded.
        like: A tree with the structure of the saved one. A ``DArray`` loads as a DArray in its
            sharding, a ``Sharding`` as a DArray in that sharding. A NumPy array, or another object
            with shape and dtype (``jax.ShapeDtypeStruct``), loads as a NumPy array, and a value as
            the saved value. ``...``, the default, loads the saved subtree with whole NumPy arrays.
            A function also stands for a subtree: it gets each array's keys and shape, and returns
            a Sharding or ``...``.
        step: The step of the checkpoint in a folder; by default the newest.
        group: The ranks that load: a mesh or a process group. By default all ranks of the job;
            without a job, this process.
        strict: Require every saved entry in ``like``. Even without it, every entry of ``like`` must
            have been saved.
        verify: Read each chunk whole and check it. Without it, only the needed rows are read.

    Returns:
        The tree, of the types of ``like``.

    Raises:
        CheckpointError: On every rank, if there is no checkpoint, if its tree, shapes or dtypes
            differ from ``like`` (the message names the differences), and if ``step`` differs
            between ranks.
        CorruptCheckpointError: On every rank, for a file that is missing, torn or changed; the
            message names array, chunk and file.
    """
    return load_like(Participants(group), path, step, like, strict=strict, verify=verify)


class Checkpointer:
    """A writer of a job's checkpoints into one folder, which can save in the background.

    All ranks of the group must create it together and call each method together. As a context
    manager it waits for a running save at the end. After ``close`` its methods raise ValueError.

    Args:
        path: A folder that all ranks share, created if necessary; or a URL, which needs fsspec.
        group: The ranks: a mesh or a process group. By default all ranks of the job; without a job,
            this process. The Checkpointer makes a new group of these ranks for its messages.
        keep_last: The number of newest checkpoints to keep, by the beginning of their saves; None
            keeps all. With ``keep_best``, both kinds are kept. The latest save is always kept.
        keep_best: The number of checkpoints with the best ``metric`` to keep.
        better: The better direction of a metric: ``"lower"`` (a loss) or ``"higher"``.
        sync: Wait for the disk before a checkpoint counts as complete.

    Raises:
        ValueError: On every rank, for counts below 1, or another ``better``.
        TypeError: On every rank, for a value that is not a path or an integer. On this rank, for a
            value that is not a group.
    """

    _storage: Storage
    _keeping: Keeping

    def __init__(
        self,
        path: Location,
        group: Group = None,
        *,
        keep_last: int | None = None,
        keep_best: int | None = None,
        better: Literal["lower", "higher"] = "lower",
        sync: bool = True,
    ) -> None:
        participants = Participants(group)

        def check() -> None:
            self._keeping = Keeping(keep_last, keep_best, better)
            self._storage = open_storage(path, sync=sync)

        participants.gather(check)  # raises one rank's error on all ranks
        self._path = path
        self._participants = participants.with_own_group()
        self._room: Room | None = None
        self._shares: ChunkShares | None = None
        self._thread: threading.Thread | None = None
        self._outcome: str | BaseException | None = None
        self._closed = False

    # ------------------------------------------------------------------ saving

    def save(self, state: Any, *, step: int, metric: float | None = None) -> str:
        """Write a checkpoint and return its path, as ``meshlib.checkpoint.save`` does.

        First waits for a running save, and raises that save's error if it failed.
        """
        self.wait()
        return self._begin(state, step, metric, detached=False).write(self._keeping)

    def async_save(self, state: Any, *, step: int, metric: float | None = None) -> None:
        """Copy this rank's part of ``state``, and write it while the program continues.

        ``state``, ``step`` and ``metric`` are as for ``save``. First waits for a running save. The
        ranks also agree on the tree in the background. So the next call of any method raises all
        errors, including those of bad arguments, on all ranks.
        """
        self.wait()
        begun = self._begin(state, step, metric, detached=True)
        copied = threading.Event()

        def run() -> None:
            copied.wait()
            try:
                self._outcome = begun.write(self._keeping)
            except BaseException as error:  # noqa: BLE001 (raised by the next call)
                self._outcome = error

        self._outcome = None
        # Not a daemon: a program that ends right away still gets its checkpoint. It is started
        # before the copy, because starting a thread waits for the interpreter's lock.
        self._thread = threading.Thread(target=run, name=f"checkpoint-{step}")
        self._thread.start()
        try:
            self._room = begun.detach(self._room)
        finally:
            copied.set()

    def _begin(self, state: Any, step: int, metric: float | None, *, detached: bool) -> Save:
        """Return a save to write; reuse the last one's division of chunks if arrays are alike."""
        storage = self._storage
        begun = Save(
            self._participants,
            lambda: storage,
            state,
            step,
            metric,
            detached=detached,
            known=self._shares,
        )
        self._shares = begun.shares
        return begun

    def wait(self) -> str | None:
        """Wait for the running save; return its path, or None without a save since the last wait.

        Raises the error of a failed save.
        """
        if self._thread is None:
            if self._closed:
                raise ValueError(f"the Checkpointer of {self._storage.location} was closed")
            return None
        join(self._thread)
        self._thread, outcome, self._outcome = None, self._outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def is_saving(self) -> bool:
        """Return whether a save is running on this rank. Not a collective."""
        return self._thread is not None and self._thread.is_alive()

    # ------------------------------------------------------------------ loading

    def load(
        self, like: Any = ..., *, step: int | None = None, strict: bool = True, verify: bool = True
    ) -> Any:
        """Wait for a running save; return the state of the newest checkpoint, or of ``step``.

        ``like``, ``strict``, ``verify`` and the errors are those of ``meshlib.checkpoint.load``.
        """
        self.wait()
        return load_like(self._participants, self._path, step, like, strict=strict, verify=verify)

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, None if there is none."""
        self.wait()
        return self._participants.of_first(lambda: latest_step(self._path))

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, the oldest first."""
        self.wait()
        return self._participants.of_first(
            lambda: [e.step for e in entries_of(self._storage).complete]
        )

    def close(self) -> None:
        """Wait for the running save, and release the group. Idempotent."""
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._room = self._shares = None
            self._closed = True
            self._participants.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
