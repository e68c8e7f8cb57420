"""The NCCL communicator over a fake NCCL: values, streams, meeting, and its ends."""

from __future__ import annotations

import threading
import time
import warnings

import numpy as np
import pytest

from tests.support.gpu.fake_nccl import FakeNccl, channel, make_nccl
from tests.support.gpu.host_driver import HostDriver, HostMachine
from tests.support.gpu.on_device import OnDevice
from tests.support.transport.rank_threads import LONG, TINY, Member, Transport, run_group
from tests.transport.conformance.test_conformance import (  # noqa: F401 (collected here, over NCCL)
    test_default_thresholds_on_large_arrays,
    test_every_collective_gives_what_the_oracle_gives,
    test_no_member_leaves_a_barrier_before_the_last_has_entered,
    test_premul_sum_takes_an_array_of_factors,
)
from tests.transport.conformance.test_conformance_p2p import (  # noqa: F401
    test_any_source_returns_the_sender_and_keeps_each_ones_order,
    test_messages_match_by_tag_and_never_overtake,
)
from transport._calls.header import Kind
from transport._choosing.choice import DEFAULT, Thresholds
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._cuda import DeviceFlat
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
)
from transport._nccl import NcclCommunicator, library
from transport._nccl.library import check_version, has_provider, load_nccl, version_text
from transport._operands.reduce_op import ReduceOp
from transport._waiting.deadline import Deadline

NCCL = Transport("nccl", make_nccl, has_links=False, shows_links=False, on_device=True)


@pytest.fixture(params=[NCCL], ids=str)
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param


def on_device(member: Member) -> OnDevice:
    assert isinstance(member.comm, OnDevice)
    return member.comm


def nccl(member: Member) -> NcclCommunicator:
    comm = on_device(member).comm
    assert isinstance(comm, NcclCommunicator)
    return comm


def machine_of(member: Member) -> HostMachine:
    return on_device(member).driver.machine


def test_every_communicator_of_nccl_is_given_back_once() -> None:
    libraries: list[FakeNccl] = []

    def body(member: Member) -> None:
        member.all_reduce(np.ones(3, np.float32), ReduceOp.SUM)
        libraries.append(nccl(member)._connection.library)

    run_group(NCCL, 3, body)
    assert [[comm.state for comm in library.comms] for library in libraries] == [["destroyed"]] * 3


def no_fallback() -> Communicator[DeviceFlat]:
    raise AssertionError("the fallback is not needed here")


def shared_gpu(membership: Membership, table: Thresholds) -> OnDevice:
    machine = membership.store.in_process("machine", HostMachine)
    driver = HostDriver(machine)
    return OnDevice(
        NcclCommunicator(membership, no_fallback, channel(membership), FakeNccl(driver)), driver, 0
    )


def test_two_ranks_on_one_gpu_get_an_error_with_the_remedy() -> None:
    def body(member: Member) -> None:
        with pytest.raises(DistBackendError) as refused:
            member.all_reduce(np.ones(3, np.float32), ReduceOp.SUM)
        for part in ("rank 4", "rank 7", "GPU host:0", "LOCAL_RANK", "cuda:cuda_ipc"):
            assert part in str(refused.value)

    run_group(Transport("shared", shared_gpu), 2, body, global_ranks=(4, 7))


def test_members_with_different_releases_of_nccl_get_an_error() -> None:
    def make(membership: Membership, table: Thresholds) -> OnDevice:
        driver = HostDriver(membership.store.in_process("machine", lambda: HostMachine(2)))
        library = FakeNccl(driver, 22703 + 100 * membership.rank)
        comm = NcclCommunicator(membership, no_fallback, channel(membership), library)
        return OnDevice(comm, driver, membership.rank)

    def body(member: Member) -> None:
        with pytest.raises(DistBackendError, match=r"rank 0 has NCCL 2\.27\.3, rank 1 2\.28\.3"):
            member.all_reduce(np.ones(3, np.float32), ReduceOp.SUM)

    run_group(Transport("versions", make), 2, body)


def test_an_error_of_the_provider_names_the_call() -> None:
    class OwnError(Exception):
        """No RuntimeError, as nccl4py's is none."""

    def body(member: Member) -> None:
        member.all_reduce(np.ones(3, np.float32), ReduceOp.SUM)
        provider = nccl(member)._connection.library
        provider.errors = (OwnError,)

        def broken(*_: object) -> None:
            raise OwnError("UnhandledCudaError (1)")

        provider.comms[0].all_reduce = broken
        provider.comms[0].destroy = broken
        with pytest.raises(DistBackendError, match="NCCL failed in call #2 all_reduce"):
            member.all_reduce(np.ones(3, np.float32), ReduceOp.SUM)

    run_group(NCCL, 1, body)


