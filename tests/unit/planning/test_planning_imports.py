"""Which imports of a script the fork server may take over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.planning.imports import OF_OPTIMIZERS, SAFE_PACKAGES, read_preload


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch", ["torch"]),
        ("import torch.nn as nn, numpy", ["torch.nn", "numpy"]),
        ("from torch import nn, optim", ["torch:nn", "torch:optim", OF_OPTIMIZERS]),
        ("from torch.optim import SGD", ["torch.optim:SGD", OF_OPTIMIZERS]),
        ("import torch\n\ndef main():\n    torch.optim.SGD([], lr=0.1)", ["torch", OF_OPTIMIZERS]),
        ("import numpy\n\noptim = 3", ["numpy"]),
        ("def f():\n    from torch import optim", []),
        ("from msrun.runtime import init", ["msrun.runtime:init"]),
        ("from torch.nn import *", []),
        ("import os, pandas", []),
        ("import torchvision", []),
        ("import torch\nimport torch", ["torch"]),
        ("try:\n    import torch\nexcept ImportError:\n    import numpy", ["torch"]),
        ("if True:\n    import torch", []),
        ("def f():\n    import torch", []),
        ("from . import torch", []),
        ("from .torch import x", []),
        ("import torch\nif:", []),
        ("# -*- coding: latin-1 -*-\nimport torch", ["torch"]),
        ("", []),
    ],
)
def test_top_level_imports_of_safe_packages_are_found(tmp_path: Path, text: str, names: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert read_preload(script) == names


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
    assert read_preload(tmp_path / "no.py") == []
    (tmp_path / "binary.py").write_bytes(b"import torch\0\xff")
    assert read_preload(tmp_path / "binary.py") == []


@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_without_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    script = tmp_path_factory.getbasetemp() / "any.py"
    script.write_bytes(content)
    assert all(name.split(".")[0].split(":")[0] in SAFE_PACKAGES for name in read_preload(script))
