"""What a script imports at its top level, read without running it: the fork server imports these once. Only packages
that start no thread, open no device and read no rank variable at import are taken, and nothing that the script imports
after it may have set a variable that they read: each worker then imports it itself."""

from __future__ import annotations

import ast
import builtins
import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

SAFE_PACKAGES = frozenset({"torch", "numpy", "msrun"})
"""Top-level packages that the fork server imports unasked; --preload names more."""

OF_OPTIMIZERS = "torch._dynamo"
"""What torch imports when a process makes its first optimizer (torch/_compile.py); takes as long as torch itself."""

_READS = frozenset({"get", "keys", "items", "values", "copy", "__contains__", "__getitem__"})
"""Methods of os.environ that leave it as it is."""
_UNKNOWN_BUILTINS = frozenset({"exec", "eval", "__import__", "setattr", "delattr"})
_UNKNOWN_MODULES = frozenset({"ctypes", "importlib", "runpy"})
"""Of the standard library, what may run anything, or set a variable behind Python's back."""
_SETS_AT_IMPORT = re.compile(r"\benviron(\[[^\]]*\]\s*=[^=]|\.(setdefault|update|pop)\()|\bputenv\(")
"""Text of a package's own first file that may set a variable."""
_SETS_TORCH = re.compile(r"""environ\[["']TORCH\w*["']\]\s*=[^=]|\b(setdefault|putenv)\(\s*["']TORCH""")
"""Text that may set a variable of torch's compiler, which is read when an optimizer is made."""
_MAX_MODULES = 64
MAX_TEXT_BYTES = 4 << 20  # of the script's own, how many are looked into, and their size together
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class ScriptImports:
    """What may be imported for a script before it runs."""

    names: tuple[str, ...] = ()  # as `module` or `module:name`, in order and without repeats
    left: str = ""
    """A package that each worker has to import itself, since something may set variables for it; empty = none."""
    where: str = ""  # FILE:LINE of that something


def read_imports(script: Path, root: Path | None = None, *, poses: bool = False) -> ScriptImports:
    """Return what to import before forking; nothing of a file that cannot be parsed. `root`: of a module of `-m`, the
    folder of its packages, whose `__init__.py` run before it; `poses`: `mindspore` is msrun.mindspore. `from
    msrun.runtime import init` gives `msrun.runtime:init`, as those names are loaded lazily."""
    tree = _parse(script)
    hiding = (file for name in SAFE_PACKAGES for file in _files_of(name, script.parent))  # the packages of these names
    if tree is None or any(file.is_file() for file in hiding):
        return ScriptImports()
    if not any(_safe_names(statement, poses=poses) for statement in _statements(tree.body)):
        return ScriptImports()
    found: dict[str, None] = {}
    setter = _Setter(root or script.parent, poses)
    packages = script.parent.relative_to(root).parts if root else ()
    if packages:
        setter.look_at_module(".".join(packages), setter.folder, f"{packages[-1]}/__init__.py:1")
    for statement in _statements(tree.body):
        names = _safe_names(statement, poses=poses)
        if names and setter.where:
            return ScriptImports(tuple(found), names[0].split(".")[0].split(":")[0], setter.where)
        found.update(dict.fromkeys(names))
        if not names:
            setter.look(statement, script)
    text = script.read_bytes().decode("utf-8", "replace")
    if found and re.search(r"\boptim\b", text):
        if sets := _SETS_TORCH.search(text):
            kept = tuple(name for name in found if name.startswith("numpy"))
            return ScriptImports(kept, "torch", f"{script.name}:{text.count(chr(10), 0, sets.start()) + 1}")
        found[OF_OPTIMIZERS] = None
    return ScriptImports(tuple(found))


