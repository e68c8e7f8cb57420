"""The meaning of the command line of ``meshrun``."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import meshlib
from meshlib._launcher.options.arguments import count_cpus, count_gpus, parse
from meshlib._launcher.options.output import OutputOptions, Route, parse_streams
from meshlib._mesh.read_config import SUFFIXES

SECRET = "ab" * 32
MANY = ["--nnodes=2", "--master-addr=127.0.0.1"]


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MESHLIB_SECRET", raising=False)
    (tmp_path / "train.py").touch()
    return "train.py"


def test_the_programs_own_arguments_are_left_alone(script):
    options = parse(["--nproc-per-node", "2", script, "--nproc-per-node", "9", "-v", "--", "x"])
    assert options.ranks == 2
    assert options.program.kind == "script"
    assert options.program.arguments == ("--nproc-per-node", "9", "-v", "--", "x")
    assert not options.verbose


def test_the_defaults(script):
    options = parse([script])
    assert (options.ranks, options.mesh, options.max_restarts) == (1, None, 0)
    assert (options.failure_grace, options.signal_grace) == (3.0, 30.0)
    assert not options.nodes.many
    assert options.output == OutputOptions()


@pytest.mark.parametrize("flags", [["-n", "4"], ["-np", "4"], ["-n4"], ["--nproc-per-node=4"]])
def test_the_number_of_ranks_as_mpi_users_type_it(script, flags):
    assert parse([*flags, script]).ranks == 4


def test_times_may_have_units(script):
    conf = "join_timeout=10m,last_call_timeout=500ms"
    options = parse(["--grace-period", "1.5m", *MANY, "--rdzv-conf", conf, script])
    assert options.failure_grace == 90.0
    assert options.nodes.join_timeout == 600.0
    assert options.nodes.last_call_timeout == 0.5


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(["--version"])
    assert capsys.readouterr().out == f"meshrun {meshlib.__version__}\n"


def test_options_behind_the_script_are_told_of(script):
    notes = parse(
        [script, "--mesh", "dp=2", "--lr=1", "--nproc_per_node=2", "--log-dir", "x"]
    ).warnings
    assert [note.split()[0] for note in notes] == ["--mesh", "--nproc-per-node"]
    assert "is after train.py, so the program gets it" in notes[0]
    assert "meshrun --mesh ... train.py" in notes[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--lr=1", "mesh"],
        ["--mesh", "dp=2", "train.py", "--mesh", "own"],
    ],
)
def test_a_programs_own_options_are_not_told_of(script, arguments):
    assert parse(arguments).warnings == ()


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("transport.py", "transport"),
        ("parallel/__init__.py", "parallel"),
        ("meshlib.py", "meshlib"),
    ],
)
@pytest.mark.parametrize("kind", ["script", "module", "path"])
def test_a_file_in_the_way_is_told_of(script, tmp_path, monkeypatch, file, package, kind):
    folder = tmp_path / "on the path" if kind == "path" else tmp_path
    (folder / file).parent.mkdir(exist_ok=True, parents=True)
    (folder / file).touch()
    monkeypatch.setenv("PYTHONPATH", str(folder) if kind == "path" else "")
    (note,) = parse(["-m", "train"] if kind == "module" else [script]).warnings
    assert note.startswith(f"{folder / file} hides meshlib's package {package!r}")


def test_what_is_not_in_the_way_is_not_told_of(script, tmp_path, monkeypatch):
    (tmp_path / "parallel").mkdir()  # without __init__.py ours comes first
    monkeypatch.setenv("PYTHONPATH", str(Path(meshlib.__file__).parents[1]))
    assert parse([script]).warnings == ()
    (tmp_path / "transport.py").touch()
    assert parse(["--no-python", "true"]).warnings == ()
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert parse([script]).warnings == ()


def test_one_grace_period_for_all_reasons(script):
    options = parse(["--grace-period", "7.5", script])
    assert (options.failure_grace, options.signal_grace) == (7.5, 7.5)


@pytest.mark.parametrize("word", ["cpu", "auto"])
def test_ranks_by_the_devices_that_are_there(script, monkeypatch, word):
    monkeypatch.setattr("meshlib._launcher.options.arguments.count_gpus", lambda: 0)
    assert parse(["--nproc-per-node", word, script]).ranks == count_cpus()
    monkeypatch.setattr("meshlib._launcher.options.arguments.count_gpus", lambda: 5)
    assert parse(["--nproc-per-node", "auto", script]).ranks == 5
    assert parse(["--nproc-per-node", "gpu", script]).ranks == 5


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("0,2", 2), ("", 0), ("-1", 0), ("1,-1,2", 1), ("0,1,2,3,4", 3), ("GPU-abc", 1)],
)
def test_gpus_are_counted_without_cuda(tmp_path, monkeypatch, visible, count):
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus(str(tmp_path)) == count
    assert count_gpus(str(tmp_path / "missing")) == 0


def test_nodes_with_ranks(script, monkeypatch):
    monkeypatch.setenv("MESHLIB_SECRET", SECRET)
    flags = ["--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=1234"]
    nodes = parse([*flags, script]).nodes
    assert (nodes.least, nodes.most, nodes.rank) == (2, 2, 1)
    assert (nodes.host, nodes.port, nodes.secret) == ("10.0.0.1", 1234, SECRET)
    assert nodes.is_host == -1.0


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("127.0.0.1:70", "127.0.0.1", 70),
        ("localhost", "localhost", 29500),
        ("[::1]:70", "::1", 70),
        ("[::1]", "::1", 29500),
        ("::1", "::1", 29500),
    ],
)
def test_nodes_that_meet(script, endpoint, host, port):
    flags = ["--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    conf = ["--rdzv-conf", "join_timeout=5, is_host=true", "--rdzv-id", "job7"]
    nodes = parse([*flags, *conf, script]).nodes
    assert (nodes.least, nodes.most, nodes.rank) == (1, 4, None)
    assert (nodes.host, nodes.port, nodes.job) == (host, port, "job7")
    assert (nodes.join_timeout, nodes.is_host) == (5.0, 1.0)
    assert nodes.last_call_timeout == 30.0


def test_the_mesh_is_shared_by_the_nodes(script):
    flags = ["--nnodes=2", "--master-addr=127.0.0.1", "--mesh", "dp=2,tp=4"]
    assert parse([*flags, script]).ranks == 4


@pytest.mark.parametrize("suffix", [*SUFFIXES, *map(str.upper, SUFFIXES)])
def test_a_mesh_of_any_file_that_can_be_read(script, tmp_path, suffix):
    text = "[mesh]\ndp=2" if suffix.lower() == ".toml" else '{"mesh": {"dp": 2}}'
    (tmp_path / f"m{suffix}").write_text(text)
    if suffix.lower() in (".yml", ".yaml"):
        pytest.importorskip("yaml")
    assert parse(["--mesh", f"m{suffix}", script]).ranks == 2


def test_a_mesh_is_read_without_numpy(script, tmp_path):
    (tmp_path / "m.toml").write_text('[mesh]\ndp = 2\nbackend = "cpu:tcp"\n')
    program = """
        import sys
        from meshlib._launcher.options.arguments import parse
        assert parse(["--mesh", "m.toml", "train.py"]).ranks == 2
        assert "numpy" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=30)


