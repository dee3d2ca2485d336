"""The user's program: which kind it is, how a worker runs it, and what a script imports at its top level, read without
running it: the fork server imports these once. Only packages that start no thread, open no device and read no rank
variable at import are taken, and nothing that the script imports after it may have set a variable that they read: each
worker then imports it itself."""

from __future__ import annotations

import ast
import builtins
import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from msrun.errors import UsageError, near_miss
from msrun.planning.record import Record

SAFE_PACKAGES = frozenset({"torch", "numpy", "msrun"})  # imported unasked; --preload names more

OF_OPTIMIZERS = "torch._dynamo"  # imported with a first optimizer (torch/_compile.py); takes as long as torch

_READS = frozenset({"get", "keys", "items", "values", "copy", "__contains__", "__getitem__"})
"""Methods of os.environ that leave it as it is."""
_UNKNOWN_BUILTINS = frozenset({"exec", "eval", "__import__", "setattr", "delattr"})
_UNKNOWN_MODULES = frozenset({"ctypes", "importlib", "runpy"})  # of the standard library, may run anything
_SETS_AT_IMPORT = r"\benviron(\[[^\]]*\]\s*=[^=]|\.(setdefault|update|pop)\()|\bputenv\("
"""Text of a package's own first file that may set a variable."""
_SETS_TORCH = r"""environ\[["']TORCH\w*["']\]\s*=[^=]|\b(setdefault|putenv)\(\s*["']TORCH"""
"""Text that may set a variable of torch's compiler, which is read when an optimizer is made."""
_MAX_MODULES = 64
MAX_TEXT_BYTES = 4 << 20  # of the script's own, how many are looked into, and their size together
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class ScriptImports(Record):
    """What may be imported for a script before it runs."""

    names: tuple[str, ...] = ()  # as `module` or `module:name`, in order and without repeats
    left: str = ""  # a package that each worker has to import itself; empty = none
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
        if sets := re.search(_SETS_TORCH, text):
            kept = tuple(name for name in found if name.startswith("numpy"))
            return ScriptImports(kept, "torch", f"{script.name}:{text.count(chr(10), 0, sets.start()) + 1}")
        found[OF_OPTIMIZERS] = None
    return ScriptImports(tuple(found))


class _Setter(Record, frozen=False):
    """Finds the first statement that may set a variable of the environment: what cannot be told counts as one."""

    folder: Path  # where the script's own modules are
    poses: bool
    where: str = ""
    tops: dict[str, str] = field(default_factory=dict)  # name in the script -> the package that it is from
    bodies: dict[str, ast.AST] = field(default_factory=dict)  # of functions and classes, which run when called
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
    return re.search(_SETS_AT_IMPORT, text) is not None


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


ProgramKind = Literal["script", "module", "executable"]
StartMethod = Literal["auto", "fork", "exec"]
DeviceTarget = Literal["auto", "cpu", "gpu", "ascend"]
MindSporeKind = Literal["auto", "real", "torch", "none"]
MindSporeSemantics = Literal["mindspore", "torch"]

DEFAULT_ROLE = "default"  # Source: torch.distributed.run, --role
ONCE = "-"  # a script that can be read only once: from standard input, or a pipe
PYTHON_WORDS = frozenset({"python", "python3"})
COMMANDS = ("examples", "trace", "estimate", "status", "watch", "logs", "stop", "drain", "list")
"""First words that are commands of msrun and no program."""
PYTHON_FLAGS_WITHOUT_EFFECT = frozenset({"-u"})  # workers write whole lines at once


class Program(Record):
    """What every worker runs."""

    kind: ProgramKind  # script: a Python file run as `__main__`; module: as `python -m`; executable: started by exec
    target: str
    args: tuple[str, ...] = ()  # the program's own arguments, byte for byte
    typed: str = ""  # a script as it was named, seen from the working directory: its `sys.argv[0]`; empty = `target`
    has_rank_args: bool = False  # whether {rank}, {local_rank} and {node_rank} in the arguments are those of the worker
    passes_local_rank: bool = False  # whether the first argument is --local-rank=N, as of torch.distributed.launch
    role: str = DEFAULT_ROLE  # ROLE_NAME of its workers

    @property
    def is_python(self) -> bool:
        return self.kind != "executable"

    def of_worker(self, global_rank: int, local_rank: int, node_rank: int) -> Program:
        """Return what one worker runs, with its own arguments."""
        args = self.args
        if self.has_rank_args:
            numbers = {"rank": global_rank, "local_rank": local_rank, "node_rank": node_rank}
            args = tuple(with_numbers(arg, numbers) for arg in args)
        if self.passes_local_rank:
            args = (f"--local-rank={local_rank}", *args)
        return self if args == self.args else replace(self, args=args)

    def files(self, working_directory: Path) -> list[Path]:
        """Return the files whose imports workers want; a module is looked for in the working directory only."""
        if self.kind == "executable" or self.target == ONCE:
            return []
        if self.kind == "script":
            return [Path(self.target)]
        if self.target == "pytest":
            files = [Path(working_directory, arg.partition("::")[0]) for arg in self.args]
            return [file for file in files if file.suffix == ".py"]
        stem = working_directory.joinpath(*self.target.split("."))
        return [stem.with_suffix(".py"), stem / "__main__.py"]

    def argv(self, interpreter: str = sys.executable) -> list[str]:
        if self.kind == "script":
            return [interpreter, self.typed or self.target, *self.args]
        if self.kind == "module":
            return [interpreter, "-m", self.target, *self.args]
        return [self.target, *self.args]


