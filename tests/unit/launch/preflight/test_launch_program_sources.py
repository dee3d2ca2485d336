"""Which files are the program's, read without running any of them."""

import hashlib
import sys

import pytest
from file_tree import grow

from msrun.launch.preflight import checks as host_look
from msrun.launch.preflight.checks import read_sources
from msrun.planning import program as imports
from msrun.planning.program import Program

RUNS = "raise SystemExit('was run')\n"


def write(folder, files):
    grow(folder, {name: RUNS + text for name, text in files.items()})


def names_of(program, folder):
    return [name for name, _ in read_sources(program, folder)]


def script(folder, name="train.py"):
    return Program("script", str(folder / name))


def test_script_and_digest(odd_path):
    write(odd_path, {"train.py": "pass\n"})
    digest = hashlib.sha256((odd_path / "train.py").read_bytes()).hexdigest()
    assert read_sources(script(odd_path), odd_path) == [("train.py", digest)]


NETS = ["nets/__init__.py", "nets/resnet.py", "nets/vit.py"]
IMPORTS = [
    ("import model as m, loss", ["loss.py", "model.py"]),
    ("if True:\n    from model import Net", ["model.py"]),
    ("from nets import (  # all\n    resnet as r,  # one\n    vit,\n)", NETS),
    ("from nets.resnet import Net", NETS),
    ("import nets.vit", ["nets/__init__.py", "nets/vit.py"]),
    ("import plain.tool", ["plain/tool.py"]),
    ("import torch\nimport numpy as np\nfrom os import path", []),
    ("from .model import Net", ["model.py"]),
    (f"from {'.' * 99} import model", []),
    ("import missing\nfrom nets import missing", ["nets/__init__.py"]),
    ("import chain", ["chain.py", "loss.py", "model.py"]),
    ("import nets.relative", ["nets/__init__.py", "nets/relative.py", "nets/resnet.py", "nets/vit.py"]),
    ("import circle", ["circle.py"]),
    ("def f():\n    import model", ["model.py"]),
]


@pytest.mark.parametrize(("text", "expected"), IMPORTS)
def test_modules_beside_the_script_are_found_by_its_imports(tmp_path, text, expected):
    empty = ("model.py", "nets/__init__.py", "nets/vit.py", "plain/tool.py")
    imports = {"loss.py": "model", "chain.py": "loss", "circle.py": "train, circle"}
    relative = {"nets/resnet.py": "from . import vit\n", "nets/relative.py": "from .resnet import Net\n"}
    write(tmp_path, {"train.py": f"{text}\n", **dict.fromkeys(empty, ""), **relative})
    write(tmp_path, {name: f"import {modules}\n" for name, modules in imports.items()})
    main, *others = names_of(script(tmp_path), tmp_path)
    assert (main, sorted(others)) == ("train.py", expected)


def test_imports_are_those_of_the_folder_that_a_link_leads_to(tmp_path):
    """As Python itself looks for them."""
    write(tmp_path, {"real/train.py": "import model\n", "real/model.py": "", "model.py": "other\n"})
    (tmp_path / "train.py").symlink_to("real/train.py")
    found = dict(read_sources(script(tmp_path), tmp_path))
    assert found["model.py"] == hashlib.sha256((tmp_path / "real/model.py").read_bytes()).hexdigest()


MODULES = [
    ("job", ["job.py", "model.py"]),
    ("package", ["package/__main__.py", "package/net.py"]),
    ("package.job", ["package/job.py", "package/net.py"]),
    ("package.inner.job", ["package/inner/job.py"]),
    ("namespace.job", ["namespace/job.py"]),
    ("package.missing", []),
    ("missing", []),
    ("sys", []),
]


@pytest.mark.parametrize(("target", "expected"), MODULES)
def test_module_is_found_without_importing_what_is_above_it(tmp_path, target, expected):
    empty = ("model.py", "package/__init__.py", "package/net.py", "package/inner/__init__.py", "namespace/job.py")
    relative = {"package/__main__.py": "from . import net\n", "package/job.py": "from .net import Net\n"}
    outside = {"package/inner/job.py": "from ....net import Net\n"}
    write(tmp_path, {"job.py": "import model\n", **dict.fromkeys(empty, ""), **relative, **outside})
    found = names_of(Program("module", target), tmp_path)
    assert found[:1] == expected[:1]
    assert sorted(set(found) - {"package/__init__.py"}) == sorted(expected)


def test_installed_module_is_digested_alone(tmp_path, monkeypatch):
    write(tmp_path, {"site/tool/__init__.py": "", "site/tool/__main__.py": "import other\n", "site/other.py": ""})
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    (tmp_path / "cwd").mkdir()
    assert names_of(Program("module", "tool"), tmp_path / "cwd") == ["__main__.py"]


def test_executable_is_digested_alone_and_a_missing_script_is_an_error(tmp_path):
    write(tmp_path, {"run.sh": "import model\n", "model.py": ""})
    assert names_of(Program("executable", str(tmp_path / "run.sh")), tmp_path) == ["run.sh"]
    with pytest.raises(FileNotFoundError):
        read_sources(script(tmp_path), tmp_path)


def test_large_file_is_digested_by_its_beginning_and_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(host_look, "MAX_FILE_BYTES", 10)

    def digest(data):
        (tmp_path / "run").write_bytes(data)
        return read_sources(Program("executable", str(tmp_path / "run")), tmp_path)[0][1]

    assert digest(b"0123456789") == hashlib.sha256(b"0123456789").hexdigest()
    assert len({digest(b"0123456789"), digest(b"0123456789a"), digest(b"0123456789ab"), digest(b"x123456789ab")}) == 4


def test_number_of_files_and_bytes_has_an_end(tmp_path, monkeypatch):
    many = {f"m{number}.py": f"import m{number + 1}\n" for number in range(300)}
    write(tmp_path, {"train.py": "import m0\n", **many})
    assert 200 < len(names_of(script(tmp_path), tmp_path)) < 300
    monkeypatch.setattr(imports, "MAX_TEXT_BYTES", 3 * len(RUNS + "import m0\n"))
    assert names_of(script(tmp_path), tmp_path) == ["train.py", "m0.py", "m1.py", "m2.py"]
