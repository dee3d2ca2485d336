"""The parallel context acts in every form of a training step, or the step is refused; 4 ranks compute what one does."""

import json
import re

import numpy as np
import pytest
from asked_cases import slow_but
from job_runner import REPOSITORY, JobRunner
from mindspore_posed import AS_MINDSPORE, posed
from on_ranks import on_ranks

PROGRAM = REPOSITORY / "tests" / "cases" / "mindspore_forms.py"
FORMS = re.findall(r'^    "(.+)": ', PROGRAM.read_text(), re.MULTILINE)
MODES = ("data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel")
FAST = ("value_and_grad", "GradOperation without a reducer", "TrainOneStepCell", "AutoParallel")
UNREDUCED = "an optimizer steps with gradients that differ between the ranks"
REFUSED = {
    (mode, f"{name} without a reducer"): f"{UNREDUCED}.*DistributedGradReducer"
    for mode in ("data_parallel", "hybrid_parallel")
    for name in ("value_and_grad", "GradOperation", "grad")
}


@on_ranks(2, env=AS_MINDSPORE)
@pytest.mark.parametrize("form", slow_but(FAST, FORMS))
@pytest.mark.parametrize("mode", slow_but(["data_parallel"], MODES))
def test_two_ranks_hold_the_weights_of_one_process_or_are_refused(ranks, mode, form):
    train = posed("mindspore_forms").train
    found = train(form, mode)
    if (mode, form) in REFUSED:
        assert re.match(REFUSED[mode, form], found), found
        return
    for weights, right in zip(found, train(form, "stand_alone", alone=True), strict=True):
        np.testing.assert_allclose(weights, right, rtol=1e-5, atol=1e-6)
    assert ranks.gather(found) == [found] * 2


@on_ranks(2, env=AS_MINDSPORE)
@pytest.mark.parametrize("form", slow_but(FAST[:1], FORMS))
def test_alone_every_rank_trains_on_its_rows(ranks, form):
    first, second = ranks.gather(posed("mindspore_forms").train(form, "stand_alone"))
    assert not isinstance(first, str) and first != second


@pytest.mark.slow
def test_after_five_steps_data_parallel_has_the_weights_of_mindspores_own_run(msrun, mindspore_python, tmp_path):
    words = ("--worker_num=2", "--mindspore=real", "--quiet", PROGRAM, tmp_path / "real")
    job = msrun.run(*words, cwd=tmp_path, command=(mindspore_python, "-m", "msrun"), deadline_s=300)
    assert job.code == 0, job.stderr
    msrun.run_world(2, PROGRAM, tmp_path / "ours", cwd=tmp_path, deadline_s=110)
    compared = []
    for rank in range(2):
        found, theirs = (json.loads((tmp_path / f"{name}.{rank}").read_text()) for name in ("ours", "real"))
        for mode, form in [(name, form) for name in theirs for form in theirs[name]]:
            ours, right = found[mode][form], theirs[mode][form]
            if not isinstance(ours, str) and not isinstance(right, str):
                compared.append((mode, form))
                for weights, expected in zip(ours, right, strict=True):
                    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
    assert len(set(compared)) == 11, "three forms are refused here, and a CPU of MindSpore's has no loss scale"


PARALLELISMS = REPOSITORY / "tests" / "workers" / "mindspore_parallelisms.py"
CASES = re.findall(r'^    "(.+)": ', PARALLELISMS.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """Number of ranks -> what each has found."""
    folder = tmp_path_factory.mktemp("parallelisms")
    with JobRunner() as msrun:
        for size in (1, 4):
            msrun.run_world(size, PARALLELISMS, folder / f"of_{size}", cwd=folder)
    return {size: [json.loads((folder / f"of_{size}.{rank}").read_text()) for rank in range(size)] for size in (1, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_four_ranks_compute_what_one_process_computes(computed, case):
    (one,) = computed[1]
    for rank in computed[4]:
        for values, right in zip(rank[case], one[case], strict=True):
            np.testing.assert_allclose(values, right, rtol=2e-5, atol=2e-6)
