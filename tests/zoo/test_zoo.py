"""Models of torchvision, timm, transformers and torch have the losses of one process in every mode."""

import functools

import pytest
from on_ranks import on_ranks
from random_networks.reports import tell, told

from zoo.packages import missing

if missing():
    pytest.skip(missing(), allow_module_level=True)

from zoo.collection import ENTRIES
from zoo.page import PAGE, kind, read, render
from zoo.training import MODES, References, difference, outcome_of, tolerance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
ON_FOUR = ("mobilenet_v3_small", "swin, drop path", "VAE", "GPT, tied weights", "Llama", "Mixtral", "T5")
MODES_ON_FOUR = ("semi_auto", "hsdp level3", "tensor parallel", "pipeline")
CASES = [(2, (name, mode)) for name in ENTRIES for mode in MODES]
CASES += [(4, (name, mode)) for name in ON_FOUR for mode in MODES_ON_FOUR]
"""Number of ranks, model and mode; on 4, in which two ways of cutting stand together, a part."""


@functools.lru_cache(maxsize=1)
def references(model):
    return References(ENTRIES[model])


@pytest.fixture(scope="module")
def outcomes(request):
    """Number of ranks -> case -> what came of it; with --update-golden the page is written of them."""
    found = {2: {}, 4: {}}
    yield found
    if request.config.getoption("--update-golden"):
        PAGE.write_text(render(found))


@pytest.fixture
def folder(request, case, outcomes, tmp_path):
    """Where the ranks tell what came of a case; it is judged by its entry, and by the page."""
    yield tmp_path
    ranks, (model, mode) = request.node.callspec.params["ranks"], case
    entry, outcome = ENTRIES[model], outcome_of(told(tmp_path, ranks))
    outcomes[ranks][case] = outcome
    assert not outcome.failure, outcome.failure
    if mode in entry.refused:
        assert entry.refused[mode] in outcome.refusal
    else:
        assert not outcome.refusal, outcome.refusal
        assert outcome.difference <= tolerance(entry)
    if not request.config.getoption("--update-golden"):
        on_page = read(PAGE.read_text())[ranks].get(case)
        assert on_page is not None and kind(on_page) == kind(outcome), (
            "write the page: pytest tests/zoo --update-golden"
        )


@on_ranks()
@pytest.mark.parametrize(
    ("ranks", "case"),
    [pytest.param(ranks, case, id=f"{case[0]}-{case[1]}-on-{ranks}-ranks") for ranks, case in CASES],
    indirect=["ranks"],
)
def test_model_has_the_losses_of_one_process_or_is_refused_as_its_entry_says(ranks, folder, case):
    model, mode = case
    tell(folder, ranks.rank, lambda: difference(ENTRIES[model], mode, references(model)))
