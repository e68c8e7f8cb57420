"""Large all_reduces in the engine, of real processes: bits and errors."""

from __future__ import annotations

import pytest

from tests.support.meshlib.compiled import JOIN, NEEDS_CORE

pytestmark = NEEDS_CORE

START = (
    JOIN
    + """
    BLOCK = 512 << 10
"""
)

SAME = (
    START
    + """
    np.seterr(all="ignore")
    combine = {SUM: np.add, AVG: np.add, PRODUCT: np.multiply, MIN: np.minimum, MAX: np.maximum}
    noise = np.random.default_rng(11).integers(0, 256, 4 * BLOCK, np.uint8)

    def parts_of(number, dtype, count):
        # The same on all ranks, and every bit counts.
        for of in range(size):
            bits = np.roll(noise, 64 * (7 * number + 3 * of))[: count * np.dtype(dtype).itemsize]
            if dtype in ("f4", "f8"):
                yield (bits.view("i" + dtype[1]) >> 7).astype(dtype)
            else:
                yield bits.copy().view(dtype)

    def merged(parts, ufunc):
        if len(parts) == 1:
            return parts[0]
        half = 1 << (len(parts) - 1).bit_length() - 1
        return ufunc(merged(parts[:half], ufunc), merged(parts[half:], ufunc))

    def reduced(parts, op):
        total = merged(parts, combine[op])
        return total / total.dtype.type(size) if op is AVG else total

    room = group.empty(3 * BLOCK + 1024, np.uint8)
    number = 0
    for dtype in ("f4", "f8", "i4", "u4", "i8", "u8", "i2"):
        full = BLOCK // np.dtype(dtype).itemsize
        for op in combine:
            if op is AVG and dtype[0] != "f":
                continue
            for count in (full - 1, 2 * full + 19):
                number += 1
                parts = list(parts_of(number, dtype, count))
                wanted = reduced(parts, op).tobytes()
                x = parts[rank].copy()
                assert dist.all_reduce(x, op) is x
                assert x.tobytes() == wanted, (dtype, op, count)
                if number % 3 == 0:
                    x = room[: parts[rank].nbytes].view(dtype)
                    x[:] = parts[rank]
                    dist.all_reduce(x, op)
                    assert x.tobytes() == wanted, (dtype, op, count, "symmetric")
    # One member's array alone is symmetric; one that is not aligned; and several calls at once.
    for who in range(size):
        x = room[: 4 * 300_001].view("f4") if rank == who else np.empty(300_001, "f4")
        x[:] = rank
        dist.all_reduce(x)
        assert (x == sum(range(size))).all()
    odd = np.zeros(4 * 300_000 + 1, np.uint8)[1:].view("f4")
    odd[:] = rank + 1
    dist.all_reduce(odd)
    assert (odd == sum(range(size + 1))).all()
    arrays = [np.full(150_000 + i, float(i)) for i in range(4)]
    works = [dist.all_reduce(array, async_op=True) for array in arrays]
    x = np.ones(200_000)
    dist.all_reduce(x)
    [work.wait() for work in works]
    assert (x == size).all() and all((a == i * size).all() for i, a in enumerate(arrays))
    # Calls of all sorts, one after the other, with members that come late.
    same, own = random.Random(1), random.Random(rank)
    for number in range(120):
        kind, count = same.randrange(4), same.choice((2, 3000, 40_000, 140_000, 300_000))
        if own.random() < 0.1:
            time.sleep(0.001)
        x = np.arange(number, number + count, dtype="f4") + rank
        if kind == 3:
            dist.broadcast(x, src=number % size)
            assert (x == np.arange(number, number + count, dtype="f4") + number % size).all()
        else:
            dist.all_reduce(x, MAX if kind == 2 else SUM)
            wanted = np.arange(number, number + count, dtype="f8") + (size - 1 if kind == 2 else 0)
            if kind != 2:
                wanted = wanted * size + sum(range(size))
            assert (x == wanted).all(), (number, kind, count)
    print("same", flush=True)
    dist.destroy_process_group()
"""
)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bits_are_numpy_s(meshrun, ranks):
    result = meshrun.run("--nproc-per-node", str(ranks), meshrun.script(SAME))
    assert result.code == 0, result.err
    assert result.out.split() == ["same"] * ranks


WRONG = (
    START
    + """
    def fails(call):
        begin = time.monotonic()
        try:
            call()
        except dist.DistError as error:
            return type(error).__name__, str(error), time.monotonic() - begin
        raise AssertionError("nothing was raised")

    large = np.ones(400_000, "f4")
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    for each in groups:
        dist.all_reduce(large.copy(), group=each)
    kind, said, took = fails(lambda: dist.all_reduce(large, (SUM, PRODUCT)[rank], group=groups[0]))
    assert kind == "CollectiveMismatchError" and "PRODUCT" in said and took < 30, said
    groups[1].set_timeout(0.4)
    if rank:
        wait_for_news(groups[1])
    kind, said, took = fails(lambda: dist.all_reduce(large, group=groups[1]))
    assert kind == "CollectiveTimeoutError" and "rank 1" in said and took < 30, (said, took)

    # What Python is asked for while others come late: it waits, and may be interrupted.
    if rank == 0:
        interrupt_soon()
        try:
            dist.all_reduce(large, group=groups[2])
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    else:
        wait_for_news(groups[2])
        kind, said, _ = fails(lambda: dist.all_reduce(large, group=groups[2]))
        assert "KeyboardInterrupt" in said, said
        print("told", flush=True)
    dist.destroy_process_group()
"""
)


def test_what_goes_wrong_is_raised_as_ever(meshrun):
    result = meshrun.run("--nproc-per-node", "2", meshrun.script(WRONG))
    assert result.code == 0, result.err
    assert sorted(result.out.split()) == ["interrupted", "told"]


KILLED = (
    START
    + """
    large = np.ones(8 << 20, "f4")
    dist.all_reduce(large)
    if rank == 1:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), 9)).start()
    try:
        while True:
            dist.all_reduce(large, MAX)
    except dist.RankFailedError as error:
        assert "rank 1" in str(error), error
        print("missed", flush=True)
    os._exit(0)
"""
)


def test_a_rank_that_is_killed_in_the_middle_is_missed(meshrun):
    result = meshrun.run("--nproc-per-node", "2", meshrun.script(KILLED))
    assert "missed" in result.out, result.err
