"""Counts, ports, names, tails and environment files: what is taken, what is refused and how."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import spec_of

from msrun import contract
from msrun.errors import UsageError
from msrun.launch.simulation import Simulation
from msrun.planning.program import Program
from msrun.planning.spec import (
    SshSettings,
    check_env,
    check_spec,
    parse_env,
    parse_env_file,
    parse_size,
    parse_statuses,
    parse_tail,
)


def build_spec(**changes):
    return spec_of(Path("/w"), **{"worker_num": 4, "local_worker_num": 4, **changes})


GOOD = [
    {},
    {"log_max_bytes": 4096, "log_keep": 1000},
    {"master_addr": "127.0.0.2"},
    {"master_addr": "train-0.train"},
    {"server_num": 2},
    {"local_worker_num": 3, "master_addr": "10.0.0.1"},
    {"local_worker_num": 3, "master_addr": "train-0.train", "node_rank": 7, "heartbeat_time_out_s": 1.0},
    {"cluster_time_out_s": -1},
    {"worker_log_name": "w.{ip}-{hostname}_x"},
    {"env": (("A", ""), ("_b9", "x\ny=z"))},
]

BAD = [
    ({"local_worker_num": 3, "master_addr": "10.0.0.1", "node_rank": -2}, "--node_rank -2: must be 0 or more"),
    ({"local_worker_num": 3, "master_addr": "h", "heartbeat_time_out_s": 0.5}, "--heartbeat_time_out 0.5: must be"),
    ({"server_num": -1}, "--server_num -1: must be 0 or more"),
    ({"server_num": 2, "local_worker_num": 3, "master_addr": "h"}, "--server_num 2: workers and parameter servers on"),
    ({"worker_log_name": ".."}, "--worker_log_name .."),
    ({"worker_log_name": "{user}"}, "--worker_log_name {user}: "),
    ({"worker_log_name": "a\n"}, "--worker_log_name a"),
    ({"worker_log_name": "server", "server_num": 2}, "--worker_log_name server: the parameter servers of "),
    ({"log_max_bytes": 1}, "--log_max_bytes 1: must be 4096 bytes or more"),
    ({"log_keep": 1001}, "--log_keep 1001: must be 1 to 1000"),
    ({"has_times": True, "is_raw_tail": True}, "--log_time and --raw: that shows bytes"),
    ({"ssh": SshSettings(user="-oProxyCommand=x")}, "--ssh_user: user '-oProxyCommand=x'"),
    ({"ssh": SshSettings(port=65536)}, "--ssh_port 65536: must be 1 to 65535"),
    ({"ssh": SshSettings(connect_time_out_s=float("nan"))}, "--ssh_connect_time_out nan"),
    ({"ssh": SshSettings(window=0)}, "--ssh_window 0: must be 1 to 1024"),
    ({"restart_on": (7, 9), "no_restart_on": (7,), "max_restarts": 1}, "--restart_on and --no_restart_on: both name 7"),
    ({"restart_on": (7,)}, "--restart_on: starts nothing again with --max_restarts 0"),
]


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_good_spec_is_taken(changes):
    check_spec(build_spec(**changes))


@pytest.mark.parametrize(("changes", "begin"), BAD, ids=[str(row[0]) for row in BAD])
def test_bad_spec_is_refused_by_its_option(changes, begin):
    with pytest.raises(UsageError) as caught:
        check_spec(build_spec(**changes))
    assert str(caught.value).startswith(begin)
    assert caught.value.exit_code == 2


def test_variables_of_the_job_cannot_be_set_by_hand():
    for name in contract.RANK_VARIABLES | contract.JOB_VARIABLES:
        with pytest.raises(UsageError, match=f"--env {name}: msrun sets it"):
            check_env(name, "1")


@pytest.mark.parametrize(
    "text", ["4", "0-4", "2-1", "a", "1,", ",", "-2", "1-", "1--2", "1.0", "0x1", "+1", "0 1", "²", "1" * 5000]
)
def test_tail_list_that_is_none_or_beyond_the_job_is_refused(text):
    with pytest.raises(UsageError, match="--tail_worker_log"):
        parse_tail(text, 4)


def test_tail_list_may_be_a_word():
    assert [parse_tail(text, 2) for text in ("all", "-1", "ALL", "none", "", " 1 , 0 - 1")] == [
        (0, 1), (0, 1), (0, 1), (), (), (1, 0),
    ]  # fmt: skip


ENV_FILES = [
    ("", ()),
    ("A=1", (("A", "1"),)),
    ("A=1\r\nB=2\r\n", (("A", "1"), ("B", "2"))),
    ("export A=1", (("A", "1"),)),
    ("A=", (("A", ""),)),
    ("A='b c'", (("A", "b c"),)),
    ("A='", (("A", "'"),)),
    ('A="b c"', (("A", "b c"),)),
    ("A='b\"", (("A", "'b\""),)),
    ("A=b # no note", (("A", "b # no note"),)),
    ("A=$HOME `id`", (("A", "$HOME `id`"),)),
    ("A=one\x0ctwo\u2028three", (("A", "one\x0ctwo\u2028three"),)),
]


@pytest.mark.parametrize(("text", "pairs"), ENV_FILES)
def test_env_file_is_read(text, pairs):
    assert parse_env_file(text, "job.env") == pairs


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
values = st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"]), max_size=30)


@given(st.lists(st.tuples(names, values)))
def test_quoted_values_of_an_env_file_come_back_unchanged(pairs):
    text = "\n".join(f"{name}='{value}'" for name, value in pairs)
    assert parse_env_file(text, "job.env") == tuple(pairs)


@given(st.text(max_size=80))
def test_any_env_file_is_read_or_refused_with_its_line(text):
    try:
        pairs = parse_env_file(text, "job.env")
    except UsageError as error:
        assert str(error).startswith("--env_file job.env, line ")
        return
    assert all(name.isidentifier() for name, _ in pairs)


def test_env_option_takes_a_value_or_the_callers():
    assert parse_env(["A=1", "B", "C=", "D=x=y"], {"B": "here"}) == (("A", "1"), ("B", "here"), ("C", ""), ("D", "x=y"))
    with pytest.raises(UsageError, match="--env E: not set here; give --env E=VALUE"):
        parse_env(["E"], {})


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("123456", 123456), ("64K", 65536), ("100M", 100 * 2**20), ("8 MB", 8 * 2**20), (" 10b ", 10)],
)
def test_size_is_understood(text, size_bytes):
    assert parse_size("--log_max_bytes", text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "M", "-1", "1.5G", "10X", "1M2", "100 M B", "0x10", "1e6", "inf", "\N{ARABIC-INDIC DIGIT ONE}K"]
)
def test_what_is_no_size_is_refused_with_a_remedy(text):
    with pytest.raises(UsageError, match=r"--log_max_bytes .*: not a size; give .* such as 100M"):
        parse_size("--log_max_bytes", text)


def test_statuses_and_names_of_signals_are_understood():
    assert parse_statuses("--restart_on", "75, SIGTERM,kill,137") == (75, 143, 137)
    assert parse_statuses("--restart_on", "") == ()


@pytest.mark.parametrize("text", ["0", "256", "TERMINATE", "1,,2", "-1", "1-3", "9" * 5000, "\u0663"])
def test_what_is_no_status_is_refused(text):
    with pytest.raises(UsageError, match=r"--restart_on .* is neither an exit status from 1 to 255 nor a signal"):
        parse_statuses("--restart_on", text)


def simulation(**changes):
    given = {"level": 1, "worker_num": 32, "local_worker_num": 8, "global_rank": 11, "device": "h100"}
    program, here = Program("script", "train.py"), Path("/here")
    return Simulation(program=program, working_directory=here, log_dir=here / "out", **{**given, **changes})


def test_process_is_told_its_place_and_nothing_of_another_job():
    caller = {"HOME": "/root", "RANK": "3", "MASTER_ADDR": "10.0.0.1", "MSRUN_JOB_ID": "x", "MS_ROLE": "MS_WORKER"}
    environ = simulation().environment(caller)
    assert environ["HOME"] == "/root"
    assert {environ[name] for name in ("RANK", "RANK_ID")} == {"11"}
    assert {environ[name] for name in ("WORLD_SIZE", "RANK_SIZE")} == {"32"}
    assert (environ["LOCAL_RANK"], environ["DEVICE_ID"], environ["LOCAL_WORLD_SIZE"]) == ("3", "3", "8")
    assert not {"MASTER_ADDR", "MSRUN_JOB_ID", "MS_ROLE", contract.MSRUN_SIM_ESTIMATE} & environ.keys()
    assert simulation(tries_changes=True).environment({})[contract.MSRUN_SIM_ESTIMATE] == "1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker_num": 0}, "--worker_num 0: must be 1 or more"),
        ({"global_rank": 32}, "--sim_rank_id 32: no such rank; the ranks of this job are 0 to 31"),
        ({"global_rank": -1}, "--sim_rank_id -1: no such rank"),
        ({"local_worker_num": 5}, "--worker_num 32 on hosts of 5: .* give --local_worker_num 8"),
        ({"local_worker_num": 0}, "--worker_num 32 on hosts of 0: .* give --local_worker_num 8"),
        ({"worker_num": 12, "tries_changes": True}, "--worker_num 12 on hosts of 8: .* give --hosts 2"),
        ({"device": "h10"}, r"--sim_device h10 \(did you mean h100\?\): must be one of ascend910a, .* JSON file"),
        ({"device": "h10", "tries_changes": True}, "--device h10 "),
        ({"device": "none.json"}, "--sim_device none.json: no such file"),
    ],
)
def test_dry_run_that_no_job_could_be_is_refused(changes, words):
    with pytest.raises(UsageError, match=words):
        simulation(**changes)
