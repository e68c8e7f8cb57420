"""How jobs end under ``meshrun``: failures, signals, and that nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.processes

FAIL_WHEN_READY = """
    while not (os.path.exists('ready-0') and os.path.exists('ready-2')):
        time.sleep(0.01)
    raise ValueError('boom')
""".strip()


def fail_on_rank_1(meshrun, failure, others="time.sleep(600)", *options, env=None):
    """Run 3 ranks, of which rank 1 executes ``failure`` and the rest ``others``."""
    script = meshrun.script(f"""
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {failure}
else:
    {others}
""")
    return meshrun.run("--nproc-per-node", "3", *options, script, env=env)


def test_the_failing_ranks_traceback_comes_last_and_alone(meshrun):
    result = fail_on_rank_1(meshrun, "raise KeyError('what')")
    assert result.code == 1
    script = meshrun.folder / "script.py"
    lines = result.err.splitlines()
    assert lines[0] == "meshrun: ranks 0, 2: ended by meshrun (SIGTERM)"
    assert lines[1].startswith("meshrun: rank 1 on ")
    assert lines[1].endswith("failed: exit code 1:")
    assert lines[2:] == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 4, in <module>',
        "    raise KeyError('what')",
        "KeyError: 'what'",
    ]


@pytest.mark.parametrize(
    ("failure", "code", "last"),
    [
        ("sys.exit(3)", 3, "failed: exit code 3"),
        ("sys.exit('no data')", 1, "failed: exit code 1"),
        ("os._exit(255)", 255, "failed: exit code 255"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
        ("raise SystemExit(300)", 44, "failed: exit code 44"),
        ("raise BaseException('odd')", 1, "BaseException: odd"),
        ("compile('1 +', 'some.py', 'exec')", 1, "SyntaxError: invalid syntax"),
    ],
)
def test_each_way_to_fail_is_named(meshrun, failure, code, last):
    result = fail_on_rank_1(meshrun, failure)
    assert result.code == code
    assert result.err.rstrip().endswith(last)
    assert "rank 1" in result.err


def test_what_a_rank_says_before_sys_exit_is_shown(meshrun):
    assert "no data\n" in fail_on_rank_1(meshrun, "sys.exit('no data')").err


def test_an_error_that_cannot_be_imported_is_found(meshrun):
    path = meshrun.script("def f(:\n")
    result = meshrun.run(path)
    assert result.code == 1
    assert f'  File "{path}", line 1' in result.err
    assert "bootstrap" not in result.err
    assert result.err.endswith("SyntaxError: invalid syntax\n")
    result = meshrun.run("-m", "no.such.module")
    assert result.code == 1
    assert "No module named 'no" in result.err.splitlines()[-1]


def test_an_echo_is_not_taken_for_the_cause(meshrun):
    """Rank 0 and 2 fail first, because of rank 1, which is slow to say why."""
    result = fail_on_rank_1(
        meshrun,
        "time.sleep(0.4); raise ValueError('the cause')",
        "from transport._errors import RankFailedError; raise RankFailedError('rank 1 left', 1)",
        env=meshrun.long_windows(),
    )
    assert "meshrun: ranks 0, 2: RankFailedError: rank 1 left" in result.err
    assert result.err.endswith("ValueError: the cause\n")


def test_an_error_raised_while_handling_an_echo_is_an_echo(meshrun):
    handler = """
    from transport._errors import PeerLostError
    try:
        raise PeerLostError('rank 1 is gone', 1)
    except PeerLostError:
        raise KeyError('cleaning up')
    """.strip()
    cause = "time.sleep(0.4); raise ValueError('the cause')"
    result = fail_on_rank_1(meshrun, cause, handler, env=meshrun.long_windows())
    assert result.err.endswith("ValueError: the cause\n")


def test_echoes_alone_still_have_a_first(meshrun):
    error = "from transport._errors import RankFailedError; raise RankFailedError('rank 9 left', 9)"
    result = fail_on_rank_1(meshrun, error)
    assert result.code == 1
    assert "rank 1 on" in result.err
    assert result.err.endswith("RankFailedError: rank 9 left\n")


def test_ranks_that_ignore_sigterm_are_killed(meshrun):
    others = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"ready-{os.environ['RANK']}", "w").close()
    time.sleep(600)
    """.strip()
    result = fail_on_rank_1(meshrun, FAIL_WHEN_READY, others)
    assert result.code == 1
    assert "ranks 0, 2: ended by meshrun (SIGKILL)" in result.err


