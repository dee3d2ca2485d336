"""What a script imports at its top level, read without running it: the fork server imports these once. Only packages
that start no thread, open no device and read no rank variable at import are taken, and nothing that the script imports
after it may have set a variable that they read: each worker then imports it itself.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import re
import sys
from collections.abc import Iterator
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
_SETTERS = frozenset({"putenv", "unsetenv"})
_UNKNOWN_BUILTINS = frozenset({"exec", "eval", "__import__", "setattr", "delattr"})
_UNKNOWN_MODULES = frozenset({"ctypes", "importlib", "runpy"})
"""Of the standard library, what may run anything, or set a variable behind Python's back."""
_SETS_AT_IMPORT = re.compile(r"\benviron(\[[^\]]*\]\s*=[^=]|\.(setdefault|update|pop)\()|\bputenv\(")
"""Text of a package's own first file that may set a variable."""
_MAX_MODULES = 64
MAX_TEXT_BYTES = 4 << 20
"""Of the script's own, how many are looked into, and their size together."""


@dataclass(frozen=True)
class ScriptImports:
    """What may be imported for a script before it runs."""

    names: tuple[str, ...] = ()
    """As `module` or `module:name`, in order and without repeats."""
    left: str = ""
    """A package that each worker has to import itself, since something may set variables for it; empty = none."""
    where: str = ""
    """FILE:LINE of that something."""


def read_imports(script: Path, root: Path | None = None, *, poses: bool = False) -> ScriptImports:
    """Return what to import before forking; nothing of a file that cannot be parsed. `root`: of a module of `-m`, the
    folder of its packages, whose `__init__.py` run before it; `poses`: `mindspore` is msrun.mindspore. `from
    msrun.runtime import init` gives `msrun.runtime:init`, as those names are loaded lazily.
    """
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
    if found and _names_optimizers(tree):
        if line := _sets_torch_variable(tree):
            kept = tuple(name for name in found if name.startswith("numpy"))
            return ScriptImports(kept, "torch", f"{script.name}:{line}")
        found[OF_OPTIMIZERS] = None
    return ScriptImports(tuple(found))


@dataclass
class _Setter:
    """Finds the first statement that may set a variable of the environment: what cannot be told counts as one."""

    folder: Path
    """Where the script's own modules are."""
    poses: bool
    where: str = ""
    aliases: dict[str, str] = field(default_factory=dict)
    """Name in the script -> what it was imported from: "os", "os.environ", "dotenv.load_dotenv"."""
    bodies: dict[str, list[ast.stmt]] = field(default_factory=dict)
    """Functions and classes of the script, which run only when they are called."""
    seen: set[str] = field(default_factory=set)

    def look(self, statement: ast.stmt, file: Path) -> None:
        """Note the statement if it may set a variable; what only defines something is kept for its call."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._look_at_import(statement, file)
            return
        parts: list[ast.AST] = [statement]
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.bodies[statement.name] = statement.body
            parts = [ast.copy_location(ast.Call(node, [], []), node) for node in statement.decorator_list]
            if isinstance(statement, ast.ClassDef):
                parts += [part for part in statement.body if not isinstance(part, ast.FunctionDef)]
            else:
                parts += [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]
        for part in parts:
            if not self.where and (node := self._find(part, set())) is not None:
                self.where = f"{file.name}:{getattr(node, 'lineno', statement.lineno)}"

    def _look_at_import(self, statement: ast.Import | ast.ImportFrom, file: Path) -> None:
        base = self.folder
        if isinstance(statement, ast.Import):
            modules = [alias.name for alias in statement.names]
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                self.aliases[alias.asname or top] = alias.name if alias.asname else top
        else:
            modules = [statement.module or ""]
            self.aliases |= {one.asname or one.name: f"{modules[0]}.{one.name}" for one in statement.names}
            if statement.level > len(file.parents):
                return  # which Python refuses, too
            base = file.parents[statement.level - 1] if statement.level else base
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
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        if self._is_environ(node) or (isinstance(node, ast.Call) and self._may_set(node, called)):
            return node
        parts = (part for child in ast.iter_child_nodes(node) for part in self._beside_reads(child))
        return next((found for part in parts if (found := self._find(part, called)) is not None), None)

    def _is_environ(self, node: ast.AST) -> bool:
        return self._origin(node) in ("os.environ", "os.environb")

    def _beside_reads(self, node: ast.AST) -> list[ast.AST]:
        """Return what is left to look at of a node that may only read the environment, such as os.environ["A"]."""
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and self._is_environ(node.value):
            return [node.slice]
        if isinstance(node, ast.Attribute) and node.attr in _READS and self._is_environ(node.value):
            return []
        if isinstance(node, ast.Compare) and len(node.comparators) == 1 and self._is_environ(node.comparators[0]):
            return [node.left]
        return [node]

    def _may_set(self, call: ast.Call, called: set[str]) -> bool:
        origin = self._origin(call.func)
        if origin is None:  # a method of some object, such as a parser of argparse
            return False
        top, _, rest = origin.partition(".")
        if top in self.bodies and not rest:
            is_new = top not in called
            called.add(top)
            inner = (one.body if isinstance(one, ast.FunctionDef) else [one] for one in self.bodies[top])
            return is_new and any(self._find(part, called) is not None for parts in inner for part in parts)
        if origin.startswith("os.environ."):
            return rest.partition(".")[2] not in _READS
        if top in sys.stdlib_module_names:
            return origin.rpartition(".")[2] in _SETTERS or top in _UNKNOWN_MODULES
        if top in vars(builtins) and not rest:
            of_os = bool(call.args) and self._origin(call.args[0]) == "os"  # getattr(os, "environ")
            return of_os or top in _UNKNOWN_BUILTINS
        return not rest or any(value.partition(".")[0] == top for value in self.aliases.values())

    def _origin(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        base = self._origin(node.value) if isinstance(node, ast.Attribute) else None
        return f"{base}.{node.attr}" if isinstance(node, ast.Attribute) and base else None


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


def _names_optimizers(tree: ast.Module) -> bool:
    """Return whether `optim` stands anywhere: torch.optim.SGD, from torch import optim, from torch.optim import SGD."""
    for node in ast.walk(tree):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            names = [word for name in (module, *(alias.name for alias in node.names)) for word in name.split(".")]
        if "optim" in names:
            return True
    return False


def _sets_torch_variable(tree: ast.Module) -> int:
    """Return the line that sets a variable of torch's compiler, which is read when an optimizer is made; 0 = none."""
    for node in ast.walk(tree):
        key: ast.AST | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            key = node.args[0] if node.func.attr in ("setdefault", "putenv") else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.startswith("TORCH"):
            return node.lineno  # type: ignore[attr-defined, no-any-return]
    return 0
