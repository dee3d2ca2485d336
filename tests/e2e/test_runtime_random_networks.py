"""Random networks, strategies and habits: equal to one process, or refused by name on every rank; nothing else.

MSRUN_FUZZ_CASES and MSRUN_FUZZ_SEED (by default 15 and 1) say how many and which. One is repeated by its name, such as
`-k seed1-case7`; a case that is written down, and may be shortened by hand, stands in FOUND.
"""

import os
from collections import Counter

import pytest
import torch
from on_ranks import on_ranks
from random_networks.case import parse_case
from random_networks.grammar import draw_case
from random_networks.reports import Note, Report, report_alone, tell, told
from random_networks.training import tolerance, train_alone, train_rank, with_saved_state
from random_networks.verdict import judge

# Read when the tests are collected: the fixtures clear what belongs to jobs.
CASES = int(os.environ.get("MSRUN_FUZZ_CASES", "15"))
SEED = int(os.environ.get("MSRUN_FUZZ_SEED", "1"))
MOST_REFUSED = 1 / 2
DRAWN = [(f"seed{SEED}-case{number}", draw_case(SEED, number)) for number in range(CASES)]
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
KNOWN = [(name, parse_case(text)) for name, text in FOUND.items()]
"""Cases of which a fault was found once."""
VERDICTS = []
"""On the cases that were drawn and have run."""


def sized(cases):
    return [pytest.param(case.world_size, case, id=name) for name, case in sorted(cases, key=lambda c: c[1].world_size)]


@pytest.fixture
def folder(case, tmp_path):
    """Where the ranks tell how they have trained, and save; it is judged beside one process."""
    yield tmp_path
    reports = told(tmp_path, case.world_size)
    if all(report.kind == "done" for report in reports):
        reports[0].found = with_saved_state(case, reports[0].found, tmp_path)
    found = judge(report_alone(lambda: train_alone(case)), reports, tolerance(case))
    VERDICTS.append(found)
    assert found.is_good, f"{found.kind}: {found.message}\n{case.to_json()}\n{found.trace}"


@pytest.mark.slow
@pytest.mark.random
@on_ranks()
@pytest.mark.parametrize(("ranks", "case"), sized(DRAWN), indirect=["ranks"])
def test_every_case_is_equal_to_one_process_or_refused_by_name(ranks, folder, case):
    tell(folder, ranks.rank, lambda: train_rank(case, folder))


@pytest.mark.slow
@pytest.mark.random
def test_most_cases_run():
    """A grammar whose cases are refused, or fail in one process too, proves nothing."""
    reasons = Counter(found.reason for found in VERDICTS if found.kind in ("refused", "invalid"))
    assert reasons.total() <= MOST_REFUSED * CASES, "\n".join(f"{n} x {text}" for text, n in reasons.most_common())


@pytest.mark.slow
@on_ranks()
@pytest.mark.parametrize(("ranks", "case"), sized(KNOWN), indirect=["ranks"])
def test_what_was_found_once_is_equal(ranks, folder, case):
    tell(folder, ranks.rank, lambda: train_rank(case, folder))


# -- the judge itself --------------------------------------------------------------------------------------------------


def report(weight=1.0, buffer=1.0, loss=1.0, rows=(1.0, 2.0)):
    """Return what a process reports that has ended well."""
    whole, part, named = (torch.tensor(value, dtype=torch.float64) for value in (buffer, rows, weight))
    notes = [Note("mean", "loss", loss), Note("whole", "buffer", whole), Note("rows", "scores", part)]
    return Report("done", [*notes, Note("named", "state", {"w": named})])


def refusal(message="no rule"):
    return Report("refused", error=f"CaptureError: {message}", message=message)


WRONG_STEP = Report("refused", error="VerificationError: 1 of 2 values differ", message="1 of 2 values differ")
BROKEN = Report("error", error="KeyError: chunk_default", message="'chunk_default'")
LEFT = Report("error", error="RuntimeError: ...", message="Connection closed by peer [127.0.0.1]:1234")


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        ([report(), report()], "equal"),
        ([report(loss=0.5), report(loss=1.5)], "equal"),
        ([report(), report(loss=1 + 1e-8)], "different"),
        ([report(weight=1 + 1e-8), report()], "different"),
        ([report(), report(buffer=0.9)], "different"),
        ([report(rows=(1.0,)), report(rows=(2.0,))], "equal"),
        ([report(rows=(2.0,)), report(rows=(1.0,))], "different"),
        ([report(), report(rows=(2.0, 1.0))], "different"),
        ([report(weight=0.5)] * 2, "own rows"),
        ([refusal(), refusal("rank 0 cannot run this call")], "refused"),
        ([refusal(), LEFT], "refused by some ranks"),
        ([refusal("torch.optim.LBFGS looks at all parameters as one whole"), LEFT], "refused"),
        ([refusal("torch.optim.LBFGS looks at all parameters as one whole"), BROKEN], "internal error"),
        ([refusal("one\ntwo"), refusal("one\ntwo")], "several lines"),
        ([refusal("rank 0: tuple index out of range")] * 2, "internal error"),
        ([WRONG_STEP, WRONG_STEP], "different"),
        ([BROKEN, LEFT], "internal error"),
        ([refusal(), BROKEN], "internal error"),
    ],
)
def test_judge_knows_right_from_wrong(ranks, kind):
    assert judge(report(), ranks, 1e-9, halves=report(weight=0.5)).kind == kind


def test_judge_takes_no_case_whose_one_process_fails():
    assert judge(BROKEN, [report(), report()], 1e-9).kind == "invalid"


@pytest.mark.slow
def test_grammar_gives_the_same_case_again_and_every_case_can_be_written_down():
    for number in range(100):
        case = draw_case(3, number)
        assert draw_case(3, number) == case
        assert parse_case(case.to_json()).to_json() == case.to_json()


@pytest.mark.slow
def test_grammar_draws_every_feature():
    cases = [draw_case(4, number) for number in range(400)]
    text = "\n".join(case.to_json() for case in cases)
    words = "level3 zbv dualpipev copies accumulate muon adafactor out_strategy matrix reversal bernoulli tie frozen"
    words += (
        " write weights read chain hidden retain reversed masked ignored namedtuple record data_parallel ema lookahead"
    )
    assert [word for word in words.split() if word not in text] == []
    assert sum(case.pipeline is not None for case in cases) > 50
    assert sum(bool(case.cuts) for case in cases) > 60
