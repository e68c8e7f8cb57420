"""The cuda_ipc communicator on a machine made of host memory: the conformance suite, and more."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.support.gpu.host_driver import HostDriver, HostMachine
from tests.support.gpu.on_device import OnDevice
from tests.support.transport.rank_threads import LONG, Member, Transport, run_group
from tests.transport.conformance.test_conformance import (  # noqa: F401 (collected here, over cuda_ipc)
    test_default_thresholds_on_large_arrays,
    test_every_collective_gives_what_the_oracle_gives,
    test_float_sums_are_as_accurate_as_their_reduction_dtype,
    test_no_member_leaves_a_barrier_before_the_last_has_entered,
    test_premul_sum_takes_an_array_of_factors,
    test_results_are_the_same_bits_on_every_rank_and_in_a_second_run,
)
from tests.transport.conformance.test_conformance_faults import (  # noqa: F401
    test_a_deadline_ends_a_call_that_was_under_way,
    test_a_frame_of_another_length_is_refused,
    test_a_peer_that_closes_is_missed_at_once,
    test_abort_wakes_point_to_point_calls,
    test_aborting_and_closing_without_a_call_leaves_nothing,
    test_both_members_of_a_mismatch_raise_and_keep_their_data,
)
from tests.transport.conformance.test_conformance_p2p import (  # noqa: F401
    test_any_source_returns_the_sender_and_keeps_each_ones_order,
    test_messages_match_by_tag_and_never_overtake,
)
from transport._calls.header import Kind
from transport._choosing.choice import Thresholds
from transport._communicators.runtime import Membership
from transport._cuda_ipc import CudaIpcCommunicator
from transport._errors import CommunicatorAbortedError, CommunicatorTimeoutError, DistBackendError
from transport._operands.reduce_op import ReduceOp
from transport._shm import ShmCommunicator
from transport._waiting.deadline import Deadline


def make(membership: Membership, table: Thresholds) -> OnDevice:
    """All ranks on one GPU, as if each were a process."""
    machine = membership.store.in_process("machine", HostMachine)
    comm = CudaIpcCommunicator(membership, ShmCommunicator(membership))
    return OnDevice(comm, HostDriver(machine))


IPC = Transport("cuda_ipc", make, has_links=False, shows_links=False, on_device=True)


@pytest.fixture(params=[IPC], ids=str)
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param


def on_device(member: Member) -> OnDevice:
    assert isinstance(member.comm, OnDevice)
    return member.comm


def issue(member: Member, timeout: float = LONG):
    array = np.ones(5, np.float32)
    flat = on_device(member).upload(array)
    call = member.call(Kind.ALL_REDUCE, array.dtype, 5, ReduceOp.SUM, timeout=timeout)
    on_device(member).comm.all_reduce(call, flat, ReduceOp.SUM)
    return flat, call.completion


def test_a_failed_call_may_let_go_of_its_memory_before_the_device_is_there() -> None:
    def body(member: Member) -> None:
        on_device(member).upload(np.ones(4, np.float32))
        on_device(member).driver.machine.pump()

    run_group(IPC, 2, body)


def test_a_peer_whose_stream_is_held_up_holds_the_others_until_the_deadline() -> None:
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        machine = on_device(member).driver.machine
        member.all_reduce(np.ones(2, np.float32), ReduceOp.SUM)
        gate.wait()
        if member.rank == 1:
            machine.hold(on_device(member).stream)
        gate.wait()
        _, completion = issue(member, 0.4)
        assert not completion.over()
        with pytest.raises((CommunicatorTimeoutError, CommunicatorAbortedError)):
            completion.wait(Deadline.after(LONG))
        gate.wait()
        machine.release(on_device(member).stream)

    run_group(IPC, 2, body)


def test_abort_lets_the_waiting_kernels_end() -> None:
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        machine = on_device(member).driver.machine
        member.all_reduce(np.ones(2, np.float32), ReduceOp.SUM)
        gate.wait()
        if member.rank == 1:
            machine.hold(on_device(member).stream)
        gate.wait()
        flat, completion = issue(member)
        if member.rank == 0:
            on_device(member).comm.abort("enough of this")
            deadline = Deadline.after(LONG)
            while not completion.over():
                assert not deadline.expired
            with pytest.raises(CommunicatorAbortedError, match="enough of this"):
                completion.join()
            assert flat.size == 5  # its memory was held until here
        gate.wait()
        machine.release(on_device(member).stream)

    run_group(IPC, 2, body)


def test_what_is_opened_is_closed_and_opened_once() -> None:
    machines: list[HostMachine] = []

    def body(member: Member) -> None:
        comm = on_device(member)
        machines.append(comm.driver.machine)
        for _ in range(10):
            member.all_reduce(np.ones(64, np.float32), ReduceOp.SUM)

    run_group(IPC, 3, body)
    assert machines[0].opened == []


def test_what_was_not_read_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport._cuda_ipc.offers._OPEN_AT_MOST", 3)

    def body(member: Member) -> None:
        comm = on_device(member)
        for turn in range(12):
            values = np.full(5, member.rank + turn)
            flat = comm.upload(values)
            # Like a pool's: the memory stays, and each call is on another allocation.
            comm.driver.keep(flat.order.owner)
            call = member.call(Kind.ALL_REDUCE, values.dtype)
            comm.comm.all_reduce(call, flat, ReduceOp.SUM)
            comm.download(call, [(values, flat)])
            assert (values == 1 + 2 * turn).all()
        # On each of the two: the counters, and at most so many and that of the last call.
        opened = comm.driver.machine.opened
        assert 4 <= len(opened) <= 2 * (1 + 3 + 1)
        flags = comm.comm._device._flags
        assert flags[1 - member.rank] - 8 * member.rank in opened

    run_group(IPC, 2, body)


def test_memory_that_cannot_be_shared_goes_by_way_of_the_host() -> None:
    def body(member: Member) -> None:
        comm = on_device(member)
        member.all_reduce(np.ones(2, np.float32), ReduceOp.SUM)
        if member.rank == 1:

            def refuse(pointer: int) -> tuple[bytes, int]:
                raise DistBackendError("not out of this pool")

            comm.driver.share = refuse
        buffer = np.full(9, member.rank + 1, np.float32)
        member.all_reduce(buffer, ReduceOp.SUM)
        assert (buffer == 6).all()

    run_group(IPC, 3, body)


def test_an_offer_of_part_of_an_allocation_has_its_offset() -> None:
    """The suite's buffers begin 64 bytes into theirs; here, elsewhere for each rank."""

    def body(member: Member) -> None:
        comm = on_device(member)
        values = np.arange(100, dtype=np.int32)
        flat = comm.upload(values)[10 * member.rank : 10 * member.rank + 10]
        outs = [comm.upload(np.zeros(10, np.int32)) for _ in range(member.size)]
        call = member.call(Kind.ALL_GATHER, np.int32)
        comm.comm.all_gather(call, outs, flat)
        result = [np.zeros(10, np.int32) for _ in outs]
        comm.download(call, list(zip(result, outs, strict=True)))
        assert (np.concatenate(result) == np.arange(10 * member.size)).all()

    run_group(IPC, 3, body)
