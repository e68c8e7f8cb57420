"""The agent of one node: an event loop for its ranks, the terminal's signals and other nodes."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from meshlib._command_line import print_note, reader_is_gone, write_stderr
from meshlib._launcher.nodes.coordinator import Coordinator, StartRanks, Stop, Verdict
from meshlib._launcher.options.launch import LaunchOptions
from meshlib._launcher.options.numa import describe
from meshlib._launcher.ranks.failure import RankExit, Report, rank_list
from meshlib._launcher.ranks.placement import NodePlacement
from meshlib._launcher.ranks.starting import ForkServer
from meshlib._launcher.ranks.sweep import end_strays
from meshlib._launcher.ranks.workers import RankTermination, RankWorker, WorkerGroup
from meshlib._launcher.signals import SignalPipe
from meshlib._trace import HOW_TO_KEEP, RECORDS
from transport import _environment as environment

STDOUT = 1
_print_note = partial(print_note, "meshrun")
_DRAIN_SECONDS = 2.0
_SAME_SIGNAL_SECONDS = 0.5
_CLOCK_STEP = 0.1
"""The maximum lag of a file's time behind the clock, in seconds."""
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Agent:
    """Runs this node's part of a job; ``run`` returns the exit code of the launcher.

    Each attempt has a folder in ``directory``. The ``spare`` children of this process are not
    ranks. ``show`` is called with each attempt's placement; ranks are forked from ``server``.
    """

    def __init__(
        self,
        options: LaunchOptions,
        coordinator: Coordinator,
        signals: SignalPipe,
        run_id: str,
        directory: Path,
        spare: Iterable[int],
        show: Callable[[NodePlacement], None],
        server: ForkServer | None = None,
    ) -> None:
        self._options = options
        self._coordinator = coordinator
        self._signals = signals
        self._run_id = run_id
        self._directory = directory
        self._server = server
        self._show = show
        self._spare = {*spare, server.pid} if server is not None else set(spare)
        self._group: WorkerGroup | None = None
        self._ending: RankTermination | None = None
        self._announced: set[int] = set()
        self._unwritten: OSError | None = None
        self._attempts = 0
        self._begun = time.time() - _CLOCK_STEP
        self._interrupt: signal.Signals | None = None
        self._stopped_elsewhere = False
        self._replaced = 0
        self._leaving: list[RankTermination] = []
        # Local ranks, each with a description of the rank that it replaces.
        self._vacant: deque[tuple[int, str]] = deque()

    def run(self) -> int:
        """Run the job to its end, and release everything."""
        for note in self._options.notes:
            self._note(note)
        try:
            self._coordinator.join()
            while True:
                verdict = self._step()
                if verdict is None:
                    continue
                if not verdict.again:
                    return self._finish(verdict)
                self._restart(verdict)
        finally:
            self._abandon()

    def _step(self) -> Verdict | None:
        """Handle the coordinator's events; if there are none, wait for signals and ranks."""
        events = self._coordinator.poll()
        for event in events:
            match event:
                case NodePlacement():
                    self._start(event)
                case StartRanks(ranks):
                    self._add(ranks)
                case Stop(reason, saves):
                    self._stop(reason, saves=saves)
                case Verdict():
                    return event
        if not events:
            endings = [*self._leaving, *([self._ending] if self._ending else [])]
            due = min((one.due for one in endings), default=None)
            due = None if due is None else due - time.monotonic()
            for number in self._signals.wait(due):
                self._handle(number)
            self._check_ranks()
        return None

    def _start(self, placement: NodePlacement) -> None:
        if self._interrupt is not None:
            self._coordinator.ended([], interrupted=True)
            return
        self._attempts += 1
        self._show(placement)
        folder = self._directory / f"attempt_{placement.attempt}"
        self._announced.clear()
        self._ending = None
        self._stopped_elsewhere = False
        self._group = WorkerGroup(self._options, placement, self._run_id, folder, self._server)
        self._note(
            f"attempt {placement.attempt}: node {placement.node} of {placement.nodes} runs ranks"
            f" {placement.first_rank} to {placement.first_rank + placement.ranks - 1} of"
            f" {placement.world_size}; store at {placement.store_host}:{placement.store_port};"
            f" files in {folder}"
        )
        if self._options.cpus:
            _print_note(describe(self._options.cpus, placement.first_rank))
        spares = self._options.spares
        if spares:
            self._vacant.extend((placement.ranks + number, "") for number in range(spares))
            self._coordinator.want(spares)
        if placement.ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
            self._note("OMP_NUM_THREADS is 1 in each rank; set it to choose another number")

    def _add(self, ranks: range) -> None:
        """Start ``ranks`` in vacant places, unless the ranks are being ended."""
        for rank in ranks:
            if self._group is None or not self._vacant:
                return
            local_rank, lost = self._vacant.popleft()
            self._group.add(rank, local_rank)
            if lost:
                _print_note(f"{lost}; rank {rank} replaces it")

    def _handle(self, number: int) -> None:
        group = self._group
        if number in _ENDING:
            self._interrupted(signal.Signals(number))
        elif group is not None and number in _FORWARDED and not self._options.engine_signals:
            group.signal(signal.Signals(number), stop=False)
        elif number == signal.SIGTSTP:
            if group is not None:
                group.signal(signal.SIGSTOP, stop=False)
            os.kill(os.getpid(), signal.SIGSTOP)
            if group is not None:  # continued by the shell's fg or bg
                group.signal(signal.SIGCONT, stop=False)

    def _interrupted(self, number: signal.Signals) -> None:
        first, self._interrupt = self._interrupt is None, self._interrupt or number
        self._vacant.clear()
        if first:
            saves = number != signal.SIGINT
            leaves = self._options.continues and saves
            self._coordinator.interrupted(leaves=leaves, saves=saves)
        if self._group is None:
            if first:
                self._coordinator.ended([], interrupted=True)
        elif self._ending is not None and not (first and self._stopped_elsewhere):
            self._ending.kill()
        else:
            self._ending = self._ending_by(self._group, number)

    def _ending_by(self, group: WorkerGroup, number: signal.Signals) -> RankTermination:
        options = self._options
        quick = number == signal.SIGINT
        grace = options.failure_grace if quick else options.signal_grace
        first = signal.SIGINT if quick else signal.SIGTERM
        if not options.engine_signals:
            return RankTermination(lambda: group.running, 0.0, grace, first)
        for worker in group.workers:  # the engine sends the signal to every process
            worker.note_external_signal()
        return RankTermination(lambda: group.running, 0.0, grace, None)

    def _ending_after(
        self, failure: RankExit | None, workers: Sequence[RankWorker], *, saves: bool = False
    ) -> RankTermination:
        """End ``workers``, also later ones, because of a failure, or with ``saves`` of a signal."""
        grace = self._options.signal_grace if saves else self._options.failure_grace
        return RankTermination.after_failure(
            lambda: [w for w in workers if w.running], grace, failure
        )

    def _check_ranks(self) -> None:
        group = self._group
        if group is None:
            return
        done = [worker.rank for worker in group.collect() if not worker.has_failed()]
        if done and self._ending is None:
            self._coordinator.finished(done)
        for worker in list(group.workers):
            if worker.rank not in self._announced and worker.has_failed():
                self._announced.add(worker.rank)
                result = worker.result()
                if -result.code in _ENDING and not result.stopped:
                    self._await_same_signal()
                    result = worker.result()
                if not result.stopped:
                    self._rank_failed(group, worker, result)
        if self._ending is not None:
            self._ending.advance()
        self._leaving = [one for one in self._leaving if one.running()]
        for one in self._leaving:
            one.advance()
        if not group.running and not self._vacant:
            self._group = None
            self._ending = None
            self._leaving = []
            left = end_strays(self._run_id, self._spare)
            if left:
                self._note(f"ended {len(left)} processes that the ranks left behind: {left}")
            self._unwritten = group.close(_DRAIN_SECONDS) or self._unwritten
            results = group.results()
            exits = [item for item in results if not item.ok or item.stopped]
            well = len(results) - len(exits)
            self._coordinator.ended(exits, self._interrupt is not None, well)

    def _await_same_signal(self) -> None:
        """Wait briefly for the signal by which an engine ended a rank.

        If this process gets the same signal, the rank has not failed.
        """
        until = time.monotonic() + _SAME_SIGNAL_SECONDS
        while self._options.engine_signals and self._interrupt is None:
            left = until - time.monotonic()
            if left <= 0:
                return
            for number in self._signals.wait(left):
                self._handle(number)

    def _rank_failed(self, group: WorkerGroup, worker: RankWorker, result: RankExit) -> None:
        self._coordinator.failed(result)
        if self._continues_without(group, worker, result):
            return
        if self._ending is None:
            self._ending = self._ending_after(result, group.workers)
        elif result.is_cause:
            self._ending.on_cause()

    def _continues_without(self, group: WorkerGroup, worker: RankWorker, result: RankExit) -> bool:
        """Return whether the other ranks continue, with or without a replacement for ``worker``."""
        limit = self._options.replace
        if not self._options.continues or self._ending is not None or self._interrupt is not None:
            return False
        left = [one for one in group.running if not one.has_failed()]
        if not left and not self._vacant and self._coordinator.alone:
            return False
        lost = f"rank {result.rank} {result.loss.how}"
        if worker.running:  # it has reported its failure, but may take a long time to end
            self._leaving.append(self._ending_after(None, [worker]))
        if self._replaced < limit:
            self._replaced += 1
            self._vacant.append((worker.local_rank, lost))
            self._coordinator.want(1)
        else:
            _print_note(f"{lost}; the other ranks continue")
        return True

    def _stop(self, reason: str, *, saves: bool) -> None:
        self._note(reason)
        self._vacant.clear()
        if self._group is not None and self._ending is None:
            self._stopped_elsewhere = True
            self._ending = self._ending_after(None, self._group.workers, saves=saves)

    def _restart(self, verdict: Verdict) -> None:
        cause = Report(verdict.exits, verdict.error).cause
        if cause is not None:
            reason = f"rank {cause.rank} on {cause.host}: {cause.what_happened()}"
        else:
            reason = verdict.error or "the ranks were ended"
        _print_note(f"{reason}; restarting all ranks")
        self._coordinator.join()

    def _finish(self, verdict: Verdict) -> int:
        report = Report(verdict.exits, verdict.error, self._attempts)
        cause = report.cause
        if cause is not None and cause.wrote_in_vain and reader_is_gone(STDOUT):
            return 128 + signal.SIGPIPE  # as in: meshrun ... | head
        if verdict.exits and all(item.code == os.EX_TEMPFAIL for item in verdict.exits):
            return self._report_resumable(verdict)
        if self._interrupt is not None and (cause is None or not cause.is_cause):
            return self._report_interrupt(self._interrupt, verdict)
        if self._options.quiet and self._coordinator.in_touch:
            return report.code
        if report.code:  # print the cause last
            write_stderr(self._how_to_keep_records(verdict) + report.text() + self._where_to_look())
        else:
            write_stderr(report.text())
        if self._unwritten is not None and not report.code:
            _print_note(f"not all output of the ranks could be written: {self._unwritten.strerror}")
            return 1
        return report.code

    @property
    def _records(self) -> str | Path | None:
        """The user's folder for the ranks' flight records."""
        return self._options.trace_dir or os.environ.get(environment.TRACE_DIR)

    def _how_to_keep_records(self, verdict: Verdict) -> str:
        """Return a line about the flag for flight records, if they would help and are not kept."""
        in_calls = any(item.error and item.error.is_of_calls for item in verdict.exits)
        return f"{HOW_TO_KEEP}\n" if in_calls and not self._records else ""

    def _where_to_look(self) -> str:
        """Return a line with the command that explains this run's flight records, if there are any.

        The folder may also have records of other runs.
        """
        given = self._records
        if not given:
            return ""
        found = Path(given).glob(RECORDS)
        if not any(path.stat().st_mtime >= self._begun for path in found):
            return ""
        command = shlex.join(["meshlib", "trace", str(given)])
        return f"meshrun: what each rank was doing: {command}\n"

    def _report_resumable(self, verdict: Verdict) -> int:
        cause = f"received {self._interrupt.name}" if self._interrupt else verdict.error
        ranks = rank_list(sorted(item.rank for item in verdict.exits))
        _print_note(
            f"{cause + '; ' if cause else ''}{ranks} ended with exit code 75, to be resumed"
        )
        return os.EX_TEMPFAIL

    def _report_interrupt(self, number: signal.Signals, verdict: Verdict) -> int:
        ranks = sorted(item.rank for item in verdict.exits)
        if self._options.quiet:
            return 128 + number
        whom = f"; ended {rank_list(ranks)}" if ranks else ""
        _print_note(f"received {number.name}{whom}")
        return 128 + number

    def _abandon(self) -> None:
        """Kill all ranks after an error of the launcher itself."""
        group, self._group = self._group, None
        if group is not None:
            group.signal(signal.SIGKILL)
            for worker in group.workers:
                worker.process.wait()
            end_strays(self._run_id, self._spare)
            group.close(0.0)

    def _note(self, text: str) -> None:
        if self._options.verbose:
            _print_note(text)
