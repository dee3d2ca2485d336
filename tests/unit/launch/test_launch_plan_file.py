"""The page of a plan: which rank table and which strategy it shows."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from msrun.errors import UsageError
from msrun.launch.rank_table_file import write_page
from msrun.planning.build import build_plan
from msrun.planning.host_assignment import Fleet, HostAssignment
from msrun.planning.hosts.assignment import UNKNOWN
from msrun.planning.placement.host import HostFacts
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec

HOST = HostFacts("h", "10.0.0.1", (0, 1))


def write(folder: Path, fleet: Fleet | None = None, **changes: Any) -> str:
    """Return the text of the page of a job of two workers."""
    (folder / "train.py").write_text("from msrun.runtime import shard\nshard(net, ((2, 1),))\nprint(7)\n")
    settings: dict[str, Any] = {
        "program": Program("script", str(folder / "train.py")), "worker_num": 2, "local_worker_num": 2,
        "working_directory": folder, "log_dir": folder / "logs",
    }  # fmt: skip
    spec = LaunchSpec(**{**settings, **changes})
    plan = build_plan(spec, HOST, caller={}, job_id="JOB", run_dir="/tmp/r", master_port=1, fleet=fleet)
    path = folder / "plan.html"
    assert write_page(path, plan, spec) == f"wrote {path}; open it in a browser"
    return html.unescape(path.read_text())


def test_page_shows_the_generated_table_and_the_lines_of_the_strategy(tmp_path: Path) -> None:
    page = write(tmp_path)
    assert '"server_count": "1"' in page and '"rank_id": "1"' in page
    assert "shard(net, ((2, 1),))" in page and "print(7)" not in page


def test_program_that_is_no_script_has_no_strategy_to_show(tmp_path: Path) -> None:
    assert "shard(net" not in write(tmp_path, program=Program("module", str(tmp_path / "train.py")))


def test_given_table_is_shown_as_it_is(tmp_path: Path) -> None:
    devices = [{"device_id": str(n), "device_ip": f"192.168.1.{n + 1}", "rank_id": str(n)} for n in range(2)]
    table = {"version": "1.0", "server_count": "1", "status": "completed"}
    table["server_list"] = [{"server_id": "10.0.0.9", "device": devices}]  # type: ignore[assignment]
    (tmp_path / "table.json").write_text(json.dumps(table))
    page = write(tmp_path, rank_table_file=tmp_path / "table.json")
    assert "10.0.0.9" in page and "192.168.1.2" in page


@pytest.mark.parametrize("address", [UNKNOWN, "10.0.0.2"])
def test_no_table_is_shown_while_an_address_is_not_known(tmp_path: Path, address: str) -> None:
    assignments = (
        HostAssignment(0, "h", "10.0.0.1", (0, 1), (0, 1)),
        HostAssignment(1, "other", address, (2, 3), (0, 1)),
    )
    fleet = Fleet(0, assignments, "10.0.0.1", "")
    page = write(tmp_path, fleet=fleet, worker_num=4)
    assert ('"server_count"' in page) == (address != UNKNOWN)


def test_file_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "plan.html").mkdir()
    with pytest.raises(UsageError, match=r"--plan .*/plan.html: cannot be written \(it is a directory\); give another"):
        write(tmp_path)
