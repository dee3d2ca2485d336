"""What a script in MindSpore's words gets that sets as little as possible is what MindSpore gives it."""

import json
import re

import pytest
from asked_cases import one_fast
from job_runner import REPOSITORY
from mindspore_posed import AS_MINDSPORE, posed
from on_ranks import on_ranks

PROGRAM = REPOSITORY / "tests" / "cases" / "mindspore_defaults.py"
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
    (tmp_path / "train.py").write_text(ONE_STEP)
    words = ("--worker_num=2", "--mindspore=torch", "--mindspore_semantics=torch", "train.py")
    job = msrun.run(*words, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert job.code == 0, job.stderr
    assert "msrun: mindspore is msrun.mindspore, on torch" in job.stderr
    for rank in range(2):
        assert f"weight 0.2 rows {('0 1', '2 3')[rank]}\n" in job.log(rank).decode()


@pytest.mark.slow
def test_what_is_kept_of_mindspore_is_what_it_finds(msrun, mindspore_python, request, tmp_path):
    words = ("--worker_num=2", "--quiet", "--mindspore=real", PROGRAM, tmp_path / "found")
    job = msrun.run(*words, cwd=tmp_path, command=(mindspore_python, "-m", "msrun"), deadline_s=300)
    assert job.code == 0, job.stderr
    ranks = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2)]
    if request.config.getoption("--update-golden"):
        OF_MINDSPORE.write_text(json.dumps(ranks, indent=1) + "\n")
    of_ranks = [{name: split_lines(value) for name, value in rank.items()} for rank in ranks]
    assert in_numbers(json.loads(OF_MINDSPORE.read_text())) == of_ranks  # other processors round otherwise
