"""No module keeps state of its own: lasting state belongs to the World, or is listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = {
    # The one global state.
    "meshlib/_job/world.py: current": "the World",
    "meshlib/_job/current.py: Current.process": "the World",
    "meshlib/_job/world.py: Current.in_threads": "the World",
    "meshlib/_job/current.py: Current.in_threads": "the World",
    "meshlib/_job/thread_rank.py: Current.in_threads": "the World",
    "meshlib/_job/current.py: Current.gradients": "the keeper of gradients of the World's workers",
    "meshlib/_job/thread_rank.py: _current": "the settings of a thread that is a rank",
    # Registrations.
    "transport/_communicators/backends.py: _ENTRIES": "third parties register backends",
    "transport/_rendezvous/registry.py: _HANDLERS": "third parties register URL schemes",
    "meshlib/torch/__init__.py: register()": "PyTorch imports the entry point",
    "parallel/rpc/__init__.py: rpc.differentiate_by(Gradients)": "callees need it before any call",
    # Things of which a process has one.
    "meshlib/_recording/stacks.py: _uncollected": "the interpreter has one garbage collector",
    "meshlib/testing.py: _threads_of_xla": "XLA's clients belong to the process",
    "transport/_net/fork.py: _OWNED": "the interpreter keeps a fork hook for ever",
    "transport/_net/fork.py: os.register_at_fork(after_in_child=_leave_all)": "as before",
    "transport/_net/fork.py: _ProcessId.pid": "the process's own number",
    "transport/_mpi/library.py: _Joined.process": "MPI can be initialised once in a process",
    "transport/_store/tcp/serving.py: _TENANTS": "a process serves a port once",
    "transport/_tcp/far.py: Distance._warned": "advice on a setting of the host, given once",
    "meshlib/__init__.py: _check_package('transport')": "raises for a file in the way",
}
WITH_JAX = ("meshlib/jit/", "parallel/jax/")
"""These register primitives with JAX when they are imported: JAX has no other way."""
KEEPERS = {
    *("Lock", "RLock", "Condition", "Event", "Semaphore", "Thread", "local", "count", "ContextVar"),
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet"),
}
MUTATORS = {
    *("append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "remove"),
    *("discard", "insert", "appendleft"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def bindings(tree: ast.Module) -> dict[str, ast.expr | None]:
    """Return the names that a module binds outside of its functions, with their values."""
    found: dict[str, ast.expr | None] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                found[target.id] = node.value
    return found


def maker(value: ast.expr | None) -> str:
    """Return the name of the class or function that makes ``value``."""
    if not isinstance(value, ast.Call):
        return ""
    function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def changes(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield the objects that ``tree`` changes, with the attribute that it sets, if it is one."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif getattr(getattr(node, "func", None), "attr", "") in MUTATORS:
            yield node.func.value, ""
        for target in targets:
            for inner in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(inner, ast.Subscript):
                    yield inner.value, ""
                elif isinstance(inner, ast.Attribute):
                    yield inner.value, inner.attr


def changes_itself(cls: ast.ClassDef) -> bool:
    """True if methods change the instance after it was made, or each thread has its own."""
    if any(getattr(base, "attr", "") == "local" for base in cls.bases):
        return True
    for method in cls.body:
        if not isinstance(method, ast.FunctionDef) or method.name in ("__init__", "__new__"):
            continue
        if any(ast.unparse(changed).startswith("self") for changed, _ in changes(method)):
            return True
    return False


def homes(tree: ast.Module) -> dict[str, str]:
    """Return the files of the names that a module imports."""
    return {
        alias.name: f"{node.module.replace('.', '/')}.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def own_names(function: Function) -> set[str]:
    """Return the names that are a function's own, not its module's."""
    arguments = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
    nodes = list(ast.walk(function))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    shared = {name for n in nodes if isinstance(n, ast.Global) for name in n.names}
    return (arguments | stored) - shared


def states(trees: dict[str, ast.Module]) -> set[str]:
    """Return the state that modules keep, and the calls that they make when imported."""
    classes = {
        (path, node.name): changes_itself(node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    class_names = {name for _, name in classes}
    found: set[str] = set()
    for path, tree in trees.items():
        bound, home = bindings(tree), homes(tree)
        for name, value in bound.items():
            made_by = maker(value)
            if made_by in KEEPERS or classes.get((home.get(made_by, path), made_by)):
                found.add(f"{path}: {name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                found |= {f"{path}: {name}" for name in node.names}
            if isinstance(node, Function):
                for changed, attribute in changes(node):
                    name = getattr(changed, "id", "")
                    of_class = attribute and name in class_names
                    if (name in bound or of_class) and name not in own_names(node):
                        found.add(f"{path}: {name}" + (f".{attribute}" if of_class else ""))
        for node in tree.body:
            call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            if call and not path.startswith(WITH_JAX):
                found.add(f"{path}: {ast.unparse(node.value)}")
    return found


def test_no_module_keeps_state_but_for_the_worlds():
    trees = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for package in ("meshlib", "transport", "parallel")
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    assert states(trees) == ALLOWED.keys()


def test_what_counts_as_state():
    program = """
import atexit, threading
LOCK = threading.Lock()
TABLE = {"a": 1}
known = {}
class Counter:
    last = None
    def __init__(self): self.n = 0
    def count(self): self.n += 1
counter = Counter()
def learn(name, TABLE):
    known[name] = 1
    TABLE["b"] = 2
    Counter.last = name
atexit.register(learn)
"""
    found = states({"told.py": ast.parse(program)})
    assert found == {
        "told.py: LOCK",
        "told.py: known",
        "told.py: counter",
        "told.py: Counter.last",
        "told.py: atexit.register(learn)",
    }
