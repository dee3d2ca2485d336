"""The package as somebody installs it: the wheel with what it declares, in an environment without torch."""

import importlib.metadata
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import REPOSITORY
from packaging.requirements import Requirement

import msrun as package

DISTRIBUTION = "msrun"
COMMANDS = ("msrun", "ranktable", "launch-template")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


def declared(metadata, extra=""):
    """Return the names of the packages that a distribution needs, without and with an extra."""
    needs = map(Requirement, metadata.get_all("Requires-Dist") or [])
    return {need.name.lower() for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})}


def metadata_of(wheel):
    folder = next(path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    return importlib.metadata.PathDistribution(folder).metadata  # a path in an archive


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """The commands of an environment with the wheel and the packages that it declares, and no others."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    wanted, there = declared(metadata_of(wheel)), set[str]()
    while wanted - there:
        name = min(wanted - there)
        there.add(name)
        found = importlib.metadata.distribution(name)
        wanted |= declared(found.metadata)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(found.locate_file(top))))
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-index"]
    subprocess.run([*command, "--no-deps", "--quiet", str(wheel)], check=True, timeout=60)
    return folder / "bin"


def run(command, *words, cwd):
    return subprocess.run(
        [command, *words], cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60
    )


def test_wheel_brings_the_launchers_packages_and_never_torch(wheel):
    metadata = metadata_of(wheel)
    own = {"click", "msgspec", "psutil", "pyyaml", "rich", "setproctitle"}
    assert declared(metadata) == own
    assert declared(metadata, "runtime") - declared(metadata) == {"torch", "numpy"}
    (torch,) = {text for text in metadata.get_all("Requires-Dist") or [] if re.match(r"torch\b.*'runtime'", text)}
    assert "<" not in torch and "==" not in torch.partition(";")[0], "a bound would replace the user's torch"


def test_wheel_holds_the_licence_the_examples_and_typing_marks(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"{part}/py.typed" for part in ("msrun", "ranktable", "launch_templates")} <= names
    assert f"{DISTRIBUTION}-{package.__version__}.dist-info/licenses/LICENSE" in names
    programs = {f"msrun/{path.relative_to(REPOSITORY)}" for path in (REPOSITORY / "examples").glob("*/*/train.py")}
    assert programs and programs <= names
    assert not {name for name in names if name.startswith("tests/") or "log_output" in name}


def test_sdist_holds_what_the_repository_holds(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("docs", "examples", "tests", "benchmarks", "msrun", "ranktable", "launch_templates"):
        assert any(name.startswith(f"{folder}/") for name in names), folder
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "Dockerfile", "constraints.txt"} <= names


def test_command_that_needs_torch_says_so_in_one_line(bare, tmp_path):
    done = run(bare / "msrun-checkpoint", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"msrun-checkpoint: error: .*torch.*\n", done.stderr)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_version_of_the_package(bare, tmp_path, name):
    done = run(bare / name, "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{name}, version {package.__version__}\n"), done.stderr


@pytest.mark.parametrize("method", one_fast("fork", "exec"))
def test_scripts_without_torch_run_without_torch(msrun, bare, tmp_path, method):
    (tmp_path / "plain.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    options = ["--worker_num=2", f"--start_method={method}"]
    done = msrun.run(*options, "plain.py", cwd=tmp_path, env={"PYTHONPATH": ""}, command=[str(bare / "msrun")])
    assert done.code == 0, done.stderr
    assert [done.log(rank) for rank in (0, 1)] == [b"rank 0\n", b"rank 1\n"]


def test_script_that_uses_the_runtime_is_told_in_one_line_what_to_install(msrun, bare, tmp_path):
    (tmp_path / "train.py").write_text("from msrun.runtime import init\ninit()\n")
    command = [str(bare / "msrun")]
    done = msrun.run("--worker_num=1", "train.py", cwd=tmp_path, env={"PYTHONPATH": ""}, command=command)
    assert done.code == 1
    (line,) = done.log(0).decode().splitlines()
    assert line.startswith("MissingPackageError: msrun.runtime needs torch and numpy, not installed for ")
    assert line.endswith("; run: pip install 'msrun[runtime]'")


def test_torch_of_another_python_meets_without_msruns_help(msrun, bare, workers, tmp_path):
    """As when msrun has an environment of its own and the training another one."""
    words = ["--worker_num=2", sys.executable, str(workers / "all_reduce.py")]
    done = msrun.run(*words, cwd=tmp_path, env={"PYTHONPATH": ""}, command=[str(bare / "msrun")])
    assert done.code == 0, done.stderr
    assert len(list(tmp_path.glob("result_*.json"))) == 2


def test_examples_are_copied_from_the_installed_package_and_start(msrun, bare, tmp_path):
    listed = run(bare / "msrun", "examples", "list", cwd=tmp_path).stdout
    assert len(listed.splitlines()) == len(list((REPOSITORY / "examples").rglob("run.sh")))
    copied = run(bare / "msrun", "examples", "copy", "torch/mnist", cwd=tmp_path)
    assert copied.returncode == 0, copied.stderr
    script = shlex.split(copied.stdout.splitlines()[-1].removeprefix("to run it: "))
    env = {"PYTHONPATH": "", "PATH": f"{bare}:/usr/bin:/bin"}
    log_dir = "msrun_examples/torch/mnist/log_output"
    done = msrun.run(*script[1:], cwd=tmp_path, env=env, command=script[:1], log_dir=log_dir)
    assert done.code == 1, "torch is missing, which the program says"
    assert b"No module named 'torch'" in done.log(0)
