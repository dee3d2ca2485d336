"""The user's program: which kind it is and how a worker runs it."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from msrun.errors import UsageError, near_miss

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
PYTHON_FLAGS_WITHOUT_EFFECT = frozenset({"-u"})
"""Workers write whole lines at once, so `python -u x.py` is run as `python x.py`."""


@dataclass(frozen=True)
class Program:
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


def _file_program(name: str, args: tuple[str, ...], working_directory: Path, *, as_python: bool = False) -> Program:
    import zipfile  # not for --help

    path = working_directory / name
    if path.is_dir() and not (as_python and (path / "__main__.py").is_file()):
        raise UsageError(f"{name}: is a directory; name the script inside it")
    if path.is_dir() or (as_python and path.is_file() and zipfile.is_zipfile(path)):
        return Program("executable", sys.executable, (name, *args))  # the interpreter finds __main__ in it
    if path.is_file():
        if as_python or path.suffix == ".py":
            return Program("script", str(path), args, typed=name)
        if "/" in name or not shutil.which(name):
            if not path.stat().st_mode & 0o111:
                remedy = f"run chmod +x {name}, or name its interpreter"
                raise UsageError(f"{name}: not a .py file and not executable; {remedy}")
            return Program("executable", str(path), args)
    found = None if "/" in name else shutil.which(name)
    if found is None:
        raise UsageError(f"{name}: no such file in {working_directory}{_script_hint(name, working_directory)}")
    return Program("executable", found, args)


def _script_hint(name: str, working_directory: Path) -> str:
    folder = (working_directory / name).parent
    if not folder.is_dir():
        return f": the folder {folder} does not exist; check the path or --chdir"
    beside = (entry.name for entry in sorted(folder.iterdir())[:1000])
    hint = near_miss(Path(name).name, [*beside, *(() if "/" in name else ("python", "pytest", *COMMANDS))])
    return hint or ", and no such command on PATH; check the name or --chdir"
