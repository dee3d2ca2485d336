"""Command lines of torchrun, mpirun, srun, accelerate and DeepSpeed, in msrun's own words."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.cli.aliases import ALIASES, WITHOUT_EFFECT, translate
from msrun.cli.options import LONG_OPTIONS, TAKING_VALUE
from msrun.cli.words import FOREIGN_OPTIONS
from msrun.errors import UsageError


def told(line: str, devices: int = 0, environ: Mapping[str, str] = {}) -> str:
    return " ".join(translate(line.split(), environ, lambda: devices)[0])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nproc-per-node 4 t.py --nproc-per-node 9", "--local_worker_num=4 t.py --nproc-per-node 9"),
        ("--nproc_per_node=4 t.py", "--local_worker_num=4 t.py"),
        ("--standalone --nnodes=1 --nproc-per-node=2 t.py", "--local_worker_num=2 t.py"),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0 --nproc-per-node 2 t.py", "--local_worker_num=2 t.py"),
        (
            "--nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr n1 --master-port 7 t.py",
            "--node-rank 1 --master-addr n1 --master-port 7 --worker_num=16 --local_worker_num=8 t.py",
        ),
        (
            "--nnodes=2:2 --nproc-per-node 8 --rdzv-endpoint n1:29500 t.py",
            "--master_addr=n1 --master_port=29500 --worker_num=16 --local_worker_num=8 t.py",
        ),
        (
            "--nnodes=2 --nproc-per-node 1 --rdzv-endpoint [fd00::1]:7 t.py",
            "--master_addr=fd00::1 --master_port=7 --worker_num=2 --local_worker_num=1 t.py",
        ),
        (
            "--hosts h[1-5] --nnodes 2:4 --nproc-per-node 8 t.py",
            "--hosts h[1-5] --nnodes=2:4 --local_worker_num=8 t.py",
        ),
        ("-m --nproc-per-node=2 pkg.train -m x", "--local_worker_num=2 -m pkg.train -m x"),
        ("--module --nproc-per-node=2 pkg.train", "--local_worker_num=2 -m pkg.train"),
        ("--nproc-per-node=2 -m pkg.train --tee 3", "--local_worker_num=2 -m pkg.train --tee 3"),
        ("--no-python --nproc-per-node=2 ./job.sh", "--local_worker_num=2 ./job.sh"),
        ("--max-restarts 3 --monitor-interval 5 t.py", "--max-restarts 3 t.py"),
        ("--tee 3 t.py", "--tail_worker_log=all t.py"),
        ("-r 3 t.py", "--tail_worker_log=none t.py"),
        ("--redirects 3 --tee 3 t.py", "--tail_worker_log=all t.py"),
        ("-r 3 -t 0:3,2:1,1:0 t.py", "--tail_worker_log=0,2 t.py"),
        ("--local-ranks-filter 0,1 t.py", "--tail_worker_log=0,1 t.py"),
        ("--start-method spawn t.py", "--start_method=exec t.py"),
        ("--start-method fork t.py", "--start-method fork t.py"),
        ("--numa-binding node t.py", "--bind_numa=True t.py"),
        ("--shutdown-timeout 30 t.py", "--grace=30 t.py"),
        ("-np 4 -x FOO=1 -x BAR -wd /w --tag-output t.py",
         "--worker_num=4 --env=FOO=1 --env=BAR --chdir=/w --tail_worker_log=all t.py"),
        ("-n 4 -H h1:2,h2:2 t.py", "--worker_num=4 --hosts=h1:2,h2:2 t.py"),
        ("--num_processes 8 --num_machines 2 --machine_rank 1 --main_process_ip n1 --main_process_port 7 t.py",
         "--worker_num=8 --node_rank=1 --master_addr=n1 --master_port=7 --local_worker_num=4 t.py"),
        ("--num_gpus 2 t.py", "--local_worker_num=2 t.py"),
        ("--cpu --multi_gpu t.py", "--device_target=cpu t.py"),
        ("t.py --tee 3", "t.py --tee 3"),
        ("-- -n", "-- -n"),
        ("--dry_run -n 2 t.py", "--dry_run --worker_num=2 t.py"),
        ("--env -n t.py", "--env -n t.py"),
        ("examples list -n", "examples list -n"),
        ("", ""),
    ],
)  # fmt: skip
def test_line_of_another_launcher_means_the_same_here(line: str, words: str) -> None:
    assert told(line) == words


def test_words_for_a_number_are_those_of_torchrun() -> None:
    processors = len(os.sched_getaffinity(0))
    assert told("--nproc-per-node auto t.py", devices=4) == told("--nproc-per-node gpu t.py", devices=4)
    assert told("--nproc-per-node auto t.py", devices=4) == "--local_worker_num=4 t.py"
    assert told("--nproc-per-node auto t.py") == f"--local_worker_num={processors} t.py"
    assert told("--nproc-per-node cpu t.py", devices=4) == f"--local_worker_num={processors} t.py"
    assert told("--nnodes 2 t.py", devices=4) == "--worker_num=8 --local_worker_num=4 t.py"


def test_number_of_hosts_of_torchruns_variable_stands_for_its_option() -> None:
    environ = {"PET_NNODES": "3"}
    assert told("--nproc_per_node=2 t.py", environ=environ) == "--worker_num=6 --local_worker_num=2 t.py"
    assert told("--worker_num=2 t.py", environ=environ) == "--worker_num=2 t.py", "discovery reads it then"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--nproc-per-node gpu t.py", "--nproc-per-node gpu: no accelerator is visible"),
        ("--nproc_per_node 0 t.py", "--nproc_per_node 0: give a number of 1 or more"),
        ("--nproc_per_node many t.py", "--nproc_per_node many: give a number"),
        ("--nproc_per_node", "--nproc_per_node: no value after it"),
        ("--nnodes 4:1 --nproc_per_node 2 t.py", "--nnodes 4:1: give MIN:MAX, such as 2:4"),
        ("--rdzv-backend etcd t.py", "--rdzv-backend etcd: msrun has a store of its own"),
        ("--tee 7 t.py", "--tee 7: give 0 to 3"),
        ("-r 0:3 t.py", "--redirects 0:3: give one number"),
        ("--numa-binding socket t.py", "--numa-binding socket: msrun binds to nodes"),
        ("--num_processes 5 --num_machines 2 t.py", "--num_machines 2: does not divide the 5 workers"),
    ],
)
def test_value_without_a_meaning_is_named_as_it_was_typed(line: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        told(line)
    assert str(caught.value).startswith(reason)


def test_what_changes_nothing_is_said() -> None:
    words = ["--rdzv-id=7", "--monitor-interval", "1", "t.py"]
    assert translate(words, {}, lambda: 0) == (["t.py"], ["--rdzv-id", "--monitor-interval"])


def test_no_alias_hides_an_option_of_ours_and_each_leads_to_one() -> None:
    assert not {*ALIASES, *WITHOUT_EFFECT, "--module"} & (LONG_OPTIONS | FOREIGN_OPTIONS.keys())
    assert {own.removesuffix("={}") for own in ALIASES.values() if "{}" in own} <= TAKING_VALUE
    assert {own.partition("=")[0] for own in ALIASES.values() if own} <= LONG_OPTIONS


@given(st.lists(st.sampled_from(["--worker_num=2", "--log-dir", "logs", "--quiet", "t.py", "-n", "4", "--tee", "3"])))
def test_all_from_the_script_on_stays_as_it_is(words: list[str]) -> None:
    line = ["--worker_num=1", "x.py", *words]
    assert translate(line, {}, lambda: 0)[0] == line
