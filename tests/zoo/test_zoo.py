"""Models of torchvision, timm, transformers and torch have the losses of one process in every mode."""

import pytest

from zoo.packages import missing

if missing():
    pytest.skip(missing(), allow_module_level=True)

from zoo.collection import ENTRIES
from zoo.jobs import CASES, run_cases
from zoo.page import PAGE, kind, read, render
from zoo.training import tolerance

DEADLINE_S = 1500.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S)]


@pytest.fixture(scope="module")
def outcomes(msrun_of_module, tmp_path_factory, request):
    """What came of every case that a selected test is about, by the number of ranks; one process group for each.

    With --update-golden every case runs, and the page is written.
    """
    is_page_written = request.config.getoption("--update-golden")
    items = [
        item for item in request.session.items if request.node.path == item.path and isinstance(item, pytest.Function)
    ]
    of_case = [item.callspec.params for item in items if hasattr(item, "callspec")]
    wanted = {(params["ranks"], params["case"]) for params in of_case}
    folder = tmp_path_factory.mktemp("zoo")
    found = {
        ranks: run_cases(
            msrun_of_module, ranks, [case for case in cases if is_page_written or (ranks, case) in wanted], folder
        )
        for ranks, cases in CASES.items()
    }
    if is_page_written:
        PAGE.write_text(render(found))
    return found


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(ranks, case, id=f"{case[0]}-{case[1]}-on-{ranks}-ranks")
        for ranks, cases in CASES.items()
        for case in cases
    ],
)
def test_model_has_the_losses_of_one_process_or_is_refused_as_its_entry_says(outcomes, ranks, case):
    model, mode = case
    entry, outcome = ENTRIES[model], outcomes[ranks][case]
    assert not outcome.failure, outcome.failure
    if mode in entry.refused:
        assert entry.refused[mode] in outcome.refusal
    else:
        assert not outcome.refusal, outcome.refusal
        assert outcome.difference is not None
        assert outcome.difference <= tolerance(entry)
    on_page = read(PAGE.read_text())[ranks].get(case)
    assert on_page is not None and kind(on_page) == kind(outcome), "write the page: pytest tests/zoo --update-golden"
