"""The environment as a difference: whose value wins, what is hidden, what the fork server gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from msrun import contract
from msrun.planning.environment import (
    blas_threads,
    common_environment,
    of_rank,
    overridden_names,
    rank_environment,
    restored_environment,
    server_environment,
)
from msrun.planning.masking import MASK, masked
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec

SPEC = LaunchSpec(
    program=Program("script", "/w/train.py"),
    worker_num=2,
    local_worker_num=2,
    working_directory=Path("/w"),
    log_dir=Path("/l"),
    has_trace=True,
)


def build(
    caller: dict[str, str] | None = None, extra: dict[str, str] | None = None, spec: LaunchSpec = SPEC
) -> dict[str, str]:
    return common_environment(
        spec,
        caller=caller or {},
        extra=extra or {},
        job_id="j",
        run_dir="/r",
        local_world_size=2,
        master=("127.0.0.1", 5),
        target="cpu",
        threads=3,
        server_token="secret",
    )


def test_a_value_that_names_a_number_of_the_worker_has_that_number() -> None:
    env = (("CACHE", "/tmp/{rank}/{local_rank}_{node_rank}_{rank}"), ("JSON", '{"rank": 1, "x": {}}'), ("PLAIN", "a"))
    assert of_rank(env, {"rank": 9, "local_rank": 1, "node_rank": 2}) == {"CACHE": "/tmp/9/1_2_9"}


def test_common_and_rank_variables_are_those_of_the_contract() -> None:
    ranks = rank_environment(global_rank=1, local_rank=1, node_rank=0, device_id=1)
    assert set(ranks) == contract.RANK_VARIABLES - {contract.MSRUN_SERVER_ADDRESS, contract.TORCHELASTIC_ERROR_FILE}
    assert set(build()) - contract.JOB_VARIABLES == {
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "TP_SOCKET_IFNAME",
        "PYTHONFAULTHANDLER",
        "PYTHONUNBUFFERED",
        "TORCH_GLOO_LAZY_INIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "OMP_NUM_THREADS",
    }
    at_times = {contract.MSRUN_SIM_LEVEL, contract.MSRUN_SIM_DEVICE, contract.MSRUN_SIM_ESTIMATE}
    at_times |= {contract.MSRUN_EXIT_TIME_OUT, contract.MSRUN_FLIGHT_RECORDER}
    assert set(build(spec=replace(SPEC, server_num=1))) >= contract.JOB_VARIABLES - at_times
    assert contract.MSRUN_SERVER_TOKEN not in build()


@pytest.mark.parametrize(
    ("caller", "extra", "name", "value"),
    [
        ({}, {}, "OMP_NUM_THREADS", "3"),
        ({"OMP_NUM_THREADS": "7"}, {}, "OMP_NUM_THREADS", None),
        ({}, {"OMP_NUM_THREADS": "9"}, "OMP_NUM_THREADS", "9"),
        ({"OMP_NUM_THREADS": "7"}, {"OMP_NUM_THREADS": "9"}, "OMP_NUM_THREADS", "9"),
        ({}, {}, "PYTHONFAULTHANDLER", "1"),
        ({"PYTHONFAULTHANDLER": "0"}, {}, "PYTHONFAULTHANDLER", None),
        ({}, {}, "GLOO_SOCKET_IFNAME", "lo"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {}, "GLOO_SOCKET_IFNAME", None),
        ({}, {"GLOO_SOCKET_IFNAME": "eth1"}, "GLOO_SOCKET_IFNAME", "eth1"),
        ({"TORCH_GLOO_LAZY_INIT": "0"}, {}, "TORCH_GLOO_LAZY_INIT", "0"),
        ({"WORLD_SIZE": "99"}, {}, "WORLD_SIZE", "2"),
    ],
)
def test_who_wins(caller: dict[str, str], extra: dict[str, str], name: str, value: str | None) -> None:
    assert build(caller, extra).get(name) == value


def test_overridden_names_are_those_with_another_value() -> None:
    assert overridden_names({"B": "1", "A": "1", "C": "3"}, {"A": "2", "B": "2", "C": "3", "D": "4"}) == ["A", "B"]


@pytest.mark.parametrize("name", ["API_TOKEN", "my_secret", "DB_PASSWORD", "AWS_ACCESS_KEY_ID", "Credential_File"])
def test_secret_looking_values_are_masked(name: str) -> None:
    assert masked({name: "x", "PLAIN": "y"}) == {name: MASK, "PLAIN": "y"}


def test_fork_server_gets_the_common_environment_without_ranks_and_with_one_blas_thread() -> None:
    caller = {"RANK": "3", "DEVICE_ID": "1", "HOME": "/h", "OPENBLAS_NUM_THREADS": "8"}
    env = server_environment(caller, {"WORLD_SIZE": "2"})
    assert env == {"HOME": "/h", "WORLD_SIZE": "2", "OPENBLAS_NUM_THREADS": "1"}


def test_worker_gets_back_what_the_fork_server_held() -> None:
    assert restored_environment({"OPENBLAS_NUM_THREADS": "8"}) == {"OPENBLAS_NUM_THREADS": "8"}
    assert restored_environment({}) == {"OPENBLAS_NUM_THREADS": None}


@pytest.mark.parametrize(
    ("caller", "common", "count"),
    [
        ({}, {}, 1),
        ({}, {"OMP_NUM_THREADS": "4"}, 4),
        ({"OPENBLAS_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "4"}, 2),
        ({"OPENBLAS_NUM_THREADS": "many"}, {"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": "4,2"}, {}, 1),
    ],
)
def test_blas_threads_follow_the_variables(caller: dict[str, str], common: dict[str, str], count: int) -> None:
    assert blas_threads(caller, common) == count