def test_a_rank_that_fails_but_cannot_end_fails_the_job(meshrun):
    result = fail_on_rank_1(
        meshrun,
        "import threading; threading.Thread(target=time.sleep, args=(600,)).start();"
        " raise ValueError('stuck')",
        "time.sleep(600)",
        *("--grace-period", "0.5"),
    )
    assert result.code == 1
    assert result.err.endswith("ValueError: stuck\n")


def test_other_ranks_get_time_to_save(meshrun):
    others = """
    def save(number, frame):
        time.sleep(0.5)
        open(f"saved-{os.environ['RANK']}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    open(f"ready-{os.environ['RANK']}", "w").close()
    while True:
        time.sleep(0.01)
    """.strip()
    result = fail_on_rank_1(meshrun, FAIL_WHEN_READY, others)
    assert result.err.endswith("ValueError: boom\n")
    assert (meshrun.folder / "saved-0").exists()
    assert (meshrun.folder / "saved-2").exists()


WAIT_FOREVER = """
    import os, sys, time
    open("ready-" + os.environ["RANK"], "w").close()
    time.sleep(600)
"""


def start_and_wait(meshrun, script, *options, ranks=2):
    process = meshrun.start("--nproc-per-node", str(ranks), *options, meshrun.script(script))
    ready = [meshrun.folder / f"ready-{rank}" for rank in range(ranks)]
    assert meshrun.wait_for(lambda: all(path.exists() for path in ready))
    return process


@pytest.mark.parametrize(
    ("number", "code", "how"),
    [
        (signal.SIGINT, 130, "received SIGINT; ended ranks 0-1"),
        (signal.SIGTERM, 143, "received SIGTERM; ended ranks 0-1"),
        (signal.SIGHUP, 129, "received SIGHUP; ended ranks 0-1"),
    ],
)
def test_a_signal_to_the_launcher_ends_the_job(meshrun, number, code, how):
    process = start_and_wait(meshrun, WAIT_FOREVER)
    process.send_signal(number)
    result = meshrun.finish(process)
    assert result.code == code
    assert result.err == f"meshrun: {how}\n"


SAVE_ON = """
    import os, signal, sys, time
    def save(number, frame):
        print("saving", flush=True)
        time.sleep({seconds})
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.{number}, save)
    open("ready-" + os.environ["RANK"], "w").close()
    while True:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_ranks_get_time_to_save_when_the_launcher_is_told_to_end(meshrun, number):
    process = start_and_wait(meshrun, SAVE_ON.format(number=number, seconds=0.5))
    process.send_signal(getattr(signal, number))
    result = meshrun.finish(process)
    assert sorted(result.out.split()) == ["saved", "saved", "saving", "saving"]
    assert result.code == 128 + getattr(signal, number)


def test_the_grace_period_ends(meshrun):
    script = SAVE_ON.format(number="SIGTERM", seconds=600)
    process = start_and_wait(meshrun, script, "--grace-period", "0.5")
    process.send_signal(signal.SIGTERM)
    result = meshrun.finish(process)
    assert result.code == 143
    assert "saved" not in result.out


def test_a_second_ctrl_c_kills_at_once(meshrun):
    script = SAVE_ON.format(number="SIGINT", seconds=600)
    process = start_and_wait(meshrun, script, "--grace-period", "600")
    process.send_signal(signal.SIGINT)
    for _ in range(2):
        assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGINT)
    result = meshrun.finish(process)
    assert result.code == 130
    assert "saved" not in result.out


def test_user_signals_are_passed_on(meshrun):
    script = """
        import os, signal, time
        got = []
        signal.signal(signal.SIGUSR1, lambda *_: got.append("got it"))
        open("ready-" + os.environ["RANK"], "w").close()
        while not got:
            time.sleep(0.01)
        print(*got, flush=True)
    """
    process = start_and_wait(meshrun, script)
    process.send_signal(signal.SIGUSR1)
    result = meshrun.finish(process)
    assert (result.code, result.out) == (0, "got it\ngot it\n")


LEAVE_BEHIND = """
    import os, subprocess, sys, time
    # A process in a session of its own that ignores everything it can.
    stray = "trap '' TERM INT HUP; touch stray-$RANK; sleep 60 & wait; sleep 60"
    subprocess.Popen(["setsid", "sh", "-c", stray], stdout=subprocess.DEVNULL)
    while not os.path.exists("stray-" + os.environ["RANK"]):
        time.sleep(0.01)
    open("ready-" + os.environ["RANK"], "w").close()
