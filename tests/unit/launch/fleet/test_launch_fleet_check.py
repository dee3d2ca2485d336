"""--check of many hosts looks at the launcher's own log directory, too."""

from __future__ import annotations

from pathlib import Path

from msrun.launch.fleet.asked_plan import inspect_launcher
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec


def spec_for(log_dir: Path) -> LaunchSpec:
    return LaunchSpec(
        program=Program("script", "train.py"),
        worker_num=2,
        local_worker_num=1,
        working_directory=Path("/"),
        log_dir=log_dir,
    )


def test_log_directory_here_is_looked_at_and_not_made(tmp_path: Path) -> None:
    findings = inspect_launcher(spec_for(tmp_path / "logs"), {})
    assert [(finding.status in ("ok", "warn"), finding.name) for finding in findings] == [
        (True, "log_dir"),
        (True, "disk"),
    ]
    assert all(finding.text.startswith("here: ") and not finding.nodes for finding in findings)
    assert list(tmp_path.iterdir()) == []


def test_log_directory_that_cannot_be_one_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first = inspect_launcher(spec_for(tmp_path / "file"), {})[0]
    assert (first.status, first.exit_code) == ("fail", 2)
    assert "is a file; give a directory" in first.text
