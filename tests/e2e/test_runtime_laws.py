"""The strategy law and the redistribution law: however an operator is cut, its result and gradients are the same."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import operator_cases
import operator_cases_conv
import operator_cases_transformer
import pytest
from asked_cases import CaseTable
from job_runner import JobRunner
from law_graphs import MODULES, WORLDS, runs_of

DEADLINE_S = 400.0
KEYS = {world_size: [key for key, *_ in runs_of(world_size)] for world_size in WORLDS}
REDISTRIBUTION = ["2/redistribution", "4/redistribution"]
FAST = {
    "operator_cases": ["linear-bias", "mean-dims-kept"],
    "operator_cases_bags": ["bags-offsets-mean-padding"],
    "operator_cases_conv": ["max-pool2d-overlapping"],
    "operator_cases_transformer": ["attention", "nll-cut-classes-weights-ignore"],
}
"""What has collectives, halos or a place of its own in more than one dimension."""
TABLE = CaseTable(
    [*(key for keys in KEYS.values() for key in keys), *REDISTRIBUTION],
    fast=[*(f"4/{module}/{name}" for module, names in FAST.items() for name in names), "4/redistribution"],
    key=lambda key: key,
)

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    """What the laws' worker found in every world; one job each, started when first asked for."""

    class Outcomes(dict[int, dict[str, Any]]):
        def __missing__(self, world_size: int) -> dict[str, Any]:
            folder = tmp_path_factory.mktemp(f"laws-{world_size}")
            result = folder / "result.json"
            msrun_of_module.run_world(
                world_size,
                workers / "runtime" / "laws.py",
                result,
                cwd=folder,
                preload=["law_graphs"],
                env={"LAW_GRAPHS": str(world_size), **TABLE.asked(request)},
                deadline_s=DEADLINE_S,
            )
            self[world_size] = json.loads(result.read_text())
            return self[world_size]

    return Outcomes()


@TABLE.parametrize("key", [(key,) for keys in KEYS.values() for key in keys])
def test_every_legal_strategy_gives_the_result_and_gradients_of_one_process(
    outcomes: dict[int, dict[str, Any]], key: str
) -> None:
    for dtype, found in outcomes[int(key[0])][key].items():
        assert found["wrong"] == [], dtype
        assert found["runs"] > 0


@TABLE.parametrize("key", [(key,) for key in REDISTRIBUTION])
def test_every_layout_can_be_moved_to_every_other_and_its_gradient_back(
    outcomes: dict[int, dict[str, Any]], key: str
) -> None:
    found = outcomes[int(key[0])][key]["float64"]
    assert found["wrong"] == []
    assert found["runs"] == {2: 16, 4: 361}[int(key[0])]


COUNTS = [
    (operator_cases, {"linear": 10, "linear-3d-bias": 14, "no-rule": 1}),
    (operator_cases_conv, {"batch-norm-2d": 13, "conv2d": 19, "conv2d-depthwise": 9, "max-pool2d-overlapping": 9}),
    (
        operator_cases_transformer,
        {"embedding": 10, "attention": 14, "attention-causal": 8, "embedding-by-frequency": 3},
    ),
]


@pytest.mark.parametrize(("module", "legal"), COUNTS, ids=[module.__name__ for module, _ in COUNTS])
def test_cases_try_many_strategies(module: Any, legal: dict[str, int]) -> None:
    """Guards the guard: a mistake in the table of cases must not empty the law."""
    counts = {case.name: len(case.legal(4)) for case in module.BINARY}
    assert {name: counts[name] for name in legal} == legal
    assert sum(counts.values()) > 330


def test_every_case_runs_in_a_world() -> None:
    run = {key.partition("/")[2] for keys in KEYS.values() for key in keys}
    modules = [importlib.import_module(name) for name in MODULES]
    assert run == {f"{m.__name__}/{case.name}" for m in modules for case in [*m.BINARY, *m.UNARY]}
    assert {key for keys in KEYS.values() for key in keys if key.startswith("8/")}
    assert set(operator_cases_transformer.ON_FOUR) <= {key.split("/")[2] for key in KEYS[4]}
