"""Two ranks on a device have the numbers of one process on the CPU; on the CPU itself the same cases prove it.

On CUDA both ranks share one GPU, over gloo. The cases stand in tests/cases/device_cases.py.
"""

import functools
import json
import re

import device_cases
import pytest
import torch
from asked_cases import asked, slow_but

DEADLINE_S = 300.0
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:gloo"}
LOSSES = [name for name in device_cases.CASES if name != "init"]

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def rows(*cases):
    """Return the decorator of a test that looks at these cases on every kind of device."""
    every = [(kind, case) for kind in BACKENDS for case in cases]
    found = slow_but([], every)
    for number, row in enumerate(found):
        if row.values[0] != "cpu":
            found[number] = pytest.param(*row.values, marks=[*row.marks, pytest.mark.gpu, NO_CUDA], id=row.id)
    return pytest.mark.parametrize(("kind", "case"), found)


@pytest.fixture(scope="module")
def outcomes(request, msrun_of_module, workers, tmp_path_factory):
    """Kind of device -> what its job of the asked cases returned."""
    keys_of_all = json.loads(asked(request, "kind", "case")["ONLY_CASES"])

    @functools.cache
    def run(kind):
        folder = tmp_path_factory.mktemp(f"devices-{kind}")
        keys = json.dumps([key.partition("/")[2] for key in keys_of_all if key.startswith(f"{kind}/")])
        result = folder / "result.json"
        env = {"ONLY_CASES": keys, "BACKEND": BACKENDS[kind], "SHARED_DEVICE": "0", "TMPDIR": str(folder)}
        program = workers / "runtime" / "modes.py"
        msrun_of_module.run_world(2, program, result, "device_cases", cwd=folder, env=env, deadline_s=DEADLINE_S)
        return json.loads(result.read_text())

    return run


@functools.cache
def of_one_process(case):
    """Return what a case gives in this process, alone and on the CPU; every layout gives the same losses."""
    plain = case.startswith("losses of ") or case == "attention in blocks"
    name = "losses of data parallel" if plain else case.partition(" of ")[0]
    return device_cases.CASES["clipping of level2" if name == "clipping" else name]()


@rows(*LOSSES)
def test_numbers_are_those_of_one_process_on_the_cpu(outcomes, kind, case):
    expected = of_one_process(case)
    for rank, result in enumerate(outcomes(kind)[case]):
        assert "error" not in result, result["error"]
        for what, values in expected.items():
            assert result[what] == pytest.approx(values, rel=1e-9), f"{what} of rank {rank}"


@rows("init")
def test_every_rank_joins_with_its_device(outcomes, kind, case):
    for rank, found in enumerate(outcomes(kind)[case]):
        index = None if kind == "cpu" else 0
        assert found == {"kind": kind, "index": index, "local_rank": rank, "sum": [2.0] * 3}


@NO_CUDA
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cuda"])
def test_hang_report_names_the_rank_and_the_collective(msrun, workers, tmp_path, kind):
    env = {"BACKEND": BACKENDS[kind], "SHARED_DEVICE": "0"}
    options = ("--worker_num=2", "--hang_time_out=3")
    finished = msrun.run(*options, workers / "runtime" / "stuck.py", "sleep", cwd=tmp_path, env=env)
    assert finished.code == 124, finished.stderr
    (line,) = finished.errors
    assert re.search(r"behind: rank 1 \(step 2\)", line), line
    assert re.search(r"rank 0 \(step 3, waits in \w+ of 2 ranks", line), line
