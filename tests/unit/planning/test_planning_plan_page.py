"""The page of a plan: whole, without secrets, and safe to open whatever the plan holds."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from msrun.planning.build import build_plan
from msrun.planning.host_assignment import Fleet, HostAssignment
from msrun.planning.placement.host import HostFacts
from msrun.planning.plan_page import render_page
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec

HOST = HostFacts("node-a", "10.0.0.2", tuple(range(8)))
ASSIGNMENTS = (
    HostAssignment(0, "node-b", "10.0.0.1", (0, 1), (0, 1)),
    HostAssignment(1, "node-a", "10.0.0.2", (2, 3), (4, 5)),
)


def page(fleet: Fleet | None = None, **changes: Any) -> str:
    settings: dict[str, Any] = {
        "program": Program("script", "/t.py", ("<script>alert(1)</script>", "--api_key", "sesame")),
        "worker_num": 4 if fleet else 2,
        "local_worker_num": 2,
        "working_directory": Path("/"),
        "log_dir": Path("/logs"),
        "env": (("API_KEY", "sesame"), ("A", "<b>\n'\"&")),
    }
    spec = LaunchSpec(**{**settings, **changes})
    plan = build_plan(spec, HOST, caller={}, job_id="JOB", run_dir="/tmp/msrun-JOB", master_port=0, fleet=fleet)
    return render_page(plan, '{"version": "1.0"}', [(3, "shard(net, <1>)")])


class Tags(HTMLParser):
    """Proves that every tag is closed in its order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.data += data


@pytest.mark.parametrize("fleet", [None, Fleet(1, ASSIGNMENTS, "10.0.0.1", "eth0")])
def test_page_needs_nothing_else_and_shows_values_as_they_are(fleet: Fleet | None) -> None:
    text = page(fleet)
    tags = Tags(text)
    assert tags.open == [] and "script" not in tags.seen and "sesame" not in text
    for shown in ("<script>alert(1)</script>", "<b>\n'\"&", "shard(net, <1>)", '{"version": "1.0"}', "/logs"):
        assert shown in tags.data
    assert ("node-b" in text) == (fleet is not None)
