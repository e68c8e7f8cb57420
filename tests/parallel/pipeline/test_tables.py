"""Tables: what schedules cost, what is refused, and files."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.pipeline import (
    Action,
    ActionKind,
    ScheduleTable,
    dual_pipe_v,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    most_held,
    one_f_one_b,
    simulate,
    zbv,
    zero_bubble,
)

SIZES = [(p, m) for p in (2, 3, 4, 8) for m in (2 * p, 4 * p)]


def longer(table):
    """Return by how much of a forward of all of a rank's stages it is longer than its work."""
    each = table.stages // len(table.ranks)
    return simulate(table).makespan / each - 3 * table.microbatches


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubbles_are_those_of_the_papers(p, m):
    assert longer(gpipe(p, m)) == longer(one_f_one_b(p, m)) == 3 * (p - 1)
    assert longer(eager_1f1b(p, m)) == 3 * (p - 1)
    assert simulate(one_f_one_b(p, m)).bubble == pytest.approx((p - 1) / (m + p - 1))
    assert longer(zero_bubble(p, m)) == p - 1
    for v in (2, 3):
        assert longer(interleaved_1f1b(p, m, v)) == pytest.approx(3 * (p - 1) / v)
        assert longer(zero_bubble(p, m, v)) == pytest.approx((p - 1) / v)
    assert longer(zbv(p, m)) == longer(dual_pipe_v(p, m)) == (p - 1) / 2


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_activations_held_are_those_of_the_papers(p, m):
    assert most_held(gpipe(p, m)) == [m] * p
    assert most_held(one_f_one_b(p, m)) == [p - rank for rank in range(p)]
    assert most_held(eager_1f1b(p, m)) == [2 * (p - rank) - 1 for rank in range(p)]
    assert most_held(interleaved_1f1b(p, m, 2)) == [3 * p - 1 - 2 * rank for rank in range(p)]
    assert most_held(zero_bubble(p, m)) == [p] * p
    assert most_held(zbv(p, m)) == [2 * p] * p
    assert most_held(dual_pipe_v(p, m)) == [2 * p + 1] * p


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("message", [0.25, 1.5])
def test_what_messages_cost(p, m, message):
    """In 1F1B each microbatch waits for some, in the eager one only the first and the last."""
    alone = 3 * (p + m - 1)
    eager, plain = (simulate(f(p, m), message=message).makespan for f in (eager_1f1b, one_f_one_b))
    assert eager == pytest.approx(alone + 2 * (p - 1) * message)
    assert plain >= alone + m * message


@settings(max_examples=40, deadline=None)
@given(p=st.integers(1, 5), m=st.integers(1, 11), v=st.integers(1, 3))
def test_any_sizes_make_a_table_or_say_why_not(p, m, v):
    for make in (
        lambda: gpipe(p, m),
        lambda: one_f_one_b(p, m),
        lambda: eager_1f1b(p, m),
        lambda: zero_bubble(p, m),
        lambda: interleaved_1f1b(p, m, v),
        lambda: zero_bubble(p, m, v),
        lambda: zbv(p, m),
        lambda: dual_pipe_v(p, m),
    ):
        try:
            table = make()
        except ValueError as error:
            assert f"microbatches is {m}" in str(error)  # noqa: PT017
            continue
        assert (len(table.ranks), table.microbatches) == (p, m)
        assert ScheduleTable.from_csv(table.to_csv()).ranks == table.ranks
        assert len(simulate(table, message=0.5).spans) == sum(map(len, table.ranks))


def test_a_table_in_torchs_notation():
    text = (
        "0F0,0F1,0F2,,0B0,0B1,,0B2,0REDUCE_GRAD\n"
        ",1F0,1F1,1I0,1W0,(1F2;1B1)OVERLAP_F_B,,1B2,1REDUCE_GRAD\n"
    )
    assert ScheduleTable.from_csv(text).ranks == rows(
        "0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1I0 1W0 1F2 1B1 1B2"
    )


