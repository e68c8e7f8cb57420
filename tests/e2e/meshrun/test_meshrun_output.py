"""Where the output of ranks goes under ``meshrun``, and that lines stay whole."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

TALK = """
    import os, sys
    for i in range(300):
        print("rank", os.environ["RANK"], "line", i, "x" * (i % 97), "end")
    print("rank", os.environ["RANK"], "complains", file=sys.stderr)
"""


def lines_of(rank, prefix=""):
    return [f"{prefix}rank {rank} line {i} {'x' * (i % 97)} end" for i in range(300)]


def test_lines_stay_whole_in_a_pipe(meshrun):
    result = meshrun.run("--nproc-per-node", "4", meshrun.script(TALK))
    got = result.out.splitlines()
    for rank in range(4):
        assert [line for line in got if line.startswith(f"rank {rank} ")] == lines_of(rank)
    assert len(got) == 1200
    assert sorted(result.err.splitlines()) == [f"rank {rank} complains" for rank in range(4)]


def test_each_line_may_begin_with_its_rank(meshrun):
    result = meshrun.run("--nproc-per-node", "2", "--prefix", meshrun.script(TALK))
    for rank in range(2):
        mine = [line for line in result.out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine == lines_of(rank, f"[rank {rank}] ")
        assert f"[rank {rank}] rank {rank} complains\n" in result.err


def test_a_last_line_without_an_end_is_shown(meshrun):
    script = meshrun.script("import os; print('rank', os.environ['RANK'], end='')")
    result = meshrun.run("--nproc-per-node", "2", script)
    assert sorted(result.out.splitlines()) == ["rank 0", "rank 1"]


def test_bytes_that_are_no_text_pass_unchanged(meshrun):
    line = bytes(set(range(256)) - set(b"\r\n")) + b"\n"
    script = meshrun.script(f"import os; os.write(1, {line!r})")
    result = meshrun.run("--nproc-per-node", "2", script, encoding="latin-1")
    assert result.out == line.decode("latin-1") * 2


def test_a_very_long_line_does_not_fill_the_memory_and_is_complete(meshrun):
    script = meshrun.script("import os; os.write(1, b'y' * (3 << 20))")
    result = meshrun.run("--nproc-per-node", "2", script)
    assert result.out.count("y") == 6 << 20


def test_only_chosen_ranks_are_shown(meshrun):
    script = meshrun.script(TALK)
    result = meshrun.run("--nproc-per-node", "3", "--local-ranks-filter", "0,2", script)
    assert {line.split()[1] for line in result.out.splitlines()} == {"0", "2"}
    assert "rank 1" not in result.err


def logs(meshrun, folder="logs"):
    """Return the contents of the one run's log files by their path inside it."""
    (run,) = (meshrun.folder / folder).iterdir()
    return {
        str(path.relative_to(run)): path.read_text() for path in run.rglob("*") if path.is_file()
    }


def test_a_log_dir_keeps_everything(meshrun):
    result = meshrun.run("--nproc-per-node", "2", "--log-dir", "logs", meshrun.script(TALK))
    assert "[rank 1] rank 1 line 7 xxxxxxx end" in result.out.splitlines()
    files = logs(meshrun)
    for rank in range(2):
        assert files[f"attempt_0/{rank}/stdout.log"].splitlines() == lines_of(rank)
        assert files[f"attempt_0/{rank}/stderr.log"] == f"rank {rank} complains\n"
    assert len(files) == 4


def test_streams_can_be_redirected_rank_by_rank(meshrun):
    result = meshrun.run(
        *("--nproc-per-node", "2", "--log-dir", "logs", "-r", "0:3,1:2", "-t", "1:1"),
        meshrun.script(TALK),
    )
    assert set(logs(meshrun)) == {
        f"attempt_0/{name}.log" for name in ("0/stdout", "0/stderr", "1/stdout", "1/stderr")
    }
    assert {line.split(" line")[0] for line in result.out.splitlines()} == {"[rank 1] rank 1"}
    assert result.err == ""


def test_a_log_keeps_every_ranks_traceback_and_the_last_words_of_the_killed(meshrun):
    script = meshrun.script("""
        import os, time
        rank = int(os.environ["RANK"])
        print("last words", rank)
        open(f"ready-{rank}", "w").close()
        while not all(os.path.exists(f"ready-{i}") for i in range(3)):
            time.sleep(0.01)
        if rank == 2:
            os.kill(os.getpid(), 9)
        raise ValueError(f"rank {rank}")
    """)
    result = meshrun.run("--nproc-per-node", "3", "--log-dir", "logs", "-r", "3", script)
    assert result.code != 0
    assert result.err.count("Traceback") <= 1
    files = logs(meshrun)
    for rank in range(3):
        assert files[f"attempt_0/{rank}/stdout.log"] == f"last words {rank}\n"
    for rank in range(2):
        assert files[f"attempt_0/{rank}/stderr.log"].endswith(f"ValueError: rank {rank}\n")
        assert f'"rank": {rank}' in files[f"attempt_0/{rank}/error.json"]


