"""The example programs that are installed with msrun, or lie beside it in a checkout."""

from __future__ import annotations

import ast
import shlex
import shutil
from pathlib import Path

from msrun.errors import ClusterError, UsageError, near_miss, refused_as

PACKAGE = Path(__file__).resolve().parents[1]
LEFT_BY_RUNS = ("log_output", "checkpoints", "data", "__pycache__")
PROGRAMS = ("train.py", "*_training.py", "*_parallel.py")  # whose first lines say what examples show
NEEDED = {"torch/distributed_training": ("torch/startup_methods",)}  # example -> those whose scripts it runs


def list_examples() -> dict[str, str]:
    """Return the name of every example and what it shows, in one sentence. ClusterError: the examples are not there."""
    root = _folder()
    programs = [path for name in PROGRAMS for path in root.glob(f"*/*/{name}")]
    shown = {
        path.parent.relative_to(root).as_posix(): ast.get_docstring(ast.parse(path.read_bytes())) for path in programs
    }
    return {name: (text or "").partition("\n")[0] for name, text in sorted(shown.items())}


def copy_examples(name: str | None, directory: Path) -> list[Path]:
    """Copy one example, or all of them, and return their new folders, each `directory`/NAME.

    Raises:
        UsageError: no such example, something is there already, or it cannot be written.
        ClusterError: the examples are not there."""
    names = list(list_examples())
    if name is not None and name not in names:
        raise UsageError(f"{name}: no such example{near_miss(name, names)}; there are {', '.join(names)}")
    targets = [directory / each for each in ([name, *NEEDED.get(name, ())] if name is not None else names)]
    for target in targets:
        if target.exists():
            raise UsageError(f"{target}: is there already; remove it, or give another DIR")
    for target in targets:
        with refused_as(f"{target}: cannot be written", "give another DIR"):
            shutil.copytree(
                _folder() / target.relative_to(directory), target, ignore=shutil.ignore_patterns(*LEFT_BY_RUNS)
            )
    return targets


def how_to_run(example: Path) -> str:
    guide = example / "README.md"
    return f"see {guide}" if guide.is_file() else f"to run it: bash {shlex.quote(str(example / 'run.sh'))}"


def _folder() -> Path:
    for folder in (PACKAGE / "examples", PACKAGE.parent / "examples"):
        if (folder / "torch" / "mnist" / "train.py").is_file():
            return folder
    raise ClusterError(f"there are no examples in {PACKAGE / 'examples'}; install msrun again")
