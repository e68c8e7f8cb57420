"""Reading other members' private memory: one copy instead of two, where the kernel allows it.

``process_vm_readv`` copies from another process's memory into this one's. The kernel asks that both
belong to one user and that no security module objects (Yama's ``ptrace_scope``, a container's
seccomp filter). Nobody ever writes into another's memory: a member that leaves a call early, by an
error, may use its array again at once, and the others, which then read nonsense, fail with it.

The kernel copies with the string instruction that ``copying.copy`` avoids, and has no other. Where
the target begins a few bytes further into a page than the source, as arrays do that came from
``malloc`` one after the other, it takes ten times as long. Then it copies to a better place first,
a piece at a time, and NumPy's loops take it from there while it is in the cache.
"""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np

from transport.call import Call
from transport.communicators.runtime import Membership
from transport.errors import PeerLostError
from transport.operands.copying import PAGE_BITS, address, copy
from transport.operands.reduce_op import Flat
from transport.shm.board.board import Board
from transport.shm.board.segment import PAGE

_PID, _ADDRESS, _NONCE = 0, 1, 2
_NONCE_WORDS = 4
_NONCE_BITS = 63
_WORTH_A_THREAD = 8 << 20
_CLOSE = 32
"""Targets that begin fewer bytes (but some) further into a page than their source are slow."""
_BOUNCED = 256 << 10
"""What is copied to a better place at a time: less than a core's cache, but every call of the
kernel takes some 20 microseconds before it copies.
"""


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class ProcessMemory:
    """Reads the private memory of another process, or of this one. Any thread."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        libc = ctypes.CDLL(None, use_errno=True)
        self._readv = libc.process_vm_readv
        self._readv.restype = ctypes.c_ssize_t
        piece, count = ctypes.POINTER(_Piece), ctypes.c_ulong
        self._readv.argtypes = (ctypes.c_int, piece, count, piece, count, count)

    def read(self, where: int, into: Flat) -> None:
        """Copy what lies at address ``where`` there into ``into``.

        Raises OSError when the process or the memory is not there, or may not be read.
        """
        start, nbytes = address(into), into.nbytes
        if nbytes < _BOUNCED or not 0 < (start - where) & PAGE_BITS < _CLOSE:
            self._copy(where, start, nbytes)
            return
        memory = np.empty(_BOUNCED + PAGE, np.uint8)
        # Half a page further into a page than the source is.
        first = (where + PAGE // 2 - address(memory)) & PAGE_BITS
        raw = into.view(np.uint8)
        for done in range(0, nbytes, _BOUNCED):
            part = raw[done : done + _BOUNCED]
            piece = memory[first : first + part.size]
            self._copy(where + done, address(piece), part.size)
            copy(part, piece)

    def _copy(self, where: int, start: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            here = _Piece(start + done, nbytes - done)
            there = _Piece(where + done, nbytes - done)
            count = self._readv(self.pid, here, 1, there, 1, 0)
            if count <= 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            done += count


class PeerMemory:
    """Reads the private memory of the members whose processes are ``pids``, where there are at
    least ``least`` bytes of it. Any thread.
    """

    def __init__(self, membership: Membership, pids: dict[int, int], least: int) -> None:
        self._membership = membership
        self._memories = {peer: ProcessMemory(pid) for peer, pid in pids.items()}
        self._least = least
        self._cores_to_spare = membership.size <= len(os.sched_getaffinity(0))

    def pays(self, nbytes: int, *, alone: bool = False) -> bool:
        """Whether ``nbytes`` are there sooner when they are read than when their owner stages them.

        ``alone``: as in ``read``. Without that, the owner's core could stage meanwhile.
        """
        helped = alone and self._cores_to_spare
        return nbytes >= max(self._least, _WORTH_A_THREAD if helped else 0)

    def read(self, peer: int, where: int, into: Flat, *, alone: bool = False) -> None:
        """Copy what member ``peer`` has at address ``where`` into ``into``.

        The peer must keep it there until it is told that this is done. ``alone``: it does nothing
        else meanwhile, and nobody else reads; then its core may help. Raises ``PeerLostError`` when
        the process or the memory is not there any more.
        """
        if not (alone and self._cores_to_spare) or into.nbytes < _WORTH_A_THREAD:
            self._read(peer, where, into)
            return
        errors: list[PeerLostError] = []
        raw = into.view(np.uint8)

        def read_rest() -> None:
            try:
                self._read(peer, where + half, raw[half:])
            except PeerLostError as error:
                errors.append(error)

        half = into.nbytes // 2 // PAGE * PAGE
        helper = threading.Thread(target=read_rest, name="meshlib-shm-read", daemon=True)
        helper.start()
        try:
            self._read(peer, where, raw[:half])
        finally:
            helper.join()
        if errors:
            raise errors[0]

    def _read(self, peer: int, where: int, into: Flat) -> None:
        try:
            self._memories[peer].read(where, into)
        except OSError as error:
            name = self._membership.describe(peer)
            why = error.strerror
            raise PeerLostError(f"the memory of {name} cannot be read: {why}", peer) from error


def is_possible() -> bool:
    """Whether this process may try: the C library knows the call."""
    return hasattr(ctypes.CDLL(None), "process_vm_readv")


def _own_pid() -> int:
    return os.getpid()


def agree(board: Board, membership: Membership, call: Call, least: int) -> PeerMemory | None:
    """Find out, before the first call, whether all members can read each other's memory.

    Each shows where it has a random number; who reads that number there has the right process.
    Returns None, on all members, where one of them cannot. Raises what ``Board.meet`` raises.
    """
    nonce = np.frombuffer(os.urandom(8 * _NONCE_WORDS), np.uint64) >> (64 - _NONCE_BITS)
    words = board.words
    board.begin(call)
    mine = board.notes(board.rank)
    possible = is_possible()
    words[mine + _PID] = _own_pid() if possible else 0
    words[mine + _ADDRESS] = address(nonce)
    for i in range(_NONCE_WORDS):
        words[mine + _NONCE + i] = int(nonce[i])
    board.publish(1)
    board.meet(call)
    memory = None
    if possible:
        notes = {peer: board.notes(peer) for peer in board.peers}
        pids = {peer: words[at + _PID] for peer, at in notes.items()}
        memory = PeerMemory(membership, pids, least)
        for peer, at in notes.items():
            if not _proves_right(memory, peer, words[at : at + _NONCE + _NONCE_WORDS].tolist()):
                memory = None
                break
    board.begin(call)
    words[board.notes(board.rank)] = memory is not None
    board.publish(1)
    board.meet(call)
    return memory if all(words[board.notes(rank)] for rank in range(board.size)) else None


def _proves_right(memory: PeerMemory, peer: int, notes: list[int]) -> bool:
    found = np.empty(_NONCE_WORDS, np.uint64)
    try:
        memory.read(peer, notes[_ADDRESS], found)
    except PeerLostError:
        return False
    return notes[_PID] > 0 and found.tolist() == notes[_NONCE:]
