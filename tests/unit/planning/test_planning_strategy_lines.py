"""What a script says of its strategy, read from its text."""

from __future__ import annotations

from pathlib import Path

from msrun.planning.plan_page import read_strategy_lines

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
