"""Training with parameter servers is that of one process, on any number of workers and servers.

The cases stand in tests/cases/mode_servers.py. One job of two workers and two servers runs them all.
"""

import json

import mode_servers
import pytest
from asked_cases import asked, slow_but

DEADLINE_S = 150.0
EXACT = 1e-12
CASES = list(mode_servers.cases(2))
FAST = ("adam/all", "lazy/table", "resumed/lazy/again", "step function")
OTHERS = ("accumulated", "made in servers", "stale", "cached/0", "cached/3", "shared", "refused")

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


@pytest.fixture(scope="module")
def outcomes(request, msrun_of_module, workers, tmp_path_factory):
    """Gives what a case found with some numbers of workers and servers; its job runs when first asked for."""
    found = {}

    def outcome(case, world_size=2, servers=2):
        if (world_size, servers) not in found:
            found[world_size, servers] = {}
            folder = tmp_path_factory.mktemp(f"servers-{world_size}-{servers}")
            result = folder / "result.json"
            program, env = workers / "runtime" / "modes.py", {"MSRUN_SERVER_NUM": str(servers)}
            env |= asked(request, "case", always=(*FAST, *OTHERS))
            msrun_of_module.run_world(
                world_size, program, result, "mode_servers", cwd=folder, env=env, deadline_s=DEADLINE_S
            )
            found[world_size, servers] = json.loads(result.read_text())
        assert found[world_size, servers], "the job failed before"
        for rank in found[world_size, servers][case]:
            assert "error" not in rank, rank["error"]
        return found[world_size, servers][case]

    return outcome


def rows(is_one):
    cases = [name for name in CASES if is_one(name)]
    return slow_but([name for name in cases if name in (*FAST, *OTHERS)], cases)


def worst(outcome):
    return max(difference for rank in outcome for difference in rank.values())


@pytest.mark.parametrize("case", rows(lambda name: name.endswith(("/all", "/table"))))
def test_synchronous_training_is_that_of_one_process(outcomes, case):
    assert worst(outcomes(case)) < EXACT


@pytest.mark.parametrize(("world_size", "servers"), [(2, 1), (4, 3), (1, 2)])
@pytest.mark.slow
def test_numbers_of_workers_and_servers_change_nothing(outcomes, world_size, servers):
    for case in (*FAST, "accumulated"):
        found = outcomes(case, world_size, servers)
        if case.startswith("resumed"):
            assert [rank["different"] for rank in found] == [[]] * world_size, case
        else:
            assert worst(found) < EXACT, case


@pytest.mark.parametrize("case", rows(lambda name: name.startswith("resumed/")))
def test_what_was_saved_goes_on_bit_for_bit(outcomes, case):
    assert [rank["different"] for rank in outcomes(case)] == [[], []]


@pytest.mark.parametrize("case", ["step function", "accumulated"])
def test_step_functions_and_several_backward_passes_train_as_one_process(outcomes, case):
    assert worst(outcomes(case)) < EXACT


def test_tables_that_servers_make_have_the_values_of_a_workers_and_are_never_whole_on_one(outcomes):
    for rank in outcomes("made in servers"):
        assert rank["equal"] == [True] * 7
        assert rank["weights"] < EXACT
        assert rank["largest"] <= 16 * 6 * 2  # the last block has the remainder, of 41 rows


def test_worker_runs_ahead_as_far_as_staleness_allows_and_no_further(outcomes):
    assert [rank["furthest"] for rank in outcomes("stale")] == [0, mode_servers.STALENESS]


def test_large_messages_lie_in_shared_memory_and_change_nothing(outcomes):
    for rank in outcomes("shared"):
        assert rank["weights"] < EXACT
        assert rank["places"] == [True, True]


@pytest.mark.parametrize("case", ["cached/0", "cached/3"])
def test_worker_keeps_rows_while_they_lack_no_more_steps_than_allowed(outcomes, case):
    allowed, steps = int(case[-1]), mode_servers.STALE_STEPS
    pulled = 2 * steps // (allowed + 1)
    for rank in outcomes(case):
        assert rank["lacking"] == [step % (allowed + 1) for step in range(steps)]
        assert rank["counts"] == [4 * steps - pulled, pulled, pulled * 8]


ANSWERS = {
    "semi_auto": "StrategyError: parameter table.weight is on the parameter servers, which parallel_mode='semi_auto'",
    "hsdp": "StrategyError: parameter table.weight is on the parameter servers, which hsdp does not know",
    "tied": "StrategyError: parameter head.weight is a table on the parameter servers, of which this module needs",
    "verify": "UnverifiableError: verify() of parameters on servers",
    "clip": "StrategyError: the norm of the gradient of Embedding.weight of shape (41, 6), which is on the parameter",
    "Lamb": "ParallelError: Lamb cannot step parameters on servers: use Momentum, SGD, Adam, AdamW, LazyAdam, FTRL",
    "LARS": "StrategyError: LARS of Embedding.weight of shape (41, 6), which is on the parameter servers",
    "DDP": "StrategyError: DistributedDataParallel around Linear with wide.weight on parameter servers, which average",
    "closure": "ParallelError: optimizer.step(closure) with parameters on servers",
    "max_norm": "StrategyError: Embedding(max_norm=...) cannot be on parameter servers",
    "integers": "StrategyError: set_param_ps: a parameter of shape (3,) and torch.int64: only floating-point values",
    "in server": "StrategyError: set_param_ps(init_in_server=True): Embedding.weight has values on this worker already",
    "orthogonal": "Embedding.weight gets values by orthogonal_, which servers do not know: use",
    "slices": "StrategyError: EmbeddingLookup(slice_mode='table_row_slice') on 2 ranks cannot be on parameter servers",
    "row": "IndexError: row 41 to 41 of an embedding with 41 rows",
    "load late": "table.weight is on the servers already: load before the first step, or with load_checkpoint",
    "word": "UsageError: set_ps_context('enable_pss'): unknown word (did you mean enable_ps?)",
    "ssl": "UsageError: set_ps_context(enable_ssl=...): leave it out; connections to parameter servers are not",
}


def test_wrong_uses_are_refused_by_name(outcomes):
    for rank in outcomes("refused"):
        assert rank["answers"].keys() == ANSWERS.keys()
        for name, words in ANSWERS.items():
            assert words in rank["answers"][name], name
