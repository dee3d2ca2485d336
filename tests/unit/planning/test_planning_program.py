"""The words after the options become a program, or are refused with a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from msrun.errors import UsageError
from msrun.planning.program import Program, join_programs, parse_program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
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
        (["pkg/job.py"], False, "script", "{}/pkg/job.py", ()),
        (["pkg.job", "x"], True, "module", "pkg.job", ("x",)),
        (["python", "train.py", "x"], False, "script", "{}/train.py", ("x",)),
        (["python3", "-u", "-u", "train.py"], False, "script", "{}/train.py", ()),
        (["python", "-m", "pkg.job", "-u"], False, "module", "pkg.job", ("-u",)),
        (["python", "-c", "pass"], False, "executable", sys.executable, ("-c", "pass")),
        (["python", "-O", "train.py"], False, "executable", sys.executable, ("-O", "train.py")),
        (["pytest", "-s", "x.py"], False, "module", "pytest", ("-s", "x.py")),
        (["./run", "a"], False, "executable", "{}/run", ("a",)),
        (["sh", "-c", "exit"], False, "executable", "/", ("-c", "exit")),
        (["ls"], False, "executable", "/", ()),  # a command wins over a plain file of its name
    ],
)
def test_form_is_understood(
    folder: Path, words: list[str], is_module: bool, kind: str, target: str, args: tuple[str, ...]
) -> None:
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
        ([], False, "no SCRIPT given"),
        (["tarin.py"], False, "tarin.py: no such file in .*did you mean train.py"),
        (["pyhton", "t.py"], False, "did you mean python"),
        (["example", "list"], False, "did you mean examples"),
        (["no/such/train.py"], False, "the folder .*/no/such does not exist"),
        (["pkg"], False, "pkg: is a directory; name the script inside it"),
        (["./plain"], False, r"chmod \+x ./plain"),
        (["no-such-command"], False, "no such command on PATH"),
        (["python"], False, "python: no script after it"),
        (["python", "-m", "a/b"], False, "-m a/b: not a module name"),
        (["train.py"], True, None),
        (["pkg..job"], True, "not a module name"),
    ],
)
def test_form_that_cannot_run_is_refused(folder: Path, words: list[str], is_module: bool, message: str | None) -> None:
    if message is None:  # a file name is a dotted name too; whether the module exists is the preflight's question
        assert parse_program(words, is_module=is_module, working_directory=folder).target == "train.py"
        return
    with pytest.raises(UsageError, match=message):
        parse_program(words, is_module=is_module, working_directory=folder)


def test_roles_are_counted_over_all_programs_that_have_them() -> None:
    roles = ("a", "b", "a")
    job = join_programs([(Program("script", f"{i}.py", role=role), 2) for i, role in enumerate(roles)])
    assert [job.role_of(rank, 6) for rank in range(6)] == [
        ("a", 0, 4), ("a", 1, 4), ("b", 0, 2), ("b", 1, 2), ("a", 2, 4), ("a", 3, 4),
    ]  # fmt: skip