@dataclass
class _Setter:
    """Finds the first statement that may set a variable of the environment: what cannot be told counts as one."""

    folder: Path  # where the script's own modules are
    poses: bool
    where: str = ""
    tops: dict[str, str] = field(default_factory=dict)
    """Name in the script -> the package that it was imported from, or is."""
    bodies: dict[str, ast.AST] = field(default_factory=dict)
    """Functions and classes of the script and its modules, which run only when they are called."""
    seen: set[str] = field(default_factory=set)

    def look(self, statement: ast.stmt, file: Path) -> None:
        """Note the statement if it may set a variable; what only defines something is kept for its call."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._look_at_import(statement, file)
        elif not self.where and (node := self._find(statement, set())) is not None:
            self.where = f"{file.name}:{getattr(node, 'lineno', statement.lineno)}"

    def _look_at_import(self, statement: ast.Import | ast.ImportFrom, file: Path) -> None:
        base, level = self.folder, getattr(statement, "level", 0)
        if isinstance(statement, ast.ImportFrom):
            modules = [statement.module or ""]
            if level > len(file.parents):
                return  # which Python refuses, too
            base = file.parents[level - 1] if level else base
        else:
            modules = [alias.name for alias in statement.names]
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            of = (modules[0] or name) if isinstance(statement, ast.ImportFrom) else alias.name
            self.tops[name] = of.partition(".")[0]
            if alias.name in ("environ", "environb") and alias.asname:  # what is done to it by that name is not seen
                self.where = self.where or f"{file.name}:{statement.lineno}"
        for module in modules:
            self.look_at_module(module, base, f"{file.name}:{statement.lineno}")

    def look_at_module(self, module: str, base: Path, place: str) -> None:
        """Note whether the import of a module may set a variable; `place`: where it is imported."""
        top = module.partition(".")[0]
        if self.where or module in self.seen or len(self.seen) > _MAX_MODULES:
            return
        self.seen.add(module)
        own = [path for path in _files_of(module, base) if path.is_file()] if module else []
        for path in own:
            tree, inner = _parse(path), _Setter(self.folder, self.poses, seen=self.seen)
            for statement in _statements(tree.body) if tree else ():
                if _safe_names(statement, poses=self.poses):
                    return  # from here on the package is there for the script, too
                inner.look(statement, path)
            self.where = self.where or inner.where
            self.bodies = inner.bodies | self.bodies
        elsewhere = not own and top not in ("", *sys.stdlib_module_names) and not (base / top).is_dir()
        if elsewhere and _package_sets(top):
            self.where = place

    def _find(self, node: ast.AST, called: set[str]) -> ast.AST | None:
        """Return what may set a variable when this runs."""
        parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, _DEFINITIONS):
            self.bodies[node.name] = node
            own = node.body if isinstance(node, ast.ClassDef) else [node.args]
            parts = [*(ast.copy_location(ast.Call(one, [], []), one) for one in node.decorator_list), *own]
        elif _is_environ(node) or (isinstance(node, ast.Call) and self._may_set(node, called)):
            return node
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_environ(node.value):
            parts = [node.slice]
        elif isinstance(node, ast.Attribute) and node.attr in _READS and _is_environ(node.value):
            parts = []
        elif isinstance(node, ast.Compare) and len(node.comparators) == 1 and _is_environ(node.comparators[0]):
            parts = [node.left]
        return next((found for part in parts if (found := self._find(part, called)) is not None), None)

    def _may_set(self, call: ast.Call, called: set[str]) -> bool:
        root: ast.AST = call.func
        last = root.attr if isinstance(root, ast.Attribute) else getattr(root, "id", "")
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name):  # a method of what some other call has returned
            return False
        name, top = root.id, self.tops.get(root.id, "")
        if name in self.bodies and call.func is root:
            is_new = name not in called
            called.add(name)
            body = getattr(self.bodies[name], "body", ())
            inner = (part for one in body for part in (one.body if isinstance(one, ast.FunctionDef) else [one]))
            return is_new and any(self._find(part, called) is not None for part in inner)
        if last in ("putenv", "unsetenv"):
            return True
        if top in sys.stdlib_module_names:
            return top in _UNKNOWN_MODULES
        if call.func is root and name in vars(builtins):
            of_os = any(isinstance(one, ast.Name) and self.tops.get(one.id) == "os" for one in call.args[:1])
            return of_os or name in _UNKNOWN_BUILTINS  # getattr(os, "environ")
        return bool(top) or call.func is root


def _is_environ(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("environ", "environb")


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _files_of(module: str, base: Path) -> list[Path]:
    parts = module.split(".")
    packages = [base.joinpath(*parts[:length], "__init__.py") for length in range(1, len(parts) + 1)]
    return [*packages, base.joinpath(*parts).with_suffix(".py")]


def own_modules(script: Path, folder: Path, most: int = _MAX_MODULES) -> Iterator[tuple[Path, set[str]]]:
    """Yield a script and the modules beside it that it, or one of them, imports, each with the packages it names."""
    seen, waiting, left_bytes = {script}, [script], MAX_TEXT_BYTES
    while waiting and len(seen) <= most:
        path = waiting.pop()
        with contextlib.suppress(OSError):
            left_bytes -= path.stat().st_size
        tops: set[str] = set()
        files: list[Path] = []
        for node in ast.walk(tree) if left_bytes >= 0 and (tree := _parse(path)) else ():
            level = node.level if isinstance(node, ast.ImportFrom) else 0
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names)]
            if level > len(path.parents):
                continue
            base = path.parents[level - 1] if level else folder
            tops |= set() if level else {name.partition(".")[0] for name in names}
            files += [file for name in names if name for file in _files_of(name, base)]
        yield path, tops
        new = [file for file in dict.fromkeys(files) if file not in seen and file.is_file()]
        seen.update(new)
        waiting += new


def imports_package(script: Path, package: str) -> bool:
    return any(package in tops for _, tops in own_modules(script, script.parent))


@cache
def _package_sets(name: str) -> bool:
    """Return whether a package is not found, or its first file looks as if it sets variables when it is imported."""
    try:
        spec = PathFinder.find_spec(name)
        if spec is None:  # the script may find it in a folder that it adds to sys.path
            return True
        text = Path(spec.origin).read_text(errors="replace") if spec.origin else ""
    except (OSError, ValueError, ImportError):
        return True
    return _SETS_AT_IMPORT.search(text) is not None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.Try):
            yield from _statements(statement.body)
        else:
            yield statement


def _safe_names(statement: ast.stmt, *, poses: bool) -> list[str]:
    """Return what an import statement names of the packages that are safe to import before a fork."""
    names = []
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
    elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        names = [f"{statement.module}:{alias.name}" for alias in statement.names if alias.name != "*"]
    tops = {name: name.split(".")[0].split(":")[0] for name in names}
    return (
        ["msrun.mindspore"]
        if poses and "mindspore" in tops.values()
        else [name for name, top in tops.items() if top in SAFE_PACKAGES]
    )
