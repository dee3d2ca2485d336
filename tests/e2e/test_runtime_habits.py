"""What people write into training scripts, in every mode on two ranks: the numbers of one process, or a refusal."""

import pytest
from asked_cases import slow_but
from on_ranks import on_ranks
from random_networks.reports import report_alone, tell, told
from random_networks.verdict import judge
from training_habits import HABITS
from training_habits.expected import DOCUMENTED, REFUSALS, WARNED, expected
from training_habits.expected import OWN_ROWS as DIFFERENT_ROWS
from training_habits.trial import ALONE, IN_HALVES, OWN_ROWS, WORLD_SIZE

ROWS = [(mode, name) for name, habit in HABITS.items() for mode in habit.modes]
FAST = {
    "hsdp level3": ("a row set through .data", "weights among the results"),
    "shard": ("draw: variational autoencoder",),
    "data_parallel": ("results in a dataclass, loss outside", "mask of uneven rows, mean over what is left"),
    "data_parallel hsdp": ("batch norm, then evaluation",),
}
"""mode -> what `make test` runs: some of every kind."""


@pytest.fixture
def folder(mode, name, tmp_path):
    """Where the ranks tell what the habit has done; it is judged beside one process, and one that takes half of the
    rows at a time."""
    yield tmp_path
    ways = (ALONE, IN_HALVES) if mode in (*OWN_ROWS, "pipeline") else (ALONE,)
    alone = [report_alone(lambda way=way: HABITS[name].notes(way, broadcasts=mode in OWN_ROWS)) for way in ways]
    found = judge(alone[0], told(tmp_path, WORLD_SIZE), HABITS[name].limit, alone[-1])
    text, refusal = f"{found.kind}: {found.message}\n{found.trace}", REFUSALS.get((mode, name))
    if refusal is None:
        assert found.kind in expected(mode, name), text
    else:
        assert found.kind == "refused", f"no longer refused; the table says: {refusal}\n{text}"
        assert found.message.startswith(f"{refusal.error}: "), text
        assert refusal.text in found.message, text


@on_ranks(WORLD_SIZE)
@pytest.mark.parametrize(
    ("mode", "name"), slow_but([f"{mode}/{name}" for mode, names in FAST.items() for name in names], ROWS)
)
def test_habit_has_the_numbers_of_one_process_or_is_refused_as_the_table_says(ranks, folder, mode, name):
    tell(folder, ranks.rank, lambda: HABITS[name].notes(mode))


def test_tables_name_habits_that_there_are():
    assert ({name for _, name in REFUSALS} | DIFFERENT_ROWS.keys() | DOCUMENTED | WARNED) - HABITS.keys() == set()