def test_flight_records_have_a_directory(meshrun):
    script = meshrun.script("import os; print(os.environ.get('MESHLIB_TRACE_DIR'))")
    assert meshrun.run(script).out == "None\n"
    folder = meshrun.folder
    assert meshrun.run("--trace-dir", "t", script).out == f"{folder / 't'}\n"
    printed = meshrun.run("--log-dir", "logs", script).out
    assert re.fullmatch(rf"{folder}/logs/[-0-9a-f]+/trace\n", printed)


class Terminal:
    """A terminal with a launcher as its foreground job."""

    def __init__(self, meshrun, *arguments):
        self.master, slave = pty.openpty()
        command = ("setsid", "--ctty", "--wait", *meshrun.COMMAND)
        self.process = meshrun.start(
            *arguments,
            command=command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=False,
        )
        os.close(slave)
        self.meshrun = meshrun
        self.text = b""

    def read_until(self, words: str) -> str:
        while words.encode() not in self.text:
            try:
                data = os.read(self.master, 4096)
            except OSError:  # the last user of the terminal is gone
                break
            self.text += data
        return self.text.decode().replace("\r\n", "\n")

    def close(self):
        text = self.read_until("\0never\0")
        code = self.process.wait(60)
        os.close(self.master)
        return code, text


def test_rank_0_keeps_the_terminal_and_the_others_whole_lines(meshrun):
    script = meshrun.script("""
        import os, sys
        print("rank", os.environ["RANK"], sys.stdout.isatty(), sys.stdin.isatty())
    """)
    terminal = Terminal(meshrun, "--nproc-per-node", "2", script)
    code, text = terminal.close()
    assert code == 0
    assert sorted(text.splitlines()) == ["rank 0 True True", "rank 1 False True"]


def test_a_prompt_of_any_rank_is_shown_and_answered(meshrun):
    """The needs of pdb on one rank: input without SIGTTIN, and a line that does not end."""
    script = meshrun.script("""
        import os, time
        if os.environ["RANK"] == "1":
            print("answer:", input("question? "))
    """)
    terminal = Terminal(meshrun, "--nproc-per-node", "2", script)
    assert "question? " in terminal.read_until("question? ")
    os.write(terminal.master, b"42\n")
    code, text = terminal.close()
    assert code == 0
    assert "answer: 42\n" in text


def test_ctrl_c_at_the_terminal(meshrun):
    script = meshrun.script("""
        import os, time
        try:
            open("ready-" + os.environ["RANK"], "w").close()
            time.sleep(600)
        except KeyboardInterrupt:
            # In one write, also with PYTHONUNBUFFERED: both ranks share the terminal.
            print(f"tidying up {os.environ['RANK']}\\n", end="")
            raise
    """)
    terminal = Terminal(meshrun, "--nproc-per-node", "2", script)
    ready = [meshrun.folder / f"ready-{rank}" for rank in range(2)]
    assert meshrun.wait_for(lambda: all(path.exists() for path in ready))
    os.write(terminal.master, b"\x03")
    code, text = terminal.close()
    assert code == 128 + signal.SIGINT
    lines = text.replace("^C", "").splitlines()
    assert sorted(lines[:-1]) == ["tidying up 0", "tidying up 1"]
    assert lines[-1] == "meshrun: received SIGINT; ended ranks 0-1"


def test_ctrl_z_stops_the_ranks_too(meshrun):
    script = meshrun.script("""
        import os, time
        with open("pid-" + os.environ["RANK"], "w") as file:
            file.write(str(os.getpid()))
        while not os.path.exists("end"):
            time.sleep(0.01)
    """)
    process = meshrun.start("--nproc-per-node", "2", script)
    paths = [meshrun.folder / f"pid-{rank}" for rank in range(2)]
    assert meshrun.wait_for(lambda: all(path.exists() and path.read_text() for path in paths))
    pids = [process.pid, *(int(path.read_text()) for path in paths)]

    def states():
        stats = [Path("/proc", str(pid), "stat").read_text() for pid in pids]
        return {stat.rpartition(")")[2].split()[0] for stat in stats}

    process.send_signal(signal.SIGTSTP)
    assert meshrun.wait_for(lambda: states() == {"T"})
    process.send_signal(signal.SIGCONT)
    assert meshrun.wait_for(lambda: "T" not in states())
    (meshrun.folder / "end").touch()
    assert meshrun.finish(process).code == 0


