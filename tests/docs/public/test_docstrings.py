"""Every public name has words of its own, and a collective's function has its method's."""

import ast
import importlib
import inspect
import itertools
import re
import tomllib

import pytest

import meshlib
from meshlib import checkpoint, rpc
from meshlib._collectives.collectives import Collectives
from parallel import (
    comm_hooks,
    ddp,
    join,
    nn,
    optim,
    samplers,
    tensor_parallel,
    zero,
)
from parallel import rpc as parallel_rpc
from parallel.rpc import dist_autograd
from tests.docs import functions
from tests.docs.pages import ROOT

PARTS = [comm_hooks, ddp, join, nn, optim, samplers, tensor_parallel, zero]
MODULES = [meshlib, checkpoint, rpc, importlib.import_module("parallel"), *PARTS]
MODULES += [parallel_rpc, dist_autograd]
# A name of several packages goes by the first one.
NAMES = {
    id(value): (f"{module.__name__}.{name}", value)
    for module in reversed(MODULES)
    for name in module.__all__
    if not inspect.ismodule(value := getattr(module, name))
}
NAMES = dict(NAMES.values())
FUNCTIONS = {path: value for path, value in NAMES.items() if inspect.isroutine(value)}
CLASSES = {path: value for path, value in NAMES.items() if inspect.isclass(value)}
ALIASES = {path: value for path, value in NAMES.items() if not value.__doc__ or value is dict}
# Its objects are made by this project, so its users need not know how.
NOT_MADE_BY_USERS = {
    "meshlib.DArray",
    "meshlib.ProcessGroup",
    "meshlib.Window",
    "meshlib.Work",
    "meshlib.rpc.PreparedCall",
    "parallel.GradBucket",
    "parallel.nn.RemovableHandle",
    "parallel.rpc.Recorded",
}
ROOMS = ("meshlib", "transport", "parallel")
POINTER = re.compile(r"^See\b|\b(as for|as in|those of) ``\w")


def parameters(function):
    try:
        signature = inspect.signature(function)
    except ValueError:
        return []  # of a class that C made
    return [name for name in signature.parameters if name not in {"self", "cls", "args", "kwargs"}]


def undocumented(function, text):
    return [
        name
        for name in parameters(function)
        if not name.startswith("_") and not re.search(rf"\b{name}\b", text)
    ]


def public_methods(cls):
    for name, value in inspect.getmembers(cls):
        function = value.fget if isinstance(value, property) else value
        if not name.startswith("_") and inspect.isroutine(function):
            home = getattr(function, "__module__", None) or ""
            if home.startswith(("meshlib", "parallel", "transport")):
                yield name, inspect.getdoc(value)


def test_all_kinds_of_names_are_looked_at():
    assert len(FUNCTIONS) > 60
    assert len(CLASSES) > 50
    assert {"parallel.CommHook", "parallel.nn.GradHook"} <= set(ALIASES)


@pytest.mark.parametrize("path", FUNCTIONS)
def test_a_functions_docstring_names_its_arguments_and_points_nowhere(path):
    text = inspect.getdoc(FUNCTIONS[path])
    assert len(text.split()) >= 5
    assert not POINTER.search(text)
    assert not undocumented(FUNCTIONS[path], text)


@pytest.mark.parametrize("path", CLASSES)
def test_a_class_says_what_it_is_how_it_is_made_and_what_its_methods_do(path):
    cls = CLASSES[path]
    text = f"{cls.__doc__}\n{cls.__init__.__doc__ or ''}"
    assert len(text.split()) >= 5
    assert not POINTER.search(text)
    if not (issubclass(cls, Exception) or hasattr(cls, "__members__")) and (
        path not in NOT_MADE_BY_USERS
    ):
        assert not undocumented(cls, text)
    for name, words in public_methods(cls):
        assert words, name
        assert not words.startswith("See "), name


@pytest.mark.parametrize("path", ALIASES)
def test_an_alias_is_documented_below_its_definition(path):
    module, _, name = path.rpartition(".")
    words = None
    while words is None:
        body = ast.parse(inspect.getsource(importlib.import_module(module))).body
        for node, following in itertools.pairwise(body):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                words = ast.literal_eval(following.value)
        module = next(
            (
                node.module
                for node in body
                if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]
            ),
            None,
        )
    assert len(words.split()) >= 5


def test_a_collectives_function_has_the_words_of_its_method():
    for name in set(meshlib.__all__) & set(dir(Collectives)):
        function = getattr(meshlib, name)
        if inspect.isfunction(function):
            words = inspect.getdoc(getattr(Collectives, name)).split("Args:")
            # Its source, which is what an editor shows, runs nothing.
            (source,) = ast.parse(inspect.getsource(function)).body
            shown = ast.get_docstring(source)
            assert shown == inspect.getdoc(function), name
            assert shown.startswith(words[0]), name
            assert shown.endswith(words[1].partition("timeout:")[2]), name


def test_the_functions_are_written_from_the_methods():
    assert functions.stale() == []


def test_a_collective_says_what_it_takes_returns_and_raises():
    for name in set(meshlib.__all__) & set(dir(Collectives)):
        function, method = getattr(meshlib, name), getattr(Collectives, name)
        if inspect.isfunction(function):
            for one in (function, method):
                text = inspect.getdoc(one)
                described = re.findall(r"^ {4}(\w+): ", text.partition("Args:")[2], re.MULTILINE)
                assert [x for x in described if x in parameters(one)] == parameters(one), name
                assert "\nRaises:\n" in text, name
                returns_nothing = inspect.signature(one).return_annotation == "None"
                assert ("\nReturns:\n" in text) != returns_nothing, name


def test_help_shows_it():
    text = inspect.getdoc(meshlib.all_reduce)
    assert "Reduce ``tensor`` over the members" in text
    assert "group: A ProcessGroup or a DeviceMesh" in text
    assert "group:" not in inspect.getdoc(meshlib.ProcessGroup.all_reduce)


def without_words(node, where, in_class=False):
    """Yield what has no docstring and no underscore: ruff's D1, which leaves out ``_module.py``."""
    for one in node.body:
        if not isinstance(one, ast.FunctionDef | ast.ClassDef) or one.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator) for decorator in one.decorator_list}
        is_method = in_class and isinstance(one, ast.FunctionDef)
        shown = (
            ast.get_docstring(one) or "overload" in decorators or f"{one.name}.setter" in decorators
        )
        if not shown:
            yield f"{where}:{one.lineno} {one.name}", is_method
        if isinstance(one, ast.ClassDef):
            yield from without_words(one, where, True)


def test_modules_with_an_underscore_keep_the_rule_of_docstrings_too():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    ignores = table["per-file-ignores"]
    found = []
    for path in sorted(one for room in ROOMS for one in (ROOT / room).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        # The ends of the patterns are all *, ** or a whole name.
        ignored = {
            rule
            for pattern, rules in ignores.items()
            if name.startswith(pattern.rstrip("*"))
            for rule in rules
        }
        tree = ast.parse(path.read_text())
        missing = without_words(tree, name)
        found += [what for what, is_method in missing if not (is_method and "D102" in ignored)]
    assert not found, "\n".join(found)
