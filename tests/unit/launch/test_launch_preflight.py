"""What a host is asked before anything starts, without writing anything."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path

import pytest

from msrun.errors import UsageError
from msrun.launch.preflight import check_host
from msrun.planning.program import Program, ProgramKind
from msrun.planning.spec import LaunchSpec


def spec_for(
    folder: Path, *, log_dir: Path | None = None, kind: ProgramKind = "script", target: str = "x.py"
) -> LaunchSpec:
    return LaunchSpec(
        program=Program(kind, target),
        worker_num=1,
        local_worker_num=1,
        working_directory=folder,
        log_dir=log_dir or folder / "logs",
    )


@pytest.mark.parametrize("name", ["logs", "logs/of/today", "."])
def test_log_directory_that_can_be_made_is_taken_and_not_made(tmp_path: Path, name: str) -> None:
    check_host(spec_for(tmp_path, log_dir=tmp_path / name))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/logs", "file/logs/today"])
def test_log_directory_below_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--log_dir .*file is a file; give a directory"):
        check_host(spec_for(tmp_path, log_dir=tmp_path / name))


def test_log_directory_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UsageError, match="no permission to write"):
        check_host(spec_for(tmp_path))


@pytest.mark.parametrize(
    "target", ["json.tool", "sys", "zipimport", "pytest", "msrun", "local_package.job", "local_file"]
)
def test_module_that_exists_is_taken_without_importing_it(tmp_path: Path, target: str) -> None:
    (tmp_path / "local_package").mkdir()
    (tmp_path / "local_package" / "job.py").touch()
    (tmp_path / "local_file.py").write_text("raise SystemExit('imported')")
    check_host(spec_for(tmp_path, kind="module", target=target))


@pytest.mark.parametrize("target", ["no_such_module_here", "no_such_module_here.job", "__main__"])
def test_module_that_does_not_exist_is_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(UsageError, match=f"-m {target}: no module"):
        check_host(spec_for(tmp_path, kind="module", target=target))


def test_module_that_an_import_hook_provides_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an editable installation does."""

    class Hook:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            return importlib.machinery.ModuleSpec(name, None) if name == "editable_package" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])
    check_host(spec_for(tmp_path, kind="module", target="editable_package.train"))
