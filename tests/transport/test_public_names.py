"""The public names of ``transport``, which are all that a transport needs."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import queue_transport

import transport

PAGE = Path(__file__).parents[2] / "docs/inside/adding-a-transport.md"


def test_dir_shows_the_public_names_alone():
    assert [name for name in dir(transport) if not name.startswith("_")] == transport.__all__
    assert all(hasattr(transport, name) for name in transport.__all__)


def test_editors_see_the_names_that_programs_get():
    (block,) = (
        node
        for node in ast.parse(inspect.getsource(transport)).body
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.ImportFrom)
    )
    shown = [(node.module, alias.name, alias.asname) for node in block.body for alias in node.names]
    homes = transport._HOMES.items()
    assert shown == [(home, name, name) for home, names in homes for name in names.split()]


def test_the_example_imports_public_names_alone():
    imported = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(inspect.getsource(queue_transport)))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert {module for module, _ in imported} <= {
        "__future__", "collections", "dataclasses", "meshlib.testing", "transport"
    }  # fmt: skip
    assert {name for module, name in imported if module == "transport"} <= set(transport.__all__)


def test_the_page_names_each_class_that_a_transport_extends_or_uses():
    text = PAGE.read_text()
    named = ["Communicator", "LinkCommunicator", "Link", "Mailbox", "PeerKeys", "Condition"]
    named += ["DeviceFlat", "StreamOrder", "Completion", "DeviceStream", "Driver", "add_all"]
    assert all(f"`{name}" in text for name in named)
    assert set(named) <= set(transport.__all__)


def test_the_package_itself_imports_nothing():
    program = "import sys, transport; assert 'numpy' not in sys.modules; transport.Link"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_the_example_runs():
    ran = subprocess.run(
        [sys.executable, queue_transport.__file__],
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout == "over queues, the average of the ranks is [1.5 1.5 1.5]\n"
