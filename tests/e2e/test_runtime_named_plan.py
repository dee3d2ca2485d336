"""`parallelize`: plans by name, of a user, of torch's styles and of a model; trained like one process, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_runner import JobRunner
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import parallelize

WORLD_SIZE = 4
DEADLINE_S = 120.0
BLOCK = ("q", "k", "v", "out", "up", "down")
QUARTERS = {"q": [4, 16], "k": [4, 16], "v": [4, 16], "out": [16, 4], "up": [16, 16], "down": [16, 16]}
WHOLE = {"q": [16, 16], "k": [16, 16], "v": [16, 16], "out": [16, 16], "up": [64, 16], "down": [16, 64]}
HALVES = {"q": [8, 16], "k": [8, 16], "v": [8, 16], "out": [16, 8], "up": [32, 16], "down": [16, 32]}
TURNED = {name: shape[::-1] for name, shape in QUARTERS.items()}
EXPECTED = {
    "words": (QUARTERS, {"embed": [6, 16], "head": [6, 16]}),
    "transposed": (TURNED, {}),
    "columns of a table": (WHOLE, {"embed": [24, 4]}),
    "half of the ranks": (HALVES, {}),
    "styles of torch": ({**WHOLE, "up": [16, 16], "down": [16, 16]}, {}),
    "of the model": (QUARTERS, {"head": [6, 16]}),
}


@pytest.fixture(scope="module")
def results(msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the worker found, of all cases in one job."""
    folder = tmp_path_factory.mktemp("named")
    script = workers / "runtime" / "named_plan.py"
    msrun_of_module.run_world(WORLD_SIZE, script, folder / "result.json", cwd=folder, deadline_s=DEADLINE_S)
    return dict(json.loads((folder / "result.json").read_text()))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_named_plan_trains_like_one_process_and_cuts_what_it_names(results: dict[str, Any], name: str) -> None:
    found, (of_blocks, others) = results[name], EXPECTED[name]
    assert found["is_equal"], found["text"]
    for layer in (0, 1):
        assert {key: found["stored"][f"layers.{layer}.{key}.weight"] for key in BLOCK} == of_blocks
    for key in ("embed", "head"):
        assert found["stored"][f"{key}.weight"] == others.get(key, [24, 16])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"upp": "colwise"}, r"plan 'upp': no module has that name \(did you mean up\?\); the network's are up, norm"),
        ({"up": "columnwise"}, r"plan 'up': 'columnwise' is no word of a plan \(did you mean colwise\?\); they are"),
        ({"norm": "colwise"}, r"plan 'norm': norm \(LayerNorm\) has no weight of two dimensions to be cut colwise"),
        ({"up": nn.ReLU()}, r"plan 'up': 'ReLU' is no word of a plan; they are ColwiseParallel"),
        (None, r"parallelize\(Small\): it brings no tp_plan; give one, e.g."),
    ],
)
def test_a_plan_that_cannot_be_right_is_refused_before_anything_runs(plan: Any, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        parallelize(Small(), plan)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"parallelize\(int\): a torch module is expected"):
        parallelize(3, {})  # type: ignore[type-var]