def test_a_secret_from_a_file(script, tmp_path):
    (tmp_path / "secret").write_text(SECRET + "\n")
    flags = ["--nnodes=2", "--master-addr=node0", "--secret-file", "secret"]
    assert parse([*flags, script]).nodes.secret == SECRET


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nnodes", "0"], ["--nnodes", "MIN:MAX", "'0'"]),
        (["--nnodes", "3:2"], ["--nnodes", "'3:2'"]),
        (["--nnodes", "many"], ["'many'"]),
        (["--nnodes", "2"], ["--master-addr", "--rdzv-endpoint"]),
        (["--nnodes", "2", "--master-port", "70"], ["--master-addr"]),
        (["--nnodes", "2", "--master-addr", "10.0.0.1"], ["10.0.0.1", "MESHLIB_SECRET", "FILE"]),
        ([*MANY, "--node-rank", "2"], ["--node-rank", "0 to 1", "2"]),
        (["--node-rank", "1"], ["--node-rank 1", "--nnodes"]),
        ([*MANY, "--rdzv-backend", "etcd"], ["--rdzv-backend", "static or store", "'etcd'"]),
        ([*MANY, "--rdzv-backend", "static"], ["--node-rank"]),
        ([*MANY, "--master-port", "70000"], ["--master-port", "70000"]),
        ([*MANY, "--rdzv-endpoint", "x:1"], ["--rdzv-endpoint", "--master-addr"]),
        (["--nnodes=2", "--rdzv-endpoint", "host:port"], ["HOST:PORT", "'host:port'"]),
        ([*MANY, "--rdzv-conf", "joint_timeout=3"], ["'joint_timeout'", "join_timeout"]),
        ([*MANY, "--rdzv-conf", "join_timeout=x"], ["join_timeout=NUMBER", "join_timeout=x"]),
        (["--standalone", "--nnodes", "2"], ["--standalone"]),
        ([*MANY, "--secret-file", "missing"], ["missing"]),
        ([*MANY, "--secret-file", "train.py"], ["secret file train.py", "hexadecimal"]),
        (["--nnodes=1:2", "--master-addr=127.0.0.1", "--mesh", "dp=2"], ["dp=2", "1:2"]),
        ([*MANY, "--mesh", "dp=3"], ["dp=3", "2 nodes"]),
        (["--nnodes=2", "--rdzv", "etcd://h:1"], ["no /PREFIX, which keeps jobs apart"]),
        (["--nnodes=2", "--rdzv", "h:1/x"], ["--rdzv: expected etcd://"]),
        (["--nnodes=2", "--rdzv", "etcd://h/x"], ["'h' for HOST:PORT"]),
        (["--nnodes=2", "--rdzv", "etcd://u@h:1/x"], ["a user without a password"]),
        (["--nnodes=2", "--rdzv", "etcd://h:1/x?a=b"], ["'a=b' behind 'etcd://h:1/x'"]),
        (["--nnodes=2", "--rdzv", "etcd://h:1/x?lease=7"], ["the job has a lease of its own"]),
        (["--rdzv", "etcd://h:1/x"], ["expected --nnodes with it"]),
        (["--nnodes=2", "--rdzv", "etcd://127.0.0.1:1,10.0.0.1:1/x"], ["need a common secret"]),
        ([*MANY, "--rdzv", "etcd://h:1/x"], ["expected no --master-addr"]),
        (
            ["--nnodes=2", "--rdzv", "etcd://localhost:1/x", "--rdzv-conf", "is_host=1"],
            ["no node serves the store of --rdzv etcd://"],
        ),
    ],
)
def test_nodes_that_make_no_sense(script, capsys, flags, words):
    with pytest.raises(SystemExit) as caught:
        parse([*flags, script])
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(word in last for word in words), last