"""


def test_what_ranks_leave_behind_is_ended(meshrun):
    result = meshrun.run("--nproc-per-node", "2", meshrun.script(LEAVE_BEHIND))
    assert result.code == 0
    assert meshrun.processes() == []  # already when the launcher has returned


def test_nothing_survives_a_launcher_that_is_killed(meshrun):
    process = start_and_wait(meshrun, LEAVE_BEHIND + "    time.sleep(600)\n")
    # launcher, guardian, ranks, their strays
    assert meshrun.wait_for(lambda: len(meshrun.processes()) >= 8)
    process.kill()
    process.wait(60)
    assert meshrun.wait_until_gone() == []
    assert meshrun.wait_for(lambda: meshrun.files_left() == [])


def test_the_folder_of_a_launcher_killed_with_its_guardian_goes_with_the_next(meshrun):
    """And those of launchers that run are left alone."""
    killed = start_and_wait(meshrun, WAIT_FOREVER)
    for pid in sorted(meshrun.processes(), reverse=True):  # the guardian before the launcher
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if b"meshlib._launcher" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
    killed.wait(60)
    assert meshrun.wait_until_gone() == []
    (left,) = meshrun.temporary.iterdir()
    waiting = "import os, time\nwhile not os.path.exists('end'): time.sleep(0.01)"
    first = meshrun.start("-n", "2", meshrun.script(waiting, "waiting.py"))
    assert meshrun.wait_for(lambda: not left.exists())
    assert meshrun.wait_for(lambda: len(list(meshrun.temporary.iterdir())) == 1)
    (own,) = meshrun.temporary.iterdir()
    assert meshrun.run("-n", "1", meshrun.script("print('ran')", "second.py")).out == "ran\n"
    assert own.exists()
    (meshrun.folder / "end").touch()
    assert meshrun.finish(first).code == 0
    assert meshrun.files_left() == []


def test_a_killed_rank_takes_its_helpers_along(meshrun):
    result = meshrun.run(
        "--nproc-per-node",
        "2",
        meshrun.script(LEAVE_BEHIND + "    os.kill(os.getpid(), 9)\n"),
    )
    assert result.code == 137
    assert meshrun.processes() == []


def test_the_children_of_a_shell_that_became_the_launcher_are_spared(meshrun):
    script = meshrun.script("print('ran')")
    launcher = " ".join((*meshrun.COMMAND, script))
    command = f"sleep 60 >/dev/null 2>&1 & echo $!; exec {launcher}"
    result = meshrun.run("-c", command, command=["sh"])
    pid, printed = result.out.split()
    assert printed == "ran"
    os.kill(int(pid), signal.SIGKILL)


HANDLERS_THAT_CALL = (PROGRAMS / "handlers_that_call.py").read_text()


def test_a_call_of_a_signal_handler_in_the_middle_of_another_is_refused(meshrun):
    result = meshrun.run("--nproc-per-node", "2", meshrun.script(HANDLERS_THAT_CALL))
    assert result.code == 0, result.err
