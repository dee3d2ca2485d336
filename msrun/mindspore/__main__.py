"""`python -m msrun.mindspore train.py ARGS...`: run a script whose imports say `mindspore`, on torch.

`--check PATH...` says what scripts name that is not here, and runs nothing.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import msrun.mindspore
from msrun.mindspore.import_paths import pose_as_mindspore
from msrun.mindspore.missing import report

USAGE = (
    "usage: python -m msrun.mindspore SCRIPT [ARGS]..., python -m msrun.mindspore -m MODULE [ARGS]..., or "
    "python -m msrun.mindspore --check PATH..."
)


def main(words: list[str]) -> None:
    """Run a script, or with -m a module, as `python` would, with MindSpore's import paths.

    Args:
        words: the command line behind the name of this program.
    """
    if words[:1] == ["--check"]:
        _check([Path(word) for word in words[1:]])
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words or words[0].startswith("-"):
        sys.exit(f"msrun.mindspore: error: no script\n{USAGE}")
    script = Path(words[0])
    if not is_module and not script.is_file():
        sys.exit(f"msrun.mindspore: error: {script}: no such file; give the path of a Python script\n{USAGE}")
    pose_as_mindspore(msrun.mindspore.__name__)
    sys.argv = words
    if is_module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def _check(paths: list[Path]) -> None:
    if not paths:
        sys.exit(f"msrun.mindspore: error: --check: no files; give scripts or folders\n{USAGE}")
    for path in paths:
        if not path.exists():
            sys.exit(f"msrun.mindspore: error: --check {path}: no such file or folder\n{USAGE}")
    text, status = report(paths)
    sys.stdout.write(f"{text}\n")
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
