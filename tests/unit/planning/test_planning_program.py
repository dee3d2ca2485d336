"""The words after the options become a program; which of its imports the fork server may take over; records of both."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.program import (
    OF_OPTIMIZERS,
    SAFE_PACKAGES,
    ScriptImports,
    imports_package,
    parse_program,
    read_imports,
)
from msrun.planning.record import decode_record, encode_record


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "job.py").touch()
    (tmp_path / "run").touch(mode=0o755)
    (tmp_path / "plain").touch(mode=0o644)
    (tmp_path / "ls").touch(mode=0o644)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "is_module", "kind", "target", "args"),
    [
        (["train.py", "-a", ""], False, "script", "{}/train.py", ("-a", "")),
        (["pkg.job", "x"], True, "module", "pkg.job", ("x",)),
        (["python", "train.py", "x"], False, "script", "{}/train.py", ("x",)),
        (["python", "-m", "pkg.job", "-u"], False, "module", "pkg.job", ("-u",)),
        (["python", "-c", "pass"], False, "executable", sys.executable, ("-c", "pass")),
        (["python", "-O", "train.py"], False, "executable", sys.executable, ("-O", "train.py")),
        (["pytest", "-s", "x.py"], False, "module", "pytest", ("-s", "x.py")),
        (["./run", "a"], False, "executable", "{}/run", ("a",)),
        (["sh", "-c", "exit"], False, "executable", "/", ("-c", "exit")),
        (["ls"], False, "executable", "/", ()),  # a command wins over a plain file of its name
    ],
)
def test_form_is_understood(folder, words, is_module, kind, target, args):
    program = parse_program(words, is_module=is_module, working_directory=folder)
    assert (program.kind, program.args) == (kind, args)
    if target == "/":
        assert Path(program.target).is_absolute() and folder not in Path(program.target).parents
    else:
        assert program.target == target.format(folder)
    assert program.is_python is (kind != "executable")


@pytest.mark.parametrize(
    ("words", "is_module", "message"),
    [
        (["pyhton", "t.py"], False, "did you mean python"),
        (["example", "list"], False, "did you mean examples"),
        (["no-such-command"], False, "no such command on PATH"),
        (["train.py"], True, None),
    ],
)
def test_form_that_cannot_run_is_refused(folder, words, is_module, message):
    if message is None:  # a file name is a dotted name too; whether the module exists is the preflight's question
        assert parse_program(words, is_module=is_module, working_directory=folder).target == "train.py"
        return
    with pytest.raises(UsageError, match=message):
        parse_program(words, is_module=is_module, working_directory=folder)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch.nn as nn, numpy", ["torch.nn", "numpy"]),
        ("from torch import nn, optim", ["torch:nn", "torch:optim", OF_OPTIMIZERS]),
        ("from torch.optim import SGD", ["torch.optim:SGD", OF_OPTIMIZERS]),
        ("import torch\n\ndef main():\n    torch.optim.SGD([], lr=0.1)", ["torch", OF_OPTIMIZERS]),
        ("from torch.nn import *", []),
        ("import torchvision", []),
        ("try:\n    import torch\nexcept ImportError:\n    import numpy", ["torch"]),
        ("def f():\n    import torch", []),
        ("from . import torch", []),
        (f"from {'.' * 99} import deep\nimport torch", ["torch"]),
        ("import torch\nif:", []),
        ("# -*- coding: latin-1 -*-\nimport torch", ["torch"]),
    ],
)
def test_top_level_imports_of_safe_packages_are_found(tmp_path, text, names):
    script = tmp_path / "train.py"
    script.write_text(text)
    assert list(read_imports(script).names) == names


@pytest.mark.slow
def test_torch_imports_that_much_for_its_first_optimizer():
    code = (
        "import sys, torch\n"
        f"assert {OF_OPTIMIZERS!r} not in sys.modules\n"
        "torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1).zero_grad()\n"
        f"assert {OF_OPTIMIZERS!r} in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_file_that_is_missing_or_no_text_gives_nothing(tmp_path):
    assert read_imports(tmp_path / "no.py") == ScriptImports()
    (tmp_path / "binary.py").write_bytes(b"import torch\0\xff")
    assert read_imports(tmp_path / "binary.py") == ScriptImports()


def test_a_package_is_found_in_modules_above_and_beside_the_script_and_never_beyond_the_root(tmp_path):
    for name, text in {
        "net.py": "import mindspore",
        "sub/run.py": "from ..net import Net",
        "s.py": "import net",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\nfrom {'.' * 99} import deep\n")
    found = [imports_package(tmp_path / name, "mindspore") for name in ("s.py", "sub/run.py", "none.py")]
    assert found == [True, True, False]


@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_without_an_error(tmp_path_factory, content):
    script = tmp_path_factory.getbasetemp() / "any.py"
    script.write_bytes(content)
    assert all(name.split(".")[0].split(":")[0] in SAFE_PACKAGES for name in read_imports(script).names)


OWN = {
    "sets.py": "import os\nos.environ['A'] = '1'\n",
    "torch_first.py": "import os\nimport torch\nos.environ['A'] = '1'\n",
    "defines.py": "import os\ndef setup():\n    os.environ['A'] = '1'\ndef harmless(): harmless()\n",
}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '2'", "s.py:2"),
        ("import os\nos.environ.setdefault('A', '2')", "s.py:2"),
        ("import os\nos.putenv('A', '1')", "s.py:2"),
        ("from os import environ\nenviron['A'] = '2'", "s.py:2"),
        ("from os import environ as e\ne['A'] = '2'", "s.py:1"),
        ("f = input\nf()", "s.py:2"),
        ("import os\nif 1:\n    def f(): os.putenv('A', '1')\nf()", "s.py:4"),
        ("import os\ndef f():\n    os.environ['A'] = '1'\nf()", "s.py:4"),
        ("import os\nclass C:\n    def __init__(self):\n        os.environ['A'] = '1'\nC()", "s.py:5"),
        ("import yaml\nyaml.safe_load('')", "s.py:2"),
        ("import os\ndef g(f):\n    os.environ['A'] = '1'\n@g\ndef h(): pass", "s.py:4"),
        ("import os\ndef h(x=os.environ.setdefault('A', '1')): pass", "s.py:2"),
        ("import os\ne = getattr(os, 'environ')", "s.py:2"),
        ("exec('1')", "s.py:1"),
        ("import sets", "sets.py:2"),
        ("from defines import setup\nsetup()", "s.py:2"),
    ],
)
def test_nothing_is_imported_that_the_script_may_have_set_a_variable_for(tmp_path, text, line):
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
        "from defines import harmless\nharmless()",
        "import argparse, sys, warnings\nsys.path.append('x')\nwarnings.filterwarnings('ignore')",
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--x')\nparser.eval()",
    ],
)
def test_what_only_reads_or_defines_is_in_nobodys_way(tmp_path, text):
    for name, content in OWN.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "s.py").write_text(f"{text}\nimport torch\n")
    assert read_imports(tmp_path / "s.py") == ScriptImports(("torch",))


def test_what_was_imported_before_a_variable_is_set_is_taken(tmp_path):
    (tmp_path / "s.py").write_text("import os\nimport numpy\nos.environ['A'] = '1'\nimport torch\n")
    assert read_imports(tmp_path / "s.py") == ScriptImports(("numpy",), "torch", "s.py:3")


def test_variables_of_torchs_compiler_are_read_with_the_first_optimizer(tmp_path):
    (tmp_path / "s.py").write_text(
        "import os\nimport torch\nos.environ['TORCHDYNAMO_DISABLE'] = '1'\ntorch.optim.SGD\n"
    )
    assert read_imports(tmp_path / "s.py") == ScriptImports((), "torch", "s.py:3")
    (tmp_path / "s.py").write_text("import os\nimport torch\nos.environ['TORCH_HOME'] == torch.optim\n")
    assert read_imports(tmp_path / "s.py").names == ("torch", OF_OPTIMIZERS)


def test_packages_of_a_module_run_before_it(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(OWN["sets.py"])
    (tmp_path / "package" / "run.py").write_text("import torch\n")
    assert read_imports(tmp_path / "package" / "run.py", tmp_path) == ScriptImports((), "torch", "__init__.py:2")


@dataclass(frozen=True)
class Inner:
    name: str
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner
    path: Path
    share: float
    word: Literal["a", "b"] = "a"
    maybe: Inner | None = None
    either: int | str = 0
    pairs: tuple[tuple[str, str], ...] = ()
    table: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rows: list[dict[str, int | str]] = field(default_factory=list)
    flag: bool = False


texts = st.text(st.characters(codec="utf-8"), max_size=6)
inners = st.builds(Inner, texts, st.lists(st.integers(), max_size=3).map(tuple))
outers = st.builds(
    Outer,
    inners,
    st.sampled_from([Path("/"), Path("/a b/c"), Path("x")]),
    st.floats(allow_nan=False),
    word=st.sampled_from(["a", "b"]),
    maybe=st.none() | inners,
    either=st.integers() | texts,
    pairs=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
    table=st.dictionaries(st.integers(), st.lists(st.integers(), max_size=2).map(tuple), max_size=2),
    rows=st.lists(st.dictionaries(texts, st.integers() | texts, max_size=2), max_size=2),
    flag=st.booleans(),
)


@given(outers)
def test_record_comes_back_as_it_was(record):
    assert decode_record(Outer, json.loads(json.dumps(encode_record(record)))) == record


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "Expected `object`, got `array`"),
        ({"name": 1}, r"Expected `str`, got `int` - at `\$\.name`"),
        ({"name": "x", "numbers": "12"}, "Expected `array`, got `str`"),
        ({"name": "x", "numbers": [True]}, "Expected `int`, got `bool`"),
    ],
)
def test_value_of_another_form_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        decode_record(Inner, value)


plain = st.none() | st.booleans() | st.integers() | texts


@given(st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)))
def test_no_json_value_raises_anything_but_value_error(value):
    try:
        decode_record(Outer, value)
    except ValueError:
        return
    raise AssertionError("taken for a record")