def test_the_report_of_a_failure_ends_with_the_command_to_type(meshrun):
    script = meshrun.script("""
        import meshlib as dist
        dist.init_process_group("tcp")
        dist.barrier()
        raise ValueError("boom")
    """)
    result = meshrun.run("--log-dir", "my logs", script)
    *_, error, hint = result.err.splitlines()
    assert error == "ValueError: boom"
    start, _, command = hint.rpartition(": ")
    assert start == "meshrun: what each rank was doing"
    words = shlex.split(command)
    assert words[:2] == ["meshlib", "trace"]
    result = meshrun.run(*words[1:], command=(sys.executable, "-m", "meshlib._cli"))
    assert "Rank 0 ended with ValueError: boom." in result.out, result.err


def test_the_report_of_a_failed_call_names_the_flag_that_keeps_records(meshrun):
    script = meshrun.script("""
        import meshlib as dist, numpy as np
        dist.init_process_group("tcp")
        dist.all_reduce(np.ones(3 + dist.get_rank()))
    """)
    result = meshrun.run("-n", "2", script)
    assert "CollectiveMismatchError" in result.err
    assert result.err.startswith("meshrun --log-dir DIR saves")  # the cause comes last


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_reader_that_has_seen_enough_is_no_failure(meshrun, ranks):
    script = meshrun.script("while True: print('more')")
    launcher = meshrun.start("-n", ranks, script)
    assert launcher.stdout.readline() == "more\n"
    launcher.stdout.close()
    assert launcher.stderr.read() == ""
    assert launcher.wait(60) == 128 + signal.SIGPIPE


def test_a_broken_pipe_of_the_programs_own_is_one(meshrun):
    result = meshrun.run(meshrun.script("raise BrokenPipeError('of my own')"))
    assert result.code == 1
    assert result.err.endswith("BrokenPipeError: of my own\n")


def test_a_reader_of_a_command_may_have_seen_enough(meshrun):
    command = meshrun.start("--help", command=(sys.executable, "-m", "meshlib"), bufsize=0)
    command.stdout.close()
    assert command.stderr.read() == ""
    assert command.wait(60) == 0


@pytest.mark.parametrize("how", ["fork", "exec"])
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_a_launcher_without_one_of_its_streams_runs_the_job(meshrun, closed, how):
    done = meshrun.folder / "done"
    done.mkdir()
    script = meshrun.script(f"""
        import os, sys
        print("output"), print("errors", file=sys.stderr) if "full" not in {closed!r} else None
        open(f"{done}/" + os.environ["RANK"], "w").close()
    """)
    command = shlex.join([*meshrun.COMMAND, "--start", how, "-n", "2", script])
    result = meshrun.run(command=("sh", "-c", f"{command} {closed}"))
    assert (result.code, len(list(done.iterdir()))) == (0, 2), result.err
    assert result.out.count("output") == (0 if ">&- " in closed or closed == ">&-" else 2)
    assert set(result.err.split()) <= {"errors"}


def test_output_that_a_full_disk_has_lost_is_no_success(meshrun):
    script = meshrun.script("print('lost')")
    command = shlex.join([*meshrun.COMMAND, "-n", "2", script])
    result = meshrun.run(command=("sh", "-c", f"{command} >/dev/full"))
    assert result.code == 1
    assert result.err == (
        "meshrun: not all output of the ranks could be written: No space left on device\n"
    )


@pytest.mark.parametrize("limit", [8, 9], ids=["in one write", "within a write"])
def test_logs_that_a_full_disk_has_cut_off_are_no_success(meshrun, limit):
    """The last line is not in the log: whether no byte of it fits, or some do."""
    script = meshrun.script("""
        import sys, time
        print("x" * 4095, flush=True)
        time.sleep(0.3)
        print("y" * 4095, flush=True)
        time.sleep(0.3)
        print("z" * 4095, flush=True)
    """)
    command = shlex.join([*meshrun.COMMAND, "--log-dir", "logs", "-n", "1", script])
    blocks = limit * 1024
    full = f"import os, resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({blocks}, {blocks}))"
    limited = [sys.executable, "-c", f"{full}; os.execvp('sh', ['sh', '-c', {command!r}])"]
    result = meshrun.run(command=limited)
    assert result.code == 1, result.err
    assert "stdout.log is incomplete: File too large" in result.err
    assert "not all output of the ranks could be written" in result.err
    assert result.out.count("z") == 4095  # the console goes on
