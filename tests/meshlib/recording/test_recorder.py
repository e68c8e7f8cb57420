"""The ring of records: that of the compiled core, where there is one, and its twin."""

import gc
import inspect
import struct
import sys
import sysconfig
import threading
import time
import weakref

import pytest

from meshlib._calls import fast_path as order
from meshlib._calls.spec import PythonsCallSpec
from meshlib._native import calls as native
from meshlib._recording import recorder
from meshlib._recording.call_report import report_calls
from meshlib._recording.recorder import Record
from transport._calls.header import CallHeader, history_after
from transport._native import core

RINGS = [recorder._CallRing] + ([] if native is None else [native.Ring])


def header(sequence):
    return CallHeader(sequence, 10, -1, 3, 11, 1, history=77).pack()


@pytest.fixture(params=RINGS, ids=lambda ring: ring.__module__)
def make(request):
    """Make a ring; ``open_one(ring, sequence)`` looks like this project's code to it."""

    def make(capacity):
        ring = request.param(capacity, Record, recorder._OwnFiles())
        names = {"ring": ring, "header": header}
        # The twin begins at the third caller up: two of them are always the project's.
        source = (
            "def call_queue(n): return ring.open('g', header(n), 8, -1, True, 5.0)\n"
            "def method(n): return call_queue(n)"
        )
        exec(compile(source, recorder.__file__, "exec"), names)
        return ring, names["method"]

    return make


def test_a_record(make):
    ring, open_one = make(3)
    before = time.monotonic()
    record = open_one(7)
    line = inspect.currentframe().f_lineno - 1
    assert before - 1e-3 <= record.issued <= time.monotonic() + 1e-3
    assert type(record) is Record
    assert record.packed == header(7)
    assert record.header.sequence == 7
    assert (record.group, record.nbytes, record.peer) == ("g", 8, -1)
    assert (record.sync, record.seconds) == (True, 5.0)
    assert record.site == f"{__file__}:{line} in test_a_record"
    assert record.thread == threading.get_ident()
    assert record.label is None
    assert (record.waiting_for, record.completion, record.error) == (None, None, None)
    assert report_calls([record])[0].state == "queued"
    record.start()
    assert report_calls([record])[0].state == "running"
    record.end("it fell")
    assert report_calls([record])[0].state == "failed"
    assert list(ring.copy()) == [record]


def test_the_last_are_kept_in_order(make):
    ring, open_one = make(3)
    for sequence in range(1, 9):
        open_one(sequence)
        kept = [record.header.sequence for record in ring.copy()]
        assert kept == list(range(max(1, sequence - 2), sequence + 1))


def test_who_holds_a_record_keeps_it(make):
    ring, open_one = make(2)
    first = open_one(1)
    first.end("as it was")
    for sequence in range(2, 7):
        open_one(sequence)
    assert (first.header.sequence, first.error) == (1, "as it was")
    assert first not in ring.copy()


def test_a_new_record_has_nothing_of_an_older_one(make):
    ring, open_one = make(1)
    ring.labels[threading.get_ident()] = "named"
    old = open_one(1)
    assert old.label == "named"
    old.start()
    old.waiting_for, old.completion = 3, object()
    old.end("it fell")
    del old
    ring.labels.clear()
    new = open_one(2)
    assert new.packed == header(2)
    assert (new.label, new.error, new.waiting_for, new.completion) == (None,) * 4
    assert (new.started, new.ended) == (0.0, 0.0)


def test_code_that_runs_when_a_record_goes(make):
    """An object that a record referred to may make calls when it is freed."""
    ring, open_one = make(2)

    class Completion:
        def __del__(self):
            made.append(open_one(100 + len(made)))
            seen.append(len(ring.copy()))

    made, seen = [], []
    for sequence in range(1, 5):
        open_one(sequence).completion = Completion()
    gc.collect()
    kept = ring.copy()
    assert len(kept) == 2
    assert len(made) >= 1
    assert all(record.group == "g" and record.packed for record in kept)
    assert max(seen) <= 2
    for record in made:
        record.completion = None


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="that collector begins after 512 new objects of a thread, whatever the threshold",
)
def test_code_that_runs_while_a_record_is_made(make):
    """To make one may collect garbage, and what is called then may make calls."""
    ring, _ = make(2)
    headers = [header(sequence) for sequence in range(40)]
    made, inside, others = [], [], []

    def open_one(sequence):
        return ring.open("g", headers[sequence], 8, -1, True, 5.0)

    def collected(phase, info):
        if not inside and others:
            inside.append(phase)
            made.append(open_one(0))
            inside.clear()

    held = [open_one(sequence) for sequence in range(1, 3)]
    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(6)
    try:
        for sequence in range(3, 40):
            others.clear()
            gc.collect(0)
            # One of these numbers makes the record the one too many.
            for _ in range(sequence % 9):
                others.append(set())
            held.append(open_one(sequence))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
    assert made
    kept = ring.copy()
    # A record that is kept has two more: of the ring, and of what it gave out.
    references = [sys.getrefcount(record) - 2 * (record in kept) for record in held + made]
    assert set(references) == {references[0]}, references
    assert [record.header.sequence for record in held] == list(range(1, 40))


def test_labels_are_a_threads_own(make):
    ring, open_one = make(4)
    ring.labels[threading.get_ident()] = "mine"
    other = []
    thread = threading.Thread(target=lambda: other.append(open_one(1)))
    thread.start()
    thread.join(60)
    assert other[0].label is None
    assert other[0].thread == thread.ident
    assert open_one(2).label == "mine"