def with_numbers(text: str, numbers: Mapping[str, int]) -> str:
    """Return a text with a number in the place of each name in braces, such as {rank}."""
    pattern = "|".join(f"{{{name}}}" for name in numbers)
    return re.sub(pattern, lambda match: str(numbers[match[0][1:-1]]), text)


def parse_program(words: Sequence[str], *, is_module: bool, working_directory: Path) -> Program:
    """Turn `x.py ARGS`, `-m pkg.mod ARGS` (`is_module`), `python x.py`, `python -m mod`, `pytest x.py` or an executable
    into a Program; python, python3 and pytest mean msrun's own interpreter (UsageError: nothing to run, or it does not
    exist, is a directory, or cannot be executed)."""
    if not words:
        raise UsageError("no SCRIPT given: name a Python file, -m MODULE or an executable, e.g. msrun train.py")
    first, rest = words[0], tuple(words[1:])
    if is_module:
        return _module_program(first, rest)
    if first in PYTHON_WORDS:
        return _python_program(first, rest, working_directory)
    if first == "pytest":
        return Program("module", "pytest", rest)
    if first == ONCE:
        return Program("script", ONCE, rest)
    return _file_program(first, rest, working_directory)


def _module_program(name: str, args: tuple[str, ...]) -> Program:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"-m {name}: not a module name; give a dotted name such as -m package.train")
    return Program("module", name, args)


def _python_program(word: str, rest: tuple[str, ...], working_directory: Path) -> Program:
    while rest and rest[0] in PYTHON_FLAGS_WITHOUT_EFFECT:
        rest = rest[1:]
    if not rest:
        raise UsageError(f"{word}: no script after it; name a Python file, e.g. msrun {word} train.py")
    if rest == ("-m",):
        raise UsageError(f"{word} -m: no module after it; give a dotted name such as -m package.train")
    if rest[0] == "-m":
        return _module_program(rest[1], rest[2:])
    if rest[0].startswith("-"):  # -O, -W, -X, -c ...: only a fresh interpreter can honour them
        return Program("executable", sys.executable, rest)
    return _file_program(rest[0], rest[1:], working_directory, as_python=True)


def find_program(name: str) -> str | None:
    """Return the path of an executable on PATH."""
    import shutil  # not for --help, as it loads all compressions

    return shutil.which(name)


def _file_program(name: str, args: tuple[str, ...], working_directory: Path, *, as_python: bool = False) -> Program:
    path = working_directory / name
    if path.is_dir() and not (as_python and (path / "__main__.py").is_file()):
        raise UsageError(f"{name}: is a directory; name the script inside it")
    if path.is_dir() or (as_python and path.is_file() and _is_archive(path)):
        return Program("executable", sys.executable, (name, *args))  # the interpreter finds __main__ in it
    if path.is_file():
        if as_python or path.suffix == ".py":
            return Program("script", str(path), args, typed=name)
        if "/" in name or not find_program(name):
            if not path.stat().st_mode & 0o111:
                remedy = f"run chmod +x {name}, or name its interpreter"
                raise UsageError(f"{name}: not a .py file and not executable; {remedy}")
            return Program("executable", str(path), args)
    if path.exists() and not path.is_file():
        raise UsageError(f"{name}: is no ordinary file; give a program, or - to read one from standard input")
    found = None if "/" in name else find_program(name)
    if found is None:
        raise UsageError(f"{name}: no such file in {working_directory}{_script_hint(name, working_directory)}")
    return Program("executable", found, args)


def _is_archive(path: Path) -> bool:
    import zipfile  # not for --help

    return zipfile.is_zipfile(path)


def _script_hint(name: str, working_directory: Path) -> str:
    folder = (working_directory / name).parent
    if not folder.is_dir():
        return f": the folder {folder} does not exist; check the path or --chdir"
    beside = (entry.name for entry in sorted(folder.iterdir())[:1000])
    hint = near_miss(Path(name).name, [*beside, *(() if "/" in name else ("python", "pytest", *COMMANDS))])
    return hint or ", and no such command on PATH; check the name or --chdir"
