"""The package as seen from outside: exported names, cheap import, no foreign imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ranktable

ROOT = Path(ranktable.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import ranktable", ["click", "yaml", "json", "dataclasses"]),
        ("from ranktable import build_table, encode_table, read_table, validate_table, write_table", ["click", "yaml"]),
    ],
)
def test_importing_loads_no_more_than_needed(statement, absent):
    code = f"{statement}; import sys; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout == "[]\n"


def test_the_module_runs_as_a_command():
    arguments = [sys.executable, "-m", "ranktable", "validate", "-"]
    done = subprocess.run(arguments, input=b"{", capture_output=True, check=False, cwd=ROOT.parent)
    assert done.returncode == 1
    assert b"ends in the middle of the table" in done.stdout


def test_only_the_standard_library_and_three_packages_are_imported():
    allowed = {*sys.stdlib_module_names, "click", "psutil", "yaml", "ranktable"}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path
