"""The page of a plan: whole, without secrets, and safe to open whatever the plan holds."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from plans import plan_of, spec_of

from msrun.planning.host_assignment import Fleet, HostAssignment
from msrun.planning.placement.host import HostFacts
from msrun.planning.plan_page import read_strategy_lines, render_page
from msrun.planning.program import Program

HOST = HostFacts("node-a", "10.0.0.2", tuple(range(8)))
ASSIGNMENTS = (
    HostAssignment(0, "node-b", "10.0.0.1", (0, 1), (0, 1)),
    HostAssignment(1, "node-a", "10.0.0.2", (2, 3), (4, 5)),
)


def page(fleet: Fleet | None) -> str:
    program = Program("script", "/t.py", ("<script>alert(1)</script>", "--api_key", "sesame"))
    env = (("API_KEY", "sesame"), ("A", "<b>\n'\"&"))
    spec = spec_of(Path("/"), program=program, worker_num=4 if fleet else 2, log_dir=Path("/logs"), env=env)
    plan = plan_of(spec, HOST, fleet=fleet)
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


SCRIPT = """\
import torch
import msrun.runtime as ms
import mindspore
from msrun.runtime import AutoParallel as AP, shard, init

open("ran", "w")
init()

def build(net):
    shard(net.fc, ((1, 1),
                   (2, 1)))
    return AP(net).hsdp()

step = build(net)
plain = torch.nn.Linear(2, 2)
other = AP(net)
other.pipeline(2)
ms.Pipeline(net, 2)
mindspore.set_auto_parallel_context(parallel_mode="semi_auto")
plain(other)
"""


def read(tmp_path: Path, text: str) -> tuple[tuple[int, str], ...]:
    path = tmp_path / "train.py"
    path.write_text(text)
    return read_strategy_lines(path)


def test_statements_that_divide_a_network_are_found_and_nothing_runs(tmp_path: Path) -> None:
    assert read(tmp_path, SCRIPT) == (
        (10, "shard(net.fc, ((1, 1),\n                   (2, 1)))"),
        (12, "return AP(net).hsdp()"),
        (16, "other = AP(net)"),
        (17, "other.pipeline(2)"),
        (18, "ms.Pipeline(net, 2)"),
        (19, 'mindspore.set_auto_parallel_context(parallel_mode="semi_auto")'),
    )
    assert not (tmp_path / "ran").exists()


def test_what_is_no_script_has_no_strategy(tmp_path: Path) -> None:
    assert read(tmp_path, "shard(x)\nimport shard\n") == ()
    assert read(tmp_path, "def (") == () and read_strategy_lines(tmp_path) == ()
