"""MindSpore's words on ranks: the context acts in every form of a training step, or the step is refused; 4 ranks
compute what one does, and what a script leaves out is MindSpore's."""

import json
import re

import numpy as np
import pytest
from asked_cases import one_fast, slow_but
from job_runner import PRELOAD, REPOSITORY, JobRunner
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


# -- what a script gets that sets as little as possible is what MindSpore gives it ------------------------------------

DEFAULTS = REPOSITORY / "tests" / "cases" / "mindspore_defaults.py"
OF_MINDSPORE = REPOSITORY / "tests" / "golden" / "mindspore_defaults.json"
"""What each of two ranks has found under MindSpore 2.10: the last test of this file compares, or with --update-golden
writes it."""
ROUNDING = 2e-6


ONE_STEP = """
import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.communication import init

init()
ms.set_auto_parallel_context(parallel_mode="data_parallel")
ones = np.ones((8, 1), np.float32)
net = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
model = ms.Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), 0.1))
model.train(1, ds.NumpySlicesDataset((ones, ones), ["x", "y"]).batch(4).take(1))
rows = next(iter(ds.NumpySlicesDataset(np.arange(4), "x", shuffle=False).batch(2)))[0]
print("weight", round(float(net.weight[0, 0]), 6), "rows", *rows.tolist())
"""


def found(name):
    """Return what this rank finds, as it comes out of a file."""
    return json.loads(json.dumps(posed("mindspore_defaults").FOUND[name]()))


def in_numbers(value):
    """Return a value with the numbers of its lines taken out, to compare them with some rounding."""
    if isinstance(value, dict):
        return {key: in_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [in_numbers(entry) for entry in value]
    if isinstance(value, str) and (match := re.fullmatch(r"(epoch: .+ loss is )(.+)", value)):
        return [match[1], in_numbers(float(match[2]))]
    return pytest.approx(value, rel=ROUNDING, abs=ROUNDING) if isinstance(value, float) else value


def split_lines(value):
    if isinstance(value, dict) and "lines" in value:
        return {**value, "lines": [[line[: line.rindex(" ") + 1], float(line.split()[-1])] for line in value["lines"]]}
    return value


@on_ranks(2, env=AS_MINDSPORE)
@pytest.mark.parametrize("name", ["context", "copies", "data_parallel", "hybrid_parallel", "data_parallel, mean"])
def test_defaults_lines_and_weights_are_mindspores(ranks, name):
    assert in_numbers(json.loads(OF_MINDSPORE.read_text())[ranks.rank][name]) == split_lines(found(name))


@on_ranks(2, env=AS_MINDSPORE)
@pytest.mark.parametrize("name", ["data", "digits"])
def test_rows_their_order_and_digits_are_mindspores(ranks, name):
    assert json.loads(OF_MINDSPORE.read_text())[ranks.rank][name] == found(name)


@on_ranks(2, env=AS_MINDSPORE)
@pytest.mark.parametrize(
    "name", one_fast("semi_auto, the same rows on each rank", "semi_auto, full_batch", "auto, dataset_strategy")
)
def test_whole_data_trains_one_network_of_all_ranks(name):
    assert in_numbers(found("alone, whole")) == split_lines(found(name))


def test_the_option_takes_torchs_meaning_means_and_parts_of_the_data(msrun, tmp_path):
    (tmp_path / "one_step.py").write_text(ONE_STEP)
    (tmp_path / "train.py").write_text("import one_step\n")  # so that a server which has imported torch is like it
    words = ("--worker_num=2", "--mindspore=torch", "--mindspore_semantics=torch", *PRELOAD, "train.py")
    job = msrun.run(*words, cwd=tmp_path, env=msrun.warm())
    assert job.code == 0, job.stderr
    assert "msrun: mindspore is msrun.mindspore, on torch" in job.stderr
    for rank in range(2):
        assert f"weight 0.2 rows {('0 1', '2 3')[rank]}\n" in job.log(rank).decode()


@pytest.mark.slow
def test_what_is_kept_of_mindspore_is_what_it_finds(msrun, mindspore_python, request, tmp_path):
    words = ("--worker_num=2", "--quiet", "--mindspore=real", DEFAULTS, tmp_path / "found")
    job = msrun.run(*words, cwd=tmp_path, command=(mindspore_python, "-m", "msrun"), deadline_s=300)
    assert job.code == 0, job.stderr
    ranks = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2)]
    if request.config.getoption("--update-golden"):
        OF_MINDSPORE.write_text(json.dumps(ranks, indent=1) + "\n")
    of_ranks = [{name: split_lines(value) for name, value in rank.items()} for rank in ranks]
    assert in_numbers(json.loads(OF_MINDSPORE.read_text())) == of_ranks  # other processors round otherwise
