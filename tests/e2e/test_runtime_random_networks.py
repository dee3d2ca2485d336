"""Random networks, strategies and habits: equal to one process, or refused by name on every rank; nothing else.

MSRUN_FUZZ_CASES and MSRUN_FUZZ_SEED (by default 15 and 1) say how many and which; a failure names the command that
repeats it alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from job_runner import WORKER_PATH, JobRunner
from random_networks.case import Case, Piece, parse_case
from random_networks.grammar import draw_case
from random_networks.training import Trained
from random_networks.verdict import GOOD, judge
from random_networks.worlds import Report

# Read when the tests are collected: the fixtures clear what belongs to jobs.
CASES = int(os.environ.get("MSRUN_FUZZ_CASES", "15"))
SEED = int(os.environ.get("MSRUN_FUZZ_SEED", "1"))
SECONDS_A_CASE = 60.0
JOBS = 1 if CASES <= 15 else 2
MOST_REFUSED = 1 / 2

pytestmark = pytest.mark.timeout(60 + CASES * SECONDS_A_CASE)


@pytest.fixture(scope="module")
def results(
    msrun_of_module: JobRunner, workers: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The verdicts on all cases."""
    folder = tmp_path_factory.mktemp("random")
    script = workers / "runtime" / "random_cases.py"
    options = [f"--seed={SEED}", f"--cases={CASES}", f"--jobs={JOBS}", f"--result={folder / 'result.jsonl'}"]
    path = {"PYTHONPATH": WORKER_PATH, "OMP_NUM_THREADS": "1"}
    finished = msrun_of_module.run(
        str(script), *options, cwd=folder, env=path, command=[sys.executable], deadline_s=CASES * SECONDS_A_CASE
    )
    assert finished.code == 0, finished.stderr
    print(finished.stdout.decode())
    found = [json.loads(line) for line in (folder / "result.jsonl").read_text().splitlines()]
    assert len(found) == CASES
    return found


@pytest.mark.slow
@pytest.mark.random
def test_every_case_is_equal_to_one_process_or_refused_by_name(results: list[dict[str, Any]]) -> None:
    bad = [entry for entry in results if entry["kind"] not in GOOD]
    told = [f"{e['kind']}: {e['message']}\n  {e['case']}\n  python tests/workers/runtime/{e['command']}" for e in bad]
    assert not bad, f"{len(bad)} of {CASES} cases of seed {SEED}:\n" + "\n".join(told)


@pytest.mark.slow
@pytest.mark.random
def test_most_cases_run(results: list[dict[str, Any]]) -> None:
    """A grammar whose cases are refused, or fail in one process too, proves nothing."""
    reasons = Counter(entry["reason"] for entry in results if entry["kind"] in ("refused", "invalid"))
    assert reasons.total() <= MOST_REFUSED * CASES, "\n".join(f"{n} x {text}" for text, n in reasons.most_common())


FOUND = {
    "a gradient that is rounding alone": '{"world_size": 2, "family": "vectors", "pieces": [{"kind": "Detached", '
    '"options": {"how": "detach"}}, {"kind": "BatchNorm"}], "seed": 761824, "steps": 1, "dataset": "full_batch", '
    '"is_16_bit": true, "optimizer": ["sgd", {"lr": 0.05}]}',
    "a stage without parameters in a later capture": '{"world_size": 2, "family": "images", "pieces": [{"kind": '
    '"Pool", "options": {"how": "shuffle"}, "wire": "residual"}, {"kind": "Custom", "options": {"how": "own_scale"}, '
    '"wire": "twice"}, {"kind": "Conv", "options": {"groups": 4, "channels_last": false}}, {"kind": "Hooked"}], '
    '"seed": 670032, "habits": [["smaller", 1]], "pipeline": {"stages": 2, "scheduler": "zero_bubble", "interleave": '
    'true, "micro_size": 2}, "dataset": "full_batch", "optimizer": ["sgd", {"lr": 0.05}]}',
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUND)
def test_what_was_found_once_is_equal(msrun: JobRunner, workers: Path, tmp_path: Path, case: str) -> None:
    script = str(workers / "runtime" / "random_cases.py")
    path = {"PYTHONPATH": WORKER_PATH, "OMP_NUM_THREADS": "1"}
    command = [sys.executable]
    finished = msrun.run(script, "--json", FOUND[case], cwd=tmp_path, env=path, command=command, deadline_s=60)
    assert "-> equal" in finished.stdout.decode(), finished.stdout.decode()


