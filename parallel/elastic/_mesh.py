"""``ElasticMesh``: a mesh whose replicas may leave and join during training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import asdict
from typing import Any, Self

import numpy as np

import meshlib as dist
from meshlib import (
    CollectiveMismatchError,
    DeviceMesh,
    DistError,
    MeshDimError,
    ProcessGroup,
    ReduceOp,
)
from meshlib.extend import Change, Job, Timeout, failure_of, to_seconds
from parallel._checks import check_instance, to_count
from parallel.elastic._batches import ElasticBatches
from parallel.elastic._choice import Choice, MemberReport, choose
from parallel.elastic._step import Interrupter, Step
from parallel.elastic._transfer import ManagedState, transfer

_EVENT_SECONDS = 1.0
_MAX_FAILED_EPOCHS = 3
Until = int | Callable[[int], bool] | None


class ElasticMesh:
    """A mesh whose replicas, the coordinates of ``dim``, may leave and join.

        with ElasticMesh(mesh, dim="dp") as elastic:
            model = DistributedDataParallel(Net(), elastic.mesh["dp"])
            optimizer = SGD(model.parameters(), lr=0.1)
            state = {"model": model, "optimizer": optimizer}

            for step in elastic.steps(state, until=1000, batches=ElasticBatches(60000, 128)):
                with step as mesh:
                    train(model, step.share)             # forward and backward
                    step.on_commit(optimizer.step)

    All ranks run the same program, including ranks that join later (``meshrun --replace``,
    ``--spares``). A later rank is the only rank of its mesh until its loop begins. Then it waits
    for a place, receives the state, and joins the other ranks' loop.

    Args:
        mesh: A mesh with names over all initial ranks of the job. None: the mesh of
            ``meshrun --mesh``.
        dim: The dim along which replicas may leave and join.
        min_size: The number of replicas below which training waits for new ranks.
        data_dims: The dims whose ranks read different data; by default ``dim`` and, if the mesh has
            it, ``"dp_shard"``.
        timeout: The maximum wait for a vote on a step, and for the remaining members after a loss:
            seconds, a timedelta or "30s". By default the job's timeout.
        join_timeout: The maximum wait for ``min_size`` replicas.

    Raises:
        ValueError: For a mesh without names, or not over all ranks of the job, and for numbers out
            of range.
        MeshDimError: For dims that the mesh does not have.
        TypeError: If ``mesh`` is not a mesh.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        dim: str = "dp_replicate",
        min_size: int = 1,
        *,
        data_dims: tuple[str, ...] | None = None,
        timeout: Timeout | None = None,
        join_timeout: Timeout = 300.0,
    ) -> None:
        mesh = dist.init_device_mesh() if mesh is None else mesh
        check_instance(mesh, DeviceMesh, "mesh", "init_device_mesh(...)")
        self._job = job = Job()
        names = mesh.mesh_dim_names
        if names is None or mesh.slice_count != 1:
            raise ValueError(f"mesh is {mesh}; expected a whole mesh whose dims have names")
        self._full = mesh.size(dim)
        if dim not in names:
            raise MeshDimError(f"dim {dim!r} is flattened; expected one of {', '.join(names)}")
        self._axis = names.index(dim)
        self._width = mesh.size() // self._full
        self.dim = dim
        self.min_size: int = to_count(min_size, "min_size")
        if self.min_size > self._full:
            raise ValueError(f"min_size is {min_size}, but dim {dim!r} has {self._full} ranks")
        shared = (dim, "dp_shard") if "dp_shard" in names and dim != "dp_shard" else (dim,)
        self._data_dims = shared if data_dims is None else tuple(data_dims)
        self._full_readers = mesh[self._data_dims].size()
        self._timeout = job.timeout if timeout is None else to_seconds(timeout)
        self._join_timeout = to_seconds(join_timeout, "join_timeout")
        self._fresh: bool = job.joining
        if self._fresh:
            mesh = mesh.with_ranks(np.full((1,) * mesh.ndim, job.rank))
        elif set(mesh.mesh.ravel().tolist()) != set(job.epoch.members):
            raise ValueError(f"mesh is {mesh}; expected all ranks of the job, {job.epoch.members}")
        self._mesh = mesh
        self.committed: int = 0
        """The number of steps that all members have committed."""
        self.cursor: int = 0
        """The number of samples that these steps have used."""
        self.history: list[Change] = []
        """The changes of membership so far, the latest last."""
        self._state = ManagedState({})
        self._batches: ElasticBatches | None = None
        self._restore: Callable[[], object] | None = None
        self._votes: ProcessGroup | None = None
        self._interrupter: Interrupter | None = None
        self._change_due = False
        self._failed_epochs = 0
        self._ended = False
        self._readers = 0, 1
        """This rank's place among the ranks that read different data, and their number."""

    # ------------------------------------------------------------------ properties

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the current ranks."""
        return self._mesh

    @property
    def placed(self) -> bool:
        """True if this rank has a place in the mesh; False while it waits or if it got none."""
        return not self._fresh

    @property
    def size(self) -> int:
        """The current number of replicas."""
        return self._mesh.size(self.dim)

    @property
    def epoch(self) -> int:
        """The job's epoch, which counts the changes of membership."""
        return self._job.epoch.number

    def state_dict(self) -> dict[str, int]:
        """Return this object's part of a checkpoint: the committed steps and the used samples."""
        return {"committed": self.committed, "cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from a ``state_dict``. Call it on all members, before the first step."""
        self.committed, self.cursor = int(state["committed"]), int(state["cursor"])

    # ------------------------------------------------------------------ the loop

    def steps(
        self,
        state: MutableMapping[str, Any],
        until: Until = None,
        *,
        batches: ElasticBatches | None = None,
        restore: Callable[[], object] | None = None,
    ) -> Iterator[Step]:
        """Yield steps until enough are committed.

        If the loss of a rank aborts a step, the remaining ranks get the step again, with the same
        number.

        Args:
            state: The state between steps: a dict of models, optimizers, arrays, pytrees. The
                wrappers of this package move to the mesh of the current ranks. A new rank receives
                the whole state from other ranks.
            until: The number of committed steps after which the loop ends, or a function
                ``until(committed)`` that returns True at the end, the same on all ranks. None:
                the loop does not end.
            batches: The samples. ``step.share`` is then this rank's share of a step's samples.
            restore: All members call it if no remaining rank has the state. It must load a
                checkpoint into ``state``, and this object's part by ``load_state_dict``.

        Raises:
            ValueError: For a ``state`` that is lost in part with a rank: a
                ``ZeroRedundancyOptimizer``, or arrays that are split over the elastic dim.
            DistError: When the job cannot continue: fewer than ``min_size`` replicas, a lost
                connection to the store, or an error that recurs although no rank is lost.
            RuntimeError: If no rank has the state and ``restore`` is None.
        """
        managed = ManagedState(state)
        managed.check(self.dim)
        self._state, self._batches, self._restore = managed, batches, restore
        try:
            if self._fresh:
                self._await_place()
            else:
                try:
                    self._gather()
                except DistError as error:
                    self._recover(error)
            while not self._ended and not (self._reached(until) and self._finish()):
                if self._change_due:
                    self._change_epoch(None)
                if self._ended or self._reached(until):
                    continue
                step = Step(self, self.committed, self._share())
                yield step
                if not step.entered:
                    raise RuntimeError("a step was not computed; expected `with step as mesh:`")
            if not self._ended:
                self._job.end_joining()
        finally:
            self._end_interrupter()

    def end_of(self, step: Step, error: BaseException | None) -> bool:
        """Vote for ``step``, whose block ended with ``error``; return True if it was handled."""
        if error is None:
            try:
                quiet = self._vote(step)
            except DistError as broken:
                if isinstance(broken, CollectiveMismatchError):
                    raise
                self._recover(broken, step)
            else:
                self._commit(step)
                self._change_due = not quiet
            return True
        if not self._is_from_loss(error):
            return False
        self._recover(error, step)
        return True

    def _vote(self, step: Step) -> bool:
        """Confirm that all members have finished the step; return False if a change is due.

        A change is due when ranks wait for a place.
        """
        assert self._votes is not None
        waiting = self._job.waiting
        quiet = self.size >= self._full or len(waiting) < self._width
        step.voted = self._batch() or 1
        ballot = np.array([quiet], np.int32)  # a dtype that the compiled core reduces
        self._votes.all_reduce(ballot, ReduceOp.MIN, timeout=self._timeout)
        return bool(ballot[0])

    def _commit(self, step: Step) -> None:
        self.committed += 1
        self.cursor += self._batch()
        self._failed_epochs = 0
        self._job.mark_step(self.committed)
        step.commit()

    def _batch(self) -> int:
        return 0 if self._batches is None else self._batches.batch(self._readers[1])

    def _share(self) -> Any:
        if self._batches is None:
            return None
        return self._batches.share(self.cursor, *self._readers, self._full_readers)

    def _reached(self, until: Until) -> bool:
        if until is None:
            return False
        return until(self.committed) if callable(until) else self.committed >= until

    def _finish(self) -> bool:
        """Return True when all members know that the last step is committed.

        Otherwise the only member that knows the result of the vote might leave.
        """
        assert self._votes is not None
        try:
            self._votes.barrier(timeout=self._timeout)
        except DistError as error:
            self._recover(error)
            return False
        return True

    # ------------------------------------------------------------------ failures

    def _is_from_loss(self, error: BaseException) -> bool:
        """True if ``error`` may be the result of a loss of other ranks.

        ``jax.jit`` raises JAX's own error, with the text of the original error.
        """
        if isinstance(error, CollectiveMismatchError):
            return False
        if isinstance(error, DistError):
            return True
        if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError"):
            return isinstance(error, RuntimeError) and self._is_broken(0)
        return self._is_broken(_EVENT_SECONDS) or "Timeout" in str(error)

    def _is_broken(self, seconds: float) -> bool:
        return self._votes is not None and failure_of(self._votes, seconds) is not None

    def _break(self, error: BaseException) -> None:
        """Abort the step on all members, unless they know already that it failed."""
        if self._votes is not None and not self._is_broken(0):
            self._votes.abort(f"its step failed: {error}")

    def _recover(self, error: BaseException, step: Step | None = None) -> None:
        """Leave the step together with all members, and continue with the remaining ranks."""
        self._break(error)
        self._change_epoch(error, step)

    # ------------------------------------------------------------------ epochs

    def _change_epoch(self, cause: BaseException | None, step: Step | None = None) -> None:
        """Agree on the members of the next epoch and begin it; retry until this succeeds."""
        job = self._job
        while True:
            self._end_interrupter()
            voted = 0 if step is None else step.voted
            report = MemberReport(self.committed, self.cursor, voted, self._fresh)
            change = job.agree_on_epoch(
                proposal=asdict(report),
                choose=self._choose,
                timeout=self._timeout,
                wait=self._join_timeout,
            )
            choice = Choice(**change.chosen["choice"])
            if step is not None:
                if voted and choice.committed > self.committed:
                    self._commit(step)
                else:
                    step.drop(self._state)
                step = None
            if job.rank not in change.epoch.members:
                job.stand_by(change.epoch.number)
                self._await_place()
                return
            job.enter(change)
            try:
                self._begin(change, choice)
            except DistError as error:
                cause = error
                self._break(error)
            else:
                return
            finally:
                self._check_progress(change, cause)

    def _check_progress(self, change: Change, cause: BaseException | None) -> None:
        """Raise ``cause`` after several epochs without a loss or a committed step."""
        before = set(self.history[-2].epoch.members) if len(self.history) > 1 else set[int]()
        unchanged = before == set(change.epoch.members)
        self._failed_epochs = self._failed_epochs + 1 if unchanged else 0
        if self._failed_epochs >= _MAX_FAILED_EPOCHS and cause is not None:
            raise cause

    def _choose(self, reports: Any, missing: Any) -> Any:
        del missing
        waiting, ranks = self._job.waiting, self._mesh.mesh
        found = choose(ranks, self._axis, self._full, self.min_size, reports, waiting)
        if found is None:
            return None
        return {"members": np.ravel(found.ranks).tolist(), "choice": asdict(found)}

    def _gather(self) -> None:
        """Make the groups of the current members, and move the wrappers to them."""
        job = self._job
        self._votes = job.new_group(job.epoch.members, timeout=self._timeout, desc="votes")
        self._interrupter = Interrupter(job, self._votes)
        readers = self._mesh[self._data_dims]
        self._readers = readers.process_group.rank(), readers.size()
        self._state.move_to(self._mesh)

    def _begin(self, change: Change, choice: Choice) -> None:
        """Begin the epoch of ``change``; raise DistError if another rank is lost."""
        started = time.perf_counter()
        self.history.append(change)
        self._change_due = False
        self._mesh = self._mesh.with_ranks(choice.ranks)
        self._gather()
        if choice.stateless:
            self._load()
        else:
            group = self._mesh[self.dim].process_group
            transfer(self._state, group, choice.fresh)
            self.committed, self.cursor = choice.committed, choice.cursor
        self._fresh = False
        self._job.log.info(
            "epoch %d began after %.3f s: %s, from step %d; new: %s; lost: %s",
            change.epoch.number,
            time.perf_counter() - started,
            self._mesh,
            self.committed,
            list(choice.fresh),
            dict(change.missing),
        )

    def _load(self) -> None:
        if self._restore is None:
            raise RuntimeError(
                "no remaining rank has the state of the training; expected steps(restore=...),"
                " which loads a checkpoint"
            )
        self._restore()

    def _await_place(self) -> None:
        """Wait until the members have a place for this rank, and join them."""
        self._fresh = True
        while True:
            change = self._job.await_place()
            if change is None:
                self._ended = True
                return
            self._job.enter(change)
            try:
                self._begin(change, Choice(**change.chosen["choice"]))
            except DistError as error:
                self._recover(error)
            return

    def _end_interrupter(self) -> None:
        if self._interrupter is not None:
            self._interrupter.end()

    # ------------------------------------------------------------------ with

    def __enter__(self) -> Self:
        """Return this object; the end of the block ends its loop."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the loop's background thread."""
        self._end_interrupter()