@pytest.mark.parametrize(
    ("text", "choice"),
    [("3", {None: 3}), ("0:1,1:2", {0: 1, 1: 2}), ("1,2:3", {None: 1, 2: 3})],
)
def test_streams(text, choice):
    assert parse_streams(text) == choice


@pytest.mark.parametrize("text", ["", "4", "x", "0:", "0:1,0:2", "-1:2", "1,2"])
def test_streams_that_make_no_sense(text):
    with pytest.raises(ValueError, match="LOCAL_RANK:VALUE"):
        parse_streams(text)


INHERITED = Route(console=True, file=False, inherited=True, prefix=False)
LINES = Route(console=True, file=False, inherited=False, prefix=False)
LOGGED = Route(console=True, file=True, inherited=False, prefix=True)


@pytest.mark.parametrize(
    ("options", "local_rank", "ranks", "terminal", "route"),
    [
        (OutputOptions(), 0, 1, False, INHERITED),
        (OutputOptions(), 0, 2, True, INHERITED),
        (OutputOptions(), 0, 2, False, LINES),
        (OutputOptions(), 1, 2, True, LINES),
        (OutputOptions(shown=frozenset({1})), 1, 2, False, INHERITED),
        (OutputOptions(shown=frozenset({1})), 0, 2, True, Route(False, False, False, False)),
        (OutputOptions(prefix=True), 0, 1, True, Route(True, False, False, True)),
        (OutputOptions(tee={None: 3}), 0, 2, True, LOGGED),
        (OutputOptions(tee={None: 2}), 0, 2, True, INHERITED),
        (OutputOptions(redirects={None: 3}), 0, 2, True, Route(False, True, False, False)),
        (OutputOptions(redirects={None: 3, 0: 0}), 0, 2, True, INHERITED),
        (OutputOptions(redirects={None: 3}, tee={1: 1}), 1, 2, True, LOGGED),
    ],
)
def test_where_standard_output_goes(options, local_rank, ranks, terminal, route):
    assert options.route(local_rank, 1, ranks, terminal) == route


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc-per-nod", "2", "train.py"], "did you mean '--nproc-per-node'?"),
        (["--max_restart=3"], "did you mean '--max-restarts'?"),
        (["--mesh", "nofile.toml", "train.py"], "--mesh nofile.toml: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_that_helps(script, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    assert "Errno" not in err


def test_the_programs_own_options_are_not_taken_for_misspelt_ones(script):
    options = parse([script, "--max-restart", "3"])
    assert options.program.arguments == ("--max-restart", "3")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.py"], ["'missing.py'", "does not exist"]),
        (["--nproc-per-node", "0", "train.py"], ["--nproc-per-node", ">= 1", "'0'"]),
        (["--nproc-per-node", "many", "train.py"], ["--nproc-per-node", "auto", "'many'"]),
        (["--mesh", "dp=2,tp=2", "--nproc-per-node", "3", "train.py"], ["4", "3"]),
        (["--mesh", "dp=-1,tp=2", "train.py"], ["dp=-1,tp=2", "--nproc-per-node"]),
        (["--mesh", "dp", "train.py"], ["dp"]),
        (["--mesh", "none.toml", "train.py"], ["none.toml"]),
        (["--max-restarts", "-1", "train.py"], ["--max-restarts", ">= 0", "'-1'"]),
        (["--grace-period", "soon", "train.py"], ["--grace-period", "seconds", "'soon'"]),
        (["-r", "3", "train.py"], ["--redirects", "--log-dir"]),
        (["--log-dir", "x", "--tee", "4", "train.py"], ["--tee", "0:1,1:3", "'4'"]),
        (["--log-dir", "x", "-r", "5:1", "train.py"], ["--redirects", "5:1", "0 to 0"]),
        (["--local-ranks-filter", "1", "train.py"], ["--local-ranks-filter", "'1'"]),
        (["--no-python", "no-such-program"], ["no-such-program"]),
        (["--no-python", "-m", "train"], ["not allowed with"]),
        (["--nproc-per-nod", "2", "train.py"], ["--nproc-per-nod"]),
        ([], ["PROGRAM"]),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(script, capsys, arguments, words):
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("meshrun: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
