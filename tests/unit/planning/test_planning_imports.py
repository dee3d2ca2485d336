"""Which imports of a script the fork server may take over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.planning.imports import OF_OPTIMIZERS, SAFE_PACKAGES, ScriptImports, read_imports


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch.nn as nn, numpy", ["torch.nn", "numpy"]),
        ("from torch import nn, optim", ["torch:nn", "torch:optim", OF_OPTIMIZERS]),
        ("from torch.optim import SGD", ["torch.optim:SGD", OF_OPTIMIZERS]),
        ("import torch\n\ndef main():\n    torch.optim.SGD([], lr=0.1)", ["torch", OF_OPTIMIZERS]),
        ("from msrun.runtime import init", ["msrun.runtime:init"]),
        ("from torch.nn import *", []),
        ("import torchvision", []),
        ("try:\n    import torch\nexcept ImportError:\n    import numpy", ["torch"]),
        ("def f():\n    import torch", []),
        ("from . import torch", []),
        ("import torch\nif:", []),
        ("# -*- coding: latin-1 -*-\nimport torch", ["torch"]),
    ],
)
def test_top_level_imports_of_safe_packages_are_found(tmp_path: Path, text: str, names: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert list(read_imports(script).names) == names


@pytest.mark.slow
def test_torch_imports_that_much_for_its_first_optimizer() -> None:
    code = (
        "import sys, torch\n"
        f"assert {OF_OPTIMIZERS!r} not in sys.modules\n"
        "torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1).zero_grad()\n"
        f"assert {OF_OPTIMIZERS!r} in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_file_that_is_missing_or_no_text_gives_nothing(tmp_path: Path) -> None:
    assert read_imports(tmp_path / "no.py") == ScriptImports()
    (tmp_path / "binary.py").write_bytes(b"import torch\0\xff")
    assert read_imports(tmp_path / "binary.py") == ScriptImports()


@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_without_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    script = tmp_path_factory.getbasetemp() / "any.py"
    script.write_bytes(content)
    assert all(name.split(".")[0].split(":")[0] in SAFE_PACKAGES for name in read_imports(script).names)


OWN = {
    "sets.py": "import os\nos.environ['A'] = '1'\n",
    "torch_first.py": "import os\nimport torch\nos.environ['A'] = '1'\n",
    "defines.py": "import os\ndef setup():\n    os.environ['A'] = '1'\n",
}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'", "s.py:2"),
        ("import os\nos.environ.setdefault('A', '2')", "s.py:2"),
        ("import os\nos.putenv('A', '1')", "s.py:2"),
        ("from os import environ\nenviron['A'] = '2'", "s.py:2"),
        ("import os\nwith open('.env') as f:\n    os.environ.update(l.split('=') for l in f)", "s.py:3"),
        ("import os\ndef f():\n    os.environ['A'] = '1'\nf()", "s.py:4"),
        ("import os\nclass C:\n    def __init__(self):\n        os.environ['A'] = '1'\nC()", "s.py:5"),
        ("import yaml\nyaml.safe_load('')", "s.py:2"),
        ("import importlib\nimportlib.import_module('x')", "s.py:2"),
        ("import os\nset_it = lambda: os.environ.update(A='1')\nset_it()", "s.py:2"),
        ("import os\ndef g(f):\n    os.environ['A'] = '1'\n@g\ndef h(): pass", "s.py:4"),
        ("import os\ndef h(x=os.environ.setdefault('A', '1')): pass", "s.py:2"),
        ("import os\ne = getattr(os, 'environ')", "s.py:2"),
        ("exec('1')", "s.py:1"),
        ("import sets", "sets.py:2"),
        ("from defines import setup\nsetup()", "s.py:2"),
    ],
)
def test_nothing_is_imported_that_the_script_may_have_set_a_variable_for(tmp_path: Path, text: str, line: str) -> None:
    for name, content in OWN.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "s.py").write_text(f"{text}\nimport torch\n")
    assert read_imports(tmp_path / "s.py") == ScriptImports((), "torch", line)


@pytest.mark.parametrize(
    "text",
    [
        "import os\na = os.environ['A']\nb = os.environ.get('B')\nif 'C' in os.environ: print(b)",
        "import os\ndef f():\n    os.environ['A'] = '1'",
        "from defines import setup",
        "import torch_first",
        "import argparse, sys, warnings\nsys.path.append('x')\nwarnings.filterwarnings('ignore')",
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--x')",
    ],
)
def test_what_only_reads_or_defines_is_in_nobodys_way(tmp_path: Path, text: str) -> None:
    for name, content in OWN.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "s.py").write_text(f"{text}\nimport torch\n")
    assert read_imports(tmp_path / "s.py") == ScriptImports(("torch",))


def test_what_was_imported_before_a_variable_is_set_is_taken(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import os\nimport numpy\nos.environ['A'] = '1'\nimport torch\n")
    assert read_imports(tmp_path / "s.py") == ScriptImports(("numpy",), "torch", "s.py:3")


def test_variables_of_torchs_compiler_are_read_with_the_first_optimizer(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import os\nimport torch\nos.environ['TORCHDYNAMO_DISABLE'] = '1'\ntorch.optim.SGD\n"
    )
    assert read_imports(tmp_path / "s.py") == ScriptImports((), "torch", "s.py:3")


def test_packages_of_a_module_run_before_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(OWN["sets.py"])
    (tmp_path / "package" / "run.py").write_text("import torch\n")
    assert read_imports(tmp_path / "package" / "run.py", tmp_path) == ScriptImports((), "torch", "__init__.py:2")
