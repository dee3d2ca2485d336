"""The parallel context acts in every form of a training step, or the step is refused; 4 ranks compute what one does."""

import json
import os
import re

import numpy as np
import pytest
from asked_cases import asked, slow_but
from job_runner import REPOSITORY, JobRunner

PROGRAM = REPOSITORY / "tests" / "workers" / "mindspore_forms.py"
FORMS = re.findall(r'^    "(.+)": ', PROGRAM.read_text(), re.MULTILINE)
MODES = ("data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel")
FAST = ("value_and_grad", "GradOperation without a reducer", "TrainOneStepCell", "AutoParallel")
UNREDUCED = "an optimizer steps with gradients that differ between the ranks"
REFUSED = {
    (mode, f"{name} without a reducer"): f"{UNREDUCED}.*DistributedGradReducer"
    for mode in ("data_parallel", "hybrid_parallel")
    for name in ("value_and_grad", "GradOperation", "grad")
}


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """Number of ranks -> what each has found in the modes that are looked at."""
    folder = tmp_path_factory.mktemp("forms")
    every = FORMS if "MINDSPORE_PYTHON" in os.environ else ()  # which MindSpore's own run has
    with JobRunner() as msrun:
        modes, forms = asked(request, "mode", always=["stand_alone"]), asked(request, "form", always=every)
        for size in (1, 2):
            env = {"ONLY_FORMS": forms["ONLY_CASES"], **modes}
            msrun.run_world(size, PROGRAM, folder / f"of_{size}", cwd=folder, kind="mindspore", env=env, deadline_s=110)
    return {size: [json.loads((folder / f"of_{size}.{rank}").read_text()) for rank in range(size)] for size in (1, 2)}


@pytest.mark.parametrize("form", slow_but(FAST, FORMS))
@pytest.mark.parametrize("mode", slow_but(["data_parallel"], MODES))
def test_two_ranks_hold_the_weights_of_one_process_or_are_refused(found, mode, form):
    (one,), two = found[1], found[2]
    if (mode, form) in REFUSED:
        assert all(re.match(REFUSED[mode, form], rank[mode][form]) for rank in two), two[0][mode][form]
        return
    for rank in two:
        assert not isinstance(rank[mode][form], str), rank[mode][form]
        for weights, right in zip(rank[mode][form], one["stand_alone"][form], strict=True):
            np.testing.assert_allclose(weights, right, rtol=1e-5, atol=1e-6)
    assert two[0][mode][form] == two[1][mode][form]


@pytest.mark.parametrize("form", slow_but(FAST, FORMS))
def test_alone_every_rank_trains_on_its_rows(found, form):
    first, second = (rank["stand_alone"][form] for rank in found[2])
    assert not isinstance(first, str) and first != second


@pytest.mark.slow
def test_after_five_steps_data_parallel_has_the_weights_of_mindspores_own_run(msrun, found, tmp_path):
    python = os.environ.get("MINDSPORE_PYTHON", "")
    if not python:
        pytest.skip("MindSpore is not there: MINDSPORE_PYTHON names no Python that has it")
    words = ("--worker_num=2", "--mindspore=real", "--quiet", PROGRAM, tmp_path / "real")
    job = msrun.run(*words, cwd=tmp_path, command=(python, "-m", "msrun"), deadline_s=300)
    assert job.code == 0, job.stderr
    compared = []
    for rank in range(2):
        theirs = json.loads((tmp_path / f"real.{rank}").read_text())
        for mode, form in [(name, form) for name in theirs for form in theirs[name]]:
            ours, right = found[2][rank][mode][form], theirs[mode][form]
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
            msrun.run_world(size, PARALLELISMS, folder / f"of_{size}", cwd=folder, kind="mindspore")
    return {size: [json.loads((folder / f"of_{size}.{rank}").read_text()) for rank in range(size)] for size in (1, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_four_ranks_compute_what_one_process_computes(computed, case):
    (one,) = computed[1]
    for rank in computed[4]:
        for values, right in zip(rank[case], one[case], strict=True):
            np.testing.assert_allclose(values, right, rtol=2e-5, atol=2e-6)