def test_followers(make):
    ring, open_one = make(1)
    seen = []
    ring.followers = (seen,)
    records = [open_one(1), open_one(2)]
    ring.followers = ()
    open_one(3)
    assert seen == records


def test_many_files(make):
    """More than are remembered at once, own and others."""
    _, open_one = make(1)
    for number in range(30):
        names = {"open_one": open_one}
        exec(compile("def user(): return open_one(1)", f"<cell {number}>", "exec"), names)
        assert names["user"]().site == f"<cell {number}>:1 in user"


def test_a_generator_is_a_caller(make):
    _, open_one = make(1)

    def generator():
        yield open_one(1)

    assert next(generator()).site.endswith("in generator")


def test_it_goes_with_what_it_keeps(make):
    ring, open_one = make(2)

    class Completion:
        pass

    completion = Completion()
    open_one(1).completion = completion
    gone = weakref.ref(completion)
    # A function at a module's top never goes in CPython 3.13 without the interpreter's lock.
    open_one.__globals__.clear()
    del ring, open_one, completion, make
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(native is None, reason="needs the compiled core")
class TestCompiled:
    def test_bad_arguments(self):
        ring = native.Ring(2, Record, recorder._OwnFiles())
        for args in [(), ("g", b"short", 8, -1, True, 5.0), (1, header(1), 8, -1, True, 5.0)]:
            with pytest.raises(TypeError):
                ring.open(*args)
        with pytest.raises(TypeError):
            ring.open("g", header(1), 8, -1, True, "soon")
        with pytest.raises(OverflowError):
            ring.open("g", header(1), 1 << 70, -1, True, 5.0)
        with pytest.raises(TypeError):
            ring.followers = [[]]
        with pytest.raises(TypeError):
            ring.followers = ((),)
        with pytest.raises(ValueError, match="capacity"):
            native.Ring(0, Record, recorder._OwnFiles())
        with pytest.raises(ValueError, match="CallFields"):
            native.Ring(1, int, recorder._OwnFiles())
        with pytest.raises(TypeError):
            core.CallFields().packed = b"short"
        assert not ring.copy()

    def test_time_is_that_of_the_clock(self):
        """Also once the processor's counter has been compared with it, after 20 ms."""
        ring = native.Ring(1, Record, recorder._OwnFiles())
        end = time.monotonic() + 0.1
        while (before := time.monotonic()) < end:
            issued = ring.open("g", header(1), 8, -1, True, 5.0).issued
            assert before - 1e-4 <= issued <= time.monotonic() + 1e-4


TWINS = [(order.CallOrder, PythonsCallSpec)]
TWINS += [] if native is None else [(native.Order, native.CallSpec)]


@pytest.mark.parametrize(("kind_of_order", "call_spec"), TWINS)
def test_numbers_of_collectives(kind_of_order, call_spec):
    """The same from the compiled core as from its twin."""
    numbers, twin = kind_of_order(), CallHeader(0, 0, 0, 0, 0, 0)
    for fields in [(10, -1, 3, 11, 1, 0), (1 << 40, 7, 9, 0, 255, 2**32 - 1), (0, -1, 1, 0, 0, 0)]:
        elements, root, kind, dtype, op, extra = fields
        twin = CallHeader(
            twin.sequence + 1,
            *(elements, root, kind, dtype, op),
            history=history_after(twin.pack()) if twin.sequence else 0,
            extra=extra,
        )
        spec = call_spec(kind, print, elements, root, dtype, op, extra)
        assert numbers.next_header(spec) == twin.pack()
        assert numbers.history == history_after(twin.pack())
    assert numbers.sequence == 3
    for elements, root, extra in [(-1, -1, 0), (1, 1 << 31, 0), (1, -1, 1 << 32)]:
        with pytest.raises((ValueError, struct.error)):
            numbers.next_header(call_spec(3, print, elements, root, 11, 1, extra))
    assert numbers.sequence == 3


@pytest.mark.parametrize("call_spec", [spec for _, spec in TWINS])
def test_a_call_spec_has_what_it_was_made_of(call_spec):
    plain = call_spec(3, print)
    names = ("kind", "run", "elements", "root", "dtype", "op", "extra", "nbytes", "device", "peer")
    assert [getattr(plain, name) for name in names] == [3, print, 0, -1, 0, 0, 0, 0, "cpu", -1]
    given = [12, print, 5, 1, 11, 2, 7, 40, "cuda", 3]
    for spec in (
        call_spec(*given),
        call_spec(*given[:2], **dict(zip(names[2:], given[2:], strict=True))),
        call_spec(**dict(zip(names, given, strict=True))),
    ):
        assert [getattr(spec, name) for name in names] == given
    for arguments, named in [((3,), {}), ((3, print), {"run": print}), ((3, print), {"size": 1})]:
        with pytest.raises(TypeError):
            call_spec(*arguments, **named)


def test_a_history_tells_headers_apart_that_differ_in_a_field():
    plain = CallHeader(7, 10, -1, 3, 11, 1, history=77, extra=5)
    fields = [{"kind": 1}, {"dtype": 12}, {"op": 2}, {"root": 0}, {"history": 78}, {"sequence": 8}]
    histories = {history_after(plain._replace(**field).pack()) for field in [{}, *fields]}
    assert len(histories) == len(fields) + 1
    assert all(0 <= history < 1 << 16 for history in histories)