@pytest.mark.parametrize("name", ["Nccl4Py", "CupyNccl"])
def test_the_providers_load_without_a_gpu_where_they_are_installed(name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            provider = getattr(library, name)()
    except Exception as missing:  # noqa: BLE001 (as load_nccl does)
        pytest.skip(f"not installed here: {missing}")
    check_version(provider)
    assert len(provider.unique_id()) == 128
    if not gpus():
        with pytest.raises(provider.errors, match=r"(?i)cuda"):
            provider.join(1, 0, provider.unique_id())


def gpus() -> int:
    from transport._cuda import cuda_driver

    try:
        return cuda_driver().device_count()
    except DistBackendError:
        return 0


def test_an_nccl_that_is_too_old_is_refused() -> None:
    with pytest.raises(DistBackendError, match=r"NCCL 2\.8\.4 is too old; expected 2\.10\.0"):
        check_version(FakeNccl(HostDriver(), 2804))
    assert version_text(22703) == "2.27.3"


def test_without_nccl_the_error_names_the_package() -> None:
    if has_provider():
        pytest.skip("NCCL is installed here")
    with pytest.raises(DistBackendError, match=r"pip install nccl4py .* 'cuda:staged'"):
        load_nccl()


def test_a_missing_member_is_named_at_the_deadline() -> None:
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        if member.rank == 0:
            late_text = "rank 1 to come|not all members made the call|rank 1 has not entered"
            with pytest.raises(CommunicatorTimeoutError, match=late_text) as late:
                member.all_reduce(np.ones(3, np.float32), ReduceOp.SUM, timeout=0.3)
            assert late.value.peer == 1
        gate.wait()

    run_group(NCCL, 2, body)


def issue(member: Member, timeout: float = LONG) -> tuple[DeviceFlat, object]:
    """Make an all_reduce as the floor above does: it returns when the work is on a stream."""
    array = np.ones(5, np.float32)
    flat = on_device(member).upload(array)
    call = member.call(Kind.ALL_REDUCE, array.dtype, 5, ReduceOp.SUM, timeout=timeout)
    nccl(member).all_reduce(call, flat, ReduceOp.SUM)
    return flat, call.completion


def test_a_call_that_a_member_does_not_make_ends_at_its_deadline() -> None:
    """The host is not held by it; who asks for its end, or calls again, gets the error."""
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        member.all_reduce(np.ones(2, np.float32), ReduceOp.SUM)
        if member.rank == 0:
            _, completion = issue(member, 0.3)
            with pytest.raises(
                CommunicatorTimeoutError, match=r"has not made the call|not all members"
            ):
                completion.wait(Deadline.after(LONG))
            with pytest.raises(CommunicatorTimeoutError):
                completion.join()
            with pytest.raises((CommunicatorTimeoutError, CommunicatorAbortedError)):
                member.all_reduce(np.ones(2, np.float32), ReduceOp.SUM)
        gate.wait()

    run_group(NCCL, 2, body)


def test_an_error_that_nccl_reports_ends_the_calls_under_way() -> None:
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        member.all_reduce(np.ones(2, np.float32), ReduceOp.SUM)
        if member.rank == 0:
            _, completion = issue(member)
            next(iter(machine_of(member).__dict__["cliques"].values())).error = "remote error"
            with pytest.raises(DistBackendError, match="NCCL reports remote error"):
                completion.wait(Deadline.after(LONG))
        gate.wait()

    run_group(NCCL, 2, body)


def test_abort_never_blocks_and_ends_the_calls_under_way() -> None:
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        member.all_reduce(np.ones(2, np.float32), ReduceOp.SUM)
        if member.rank == 0:
            _, completion = issue(member)
            nccl(member).abort("enough of this")
            nccl(member).abort("again")
            with pytest.raises(CommunicatorAbortedError, match="enough of this"):
                completion.wait(Deadline.after(LONG))
            with pytest.raises(CommunicatorAbortedError, match="enough of this"):
                member.all_reduce(np.ones(2, np.float32), ReduceOp.SUM)
        gate.wait()

    run_group(NCCL, 2, body)


def test_issuing_does_not_wait_for_the_device() -> None:
    def body(member: Member) -> None:
        stream = on_device(member).stream
        machine_of(member).hold(stream)
        _, completion = issue(member)
        assert not completion.done()
        machine_of(member).release(stream)
        assert completion.wait(Deadline.after(LONG))

    run_group(NCCL, 1, body)


def test_an_array_on_another_device_than_the_first_is_refused() -> None:
    def body(member: Member) -> None:
        member.all_reduce(np.ones(2, np.float32), ReduceOp.SUM)
        on_device(member).device = 1
        with pytest.raises(ValueError, match=r"on cuda:1, but .* cuda:0"):
            member.all_reduce(np.ones(2, np.float32), ReduceOp.SUM)

    run_group(NCCL, 1, body)


def test_calls_leave_no_thread() -> None:
    before = set(threading.enumerate())
    run_group(NCCL, 2, lambda member: member.all_reduce(np.ones(2, np.float32), ReduceOp.SUM), TINY)
    run_group(NCCL, 2, lambda member: member.comm.abort("never mind"), DEFAULT)
    deadline = Deadline.after(LONG)
    while set(threading.enumerate()) - before:
        assert not deadline.expired, set(threading.enumerate()) - before
        time.sleep(0.01)
