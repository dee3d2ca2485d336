"""Optimizers on the host: the losses of the device and of one process, 1/3 and 1/8 of the device's memory.

The cases stand in tests/cases/host_optimizer.py; one job of two ranks runs them, one of four the slow ones again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_optimizer
import pytest
from asked_cases import CaseTable
from job_runner import JobRunner

DEADLINE_S = 280.0
ONE_PROCESS, DEVICE = 1e-9, 1e-12
CASES = list(host_optimizer.cases(2))
LAWS = [case for case in CASES if case.startswith("law/")]
FAST = {"law/Lamb/streamed-tensor-level3", "resume/places"}
TABLE = CaseTable(CASES, fast=[case for case in CASES if case in FAST], key=lambda case, ranks=2: case)
Outcome = list[dict[str, Any]]
"""What a case found, per rank."""
OFTEN = [pytest.param(2), pytest.param(4, marks=pytest.mark.slow)]

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Outcome]:
    """Gives what a case found in a world; its job runs when first asked for."""
    found: dict[int, dict[str, Outcome]] = {}

    def outcome(case: str, ranks: int) -> Outcome:
        if ranks not in found:
            folder = tmp_path_factory.mktemp(f"host-{ranks}")
            program, result = workers / "runtime" / "modes.py", folder / "result.json"
            env = {**TABLE.asked(request), "TMPDIR": str(folder)}
            msrun_of_module.run_world(
                ranks, program, result, "host_optimizer", cwd=folder, env=env, deadline_s=DEADLINE_S
            )
            found[ranks] = json.loads(result.read_text())
        for rank in found[ranks][case]:
            assert "error" not in rank, rank["error"]
        return found[ranks][case]

    return outcome


@pytest.mark.parametrize("ranks", OFTEN)
@TABLE.parametrize("case", [(case,) for case in LAWS])
def test_losses_are_those_of_the_device_and_of_one_process(
    outcomes: Callable[..., Outcome], case: str, ranks: int
) -> None:
    if ranks == 4 and case not in host_optimizer.cases(4):
        pytest.skip("a pipeline of two ranks")
    for rank in outcomes(case, ranks):
        assert rank["host"] == pytest.approx(rank["device"], rel=DEVICE, abs=0)
        assert rank["host"] == pytest.approx(rank["right"], rel=ONE_PROCESS, abs=0)
        assert len(set(rank["host"])) == host_optimizer.STEPS


@pytest.mark.parametrize("ranks", OFTEN)
@TABLE.parametrize("case", [("narrow/kept",), ("narrow/streamed",)])
def test_weights_of_16_bits_are_bit_for_bit_the_rounded_masters_of_one_process(
    outcomes: Callable[..., Outcome], case: str, ranks: int
) -> None:
    for rank in outcomes(case, ranks):
        assert set(rank["equal"]) == {True}
        assert set(rank["moved"]) == {True}


@TABLE.looks_at("memory")
def test_device_holds_a_third_of_float32_adam_and_an_eighth_of_the_mixed_recipe(
    outcomes: Callable[..., Outcome],
) -> None:
    for rank in outcomes("memory", 2):
        device, host, streamed = (rank[name] for name in ("device", "host", "streamed"))
        adam = device["device"]["weights"] + device["device"]["state"]
        mixed = sum(host["device"].values()) + sum(host["host"].values())
        assert adam == pytest.approx(12, abs=0.02)
        assert mixed == pytest.approx(16, abs=0.02)
        assert host["device"] == {"weights": 2, "gradients": 2, "state": 0}
        assert sum(host["device"].values()) / adam == pytest.approx(1 / 3, rel=2e-3)
        assert streamed["device"] == {"weights": 2, "gradients": 0, "state": 0}
        assert sum(streamed["device"].values()) / mixed == pytest.approx(1 / 8, rel=2e-3)
        assert device["copied"] == [0, 0]
        assert host["copied"] == streamed["copied"] == [2, 2], "gradients there, weights back"


@pytest.mark.parametrize("ranks", OFTEN)
@TABLE.parametrize("case", [("resume/narrow",), ("resume/layouts",), ("resume/places",)])
def test_training_goes_on_from_a_checkpoint_in_other_layouts_and_places(
    outcomes: Callable[..., Outcome], case: str, ranks: int
) -> None:
    for rank in outcomes(case, ranks):
        assert rank["resumed"] == pytest.approx(rank["through"], rel=0 if "narrow" in case else DEVICE, abs=0)


@TABLE.looks_at("round trip")
def test_state_dict_carries_masters_and_moments_whole(outcomes: Callable[..., Outcome]) -> None:
    for rank in outcomes("round trip", 2):
        assert rank["left"] == rank["right"]
        assert set(rank["equal"]) == {True}
        assert rank["types"] == ["torch.float32"]


@TABLE.looks_at("in backward")
def test_step_in_the_backward_pass_copies_gradients_there_and_weights_back(outcomes: Callable[..., Outcome]) -> None:
    assert [rank["copied"] for rank in outcomes("in backward", 2)] == [[2, 2], [2, 2]]


@TABLE.looks_at("uses")
def test_network_is_verified_saved_and_captured_again_with_its_gradients_on_the_host(
    outcomes: Callable[..., Outcome],
) -> None:
    for rank in outcomes("uses", 2):
        assert rank["report"] == "verify: 5 of 5 values of 2 ranks equal one process"
        assert rank["again"] == rank["losses"]


@TABLE.looks_at("refusals")
def test_what_cannot_be_is_refused_with_what_to_do(outcomes: Callable[..., Outcome]) -> None:
    for rank in outcomes("refusals", 2):
        assert rank["on the device"].endswith("the optimizer works on the device: call optim.offload(optimizer) first")
        assert rank["data parallel"].endswith('needs a captured graph: use parallel_mode="semi_auto"')
        for name in ("step function", "pipeline", "scale", "micro batches"):
            assert rank[name].endswith("leave one of both out"), name
        assert "looks at whole tensors" in rank["whole"]