def test_of_files(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("0F0,0F1,,0B0,0B1\n,1F0,1F1,1B0,1I1,1W1\n")
    table = ScheduleTable.from_csv(file)
    assert table.ranks[1][-2:] == (Action(1, ActionKind.INPUT, 1), Action(1, ActionKind.WEIGHT, 1))
    assert table.name == str(file)
    file.write_text("0F0,0B0\n,1F0,1SEND_B0,1B0\n")
    with pytest.raises(ValueError, match=r"own.csv, line 2, column 3: expected an action .*SEND_B"):
        ScheduleTable.from_csv(file)


def rows(*texts):
    return tuple(tuple(map(Action.parse, text.split())) for text in texts)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (rows("0F0 0B0", "1F0"), r"stage 1 has \['F'\] of microbatch 0; expected F and B, or"),
        (rows("0F0 0B0 0W0", "1F0 1B0"), r"stage 0 has \['B', 'F', 'W'\] of microbatch 0"),
        (rows("0F0 0B0", "1F0 1B0 1B0"), "has 1B0 twice"),
        (
            rows("0F0 0B0 1F0", "1B0"),
            "1B0 is on rank 1, but other actions of stage 1 are on",
        ),
        (rows("0F0 0B0", "2F0 2B0"), r"actions of stage 2, but none of stages \[1\]"),
        (rows("0F0 0F2 0B0 0B2"), "stage 0 has nothing of microbatch 1"),
        (rows("0F0 0B0", ""), "rank 1 has no actions"),
        (rows(""), "has no actions"),
        (
            rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "rank 0 at 0B0, which needs 1B0; rank 1 at 1F1, which needs 0F1",
        ),
        (rows("0B0 0F0"), "rank 0 at 0B0, which needs 0F0"),
    ],
)
def test_what_no_pipeline_can_run_is_refused(ranks, message):
    with pytest.raises(ValueError, match=message):
        ScheduleTable(ranks)


def test_times_follow_from_costs():
    costs = {ActionKind.FORWARD: 2.0, ActionKind.BACKWARD: 3.0}
    timing = simulate(one_f_one_b(2, 2), costs, message=1.0)
    spans = {str(span.action): (span.begin, span.end) for span in timing.spans}
    assert spans["1F0"] == (3, 5)
    assert spans["1B0"] == (5, 8)
    assert spans["0B0"] == (9, 12)
    assert timing.makespan == 17
    assert timing.bubble == pytest.approx(1 - 20 / 34)
    assert timing.idle(0) == 7
    assert simulate(gpipe(2, 2), lambda action: action.stage + 1.0).makespan == 10
    with pytest.raises(ValueError, match="the cost of 0F0 is 0"):
        simulate(gpipe(2, 2), lambda action: 0)


def test_counts_are_checked():
    for make in (gpipe, one_f_one_b, eager_1f1b, interleaved_1f1b, zero_bubble, zbv, dual_pipe_v):
        with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
            make(0, 4)
        with pytest.raises(TypeError, match="microbatches"):
            make(2, 2.5)
    with pytest.raises(ValueError, match="5, which is not divisible by the 2 rounds"):
        interleaved_1f1b(2, 5)
    with pytest.raises(ValueError, match="DualPipeV on 2 ranks expects at least 4"):
        dual_pipe_v(2, 3)


def test_all_orders_of_a_small_table_are_judged_right():
    """Brute force: an order is refused exactly when running it one action at a time gets stuck."""
    own = ["0F0", "0F1", "0B0", "0B1"]
    for order in itertools.permutations(own):
        row = rows(" ".join(order), "1F0 1B0 1F1 1B1")
        done, at = set(), [0, 0]
        for _ in range(8):
            for rank in (0, 1):
                if at[rank] < 4:
                    action = row[rank][at[rank]]
                    if all(need in done for need in action.needs(1, split=False)):
                        done.add(action)
                        at[rank] += 1
        if at == [4, 4]:
            assert ScheduleTable(row).stages == 2
        else:
            with pytest.raises(ValueError, match="deadlocks"):
                ScheduleTable(row)
