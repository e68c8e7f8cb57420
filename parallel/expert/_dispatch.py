"""Tokens on their way to their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshlib import ProcessGroup
from parallel._arrays import Array, namespace
from parallel._core.experts import by_arrival, by_expert


class Dispatch:
    """Where each choice of the tokens here goes: the plan of one forward pass and its backward.

    Rows are sorted by expert, sent to the expert's rank, and sorted by expert there again, over
    those of all ranks. Only rows are sent that an expert works on, as many as there are, with no
    padding: an uneven all-to-all, after one of a count for each expert. Lepikhin et al., "GShard",
    arXiv:2006.16668, algorithm 2, with rows in place of its masks.

    All ranks of ``group`` make one at the same time.

    Args:
        experts: the experts that each token chose, (tokens, top_k), the best first.
        count: how many experts there are; rank i of ``group`` has the i-th equal part of them.
        group: the ranks that have them. None: all are here.
        capacity: how many rows each expert takes from this rank; those beyond are dropped: last
            choices first, and of these the last tokens. None: all.
    """

    def __init__(
        self,
        experts: Array,
        count: int,
        group: ProcessGroup | None = None,
        capacity: int | None = None,
    ) -> None:
        xp = namespace(experts)
        tokens, top_k = experts.shape
        self.tokens: int = int(tokens)
        self.top_k: int = int(top_k)
        self._group = group if group is not None and group.size() > 1 else None
        rows, counts = by_expert(xp, experts, count, capacity)
        counts = _on_host(counts)
        rows = rows[: int(counts.sum())]
        self.rows: Array = rows
        """The choices that are sent, in the order in which they are: choice * tokens + token."""
        self._merge: Array | None = None
        self._exchange_counts(counts)

    def _exchange_counts(self, counts: Any) -> None:
        group = self._group
        if group is None:
            self.counts: list[int] = counts.tolist()
            """How many rows each of the experts here gets, from all ranks."""
            self._sent = self._received = [len(self.rows)]
            return
        outgoing = np.ascontiguousarray(counts.reshape(group.size(), -1), dtype=np.int64)
        incoming = np.empty_like(outgoing)
        group.all_to_all_single(incoming, outgoing)
        self.counts = incoming.sum(axis=0).tolist()
        self._sent = outgoing.sum(axis=1).tolist()
        self._received = incoming.sum(axis=1).tolist()
        if incoming.shape[1] > 1:
            order = by_arrival(np, incoming, int(incoming.sum()))
            self._merge = namespace(self.rows).asarray(order)

    @property
    def dropped(self) -> int:
        """How many choices of the tokens here no expert takes."""
        return self.tokens * self.top_k - len(self.rows)

    @property
    def tokens_of_rows(self) -> Array:
        """Which token each row is of."""
        return self.rows % max(self.tokens, 1)

    def send(self, rows: Array) -> Callable[[], Array]:
        """Begin to send rows, (sent, d), to their experts.

        What is returned waits and gives the rows of the experts here, (received, d), in their
        order. ``rows`` must be left alone until then.
        """
        arrived = self._move(rows, self._received, self._sent)

        def finish() -> Array:
            received = arrived()
            return received if self._merge is None else received[self._merge]

        return finish

    def send_back(self, rows: Array) -> Callable[[], Array]:
        """Begin to send the experts' rows, (received, d), to where they came from.

        What is returned waits and gives the rows in the order of ``rows``, (sent, d).
        """
        if self._merge is not None:
            parted = namespace(rows).empty_like(rows)
            parted[self._merge] = rows
            rows = parted
        return self._move(rows, self._sent, self._received)

    def _move(self, rows: Array, into: list[int], out_of: list[int]) -> Callable[[], Array]:
        group = self._group
        if group is None:
            return lambda: rows
        xp = namespace(rows)
        result = xp.empty((sum(into), rows.shape[1]), dtype=rows.dtype)
        work = group.all_to_all_single(
            result, xp.ascontiguousarray(rows), into, out_of, async_op=True
        )

        def finish() -> Array:
            work.wait()
            return result

        return finish

    def by_choice(self, rows: Array) -> Array:
        """Return rows, (sent, d), by choice and token: (top_k, tokens, d); dropped ones are 0."""
        whole = namespace(rows).zeros((self.top_k * self.tokens, rows.shape[1]), dtype=rows.dtype)
        whole[self.rows] = rows
        return whole.reshape(self.top_k, self.tokens, rows.shape[1])


def _on_host(counts: Array) -> Any:
    """Return small integers as a NumPy array: the sizes of messages are known on the host."""
    return counts.get() if hasattr(counts, "get") else counts