# -- the judge itself --------------------------------------------------------------------------------------------------

CASE = Case(2, "vectors", (Piece("Mlp"),), dataset="full_batch")


def report(loss: float = 1.0, weight: float = 1.0, buffer: float = 1.0) -> Report:
    """Return what a process reports that has ended well."""
    values = [torch.tensor([value], dtype=torch.float64) for value in (weight, buffer)]
    return Report("done", Trained([1.0, loss], [None], {"w": values[0]}, {"b": values[1]}))


def refusal(message: str = "no rule") -> Report:
    return Report("refused", error=f"CaptureError: {message}", message=message)


WRONG_STEP = Report("refused", error="VerificationError: 1 of 2 values differ", message="1 of 2 values differ")
BROKEN = Report("error", error="KeyError: chunk_default", message="'chunk_default'")
LEFT = Report("error", error="RuntimeError: ...", message="Connection closed by peer [127.0.0.1]:1234")
HUNG = Report("hung", error="waits for ever")


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        ([report(), report()], "equal"),
        ([report(), report(loss=1 + 1e-8)], "different"),
        ([report(weight=1 + 1e-8), report()], "different"),
        ([report(), report(buffer=0.9)], "different"),
        ([refusal(), refusal("rank 0 cannot run this call")], "refused"),
        ([refusal(), LEFT], "refused by some ranks"),
        ([refusal(), HUNG], "refused by some ranks"),
        ([refusal("torch.optim.LBFGS looks at all parameters as one whole"), LEFT], "refused"),
        ([refusal("torch.optim.LBFGS looks at all parameters as one whole"), BROKEN], "internal error"),
        ([refusal("one\ntwo"), refusal("one\ntwo")], "several lines"),
        ([refusal("rank 0: tuple index out of range")] * 2, "internal error"),
        ([WRONG_STEP, WRONG_STEP], "different"),
        ([BROKEN, LEFT], "internal error"),
        ([refusal(), BROKEN], "internal error"),
        ([report(), HUNG], "hung"),
        ([LEFT, Report("died", error="SIGSEGV")], "died"),
    ],
)
def test_judge_knows_right_from_wrong(ranks: list[Report], kind: str) -> None:
    assert judge(CASE, report(), ranks).kind == kind


def test_judge_takes_no_case_whose_one_process_fails() -> None:
    assert judge(CASE, BROKEN, [report(), report()]).kind == "invalid"
    assert judge(CASE, report(loss=float("nan")), [report(), report()]).kind == "invalid"


@pytest.mark.slow
def test_grammar_gives_the_same_case_again_and_every_case_can_be_written_down() -> None:
    for number in range(100):
        case = draw_case(3, number)
        assert draw_case(3, number) == case
        assert parse_case(case.to_json()).to_json() == case.to_json()


@pytest.mark.slow
def test_grammar_draws_every_feature() -> None:
    cases = [draw_case(4, number) for number in range(400)]
    text = "\n".join(case.to_json() for case in cases)
    words = "level3 zbv dualpipev copies accumulate muon adafactor out_strategy matrix reversal bernoulli tie frozen"
    words += (
        " write weights read chain hidden retain reversed masked ignored namedtuple record data_parallel ema lookahead"
    )
    assert [word for word in words.split() if word not in text] == []
    assert sum(case.pipeline is not None for case in cases) > 50
    assert sum(bool(case.cuts) for case in cases) > 60
