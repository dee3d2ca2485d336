"""Counts, ports, names, tails and environment files: what is taken, what is refused and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec, SshSettings, check_env, check_spec, parse_env, parse_env_file, parse_tail


def build_spec(**changes: Any) -> LaunchSpec:
    settings: dict[str, Any] = {
        "program": Program("script", "/w/train.py"),
        "worker_num": 4,
        "local_worker_num": 4,
        "working_directory": Path("/w"),
        "log_dir": Path("/w/log_output"),
    }
    return LaunchSpec(**{**settings, **changes})


GOOD = [
    {},
    {"worker_num": 1, "local_worker_num": 1},
    {"master_port": 65535},
    {"log_max_bytes": 4096, "log_keep": 1000},
    {"master_addr": "127.0.0.2"},
    {"master_addr": "::1"},
    {"master_addr": "localhost"},
    {"master_addr": "train-0.train"},
    {"node_rank": 0},
    {"server_num": 2},
    {"local_worker_num": 3, "master_addr": "10.0.0.1"},
    {"local_worker_num": 3, "master_addr": "train-0.train", "node_rank": 7, "heartbeat_time_out_s": 1.0},
    {"cluster_time_out_s": -1},
    {"grace_s": 0.0},
    {"worker_log_name": "w.{ip}-{hostname}_x"},
    {"tail_ranks": (0, 3)},
    {"env": (("A", ""), ("_b9", "x\ny=z"))},
]

BAD = [
    ({"worker_num": 0, "local_worker_num": 0}, "--worker_num 0: must be 1 or more"),
    ({"local_worker_num": -1}, "--local_worker_num -1: must be 1 or more"),
    ({"local_worker_num": 5}, "--local_worker_num 5: more than --worker_num 4"),
    ({"local_worker_num": 3}, "--local_worker_num 3: less than --worker_num 4"),
    ({"local_worker_num": 3, "master_addr": "::1"}, "--local_worker_num 3: less than --worker_num 4, so the job has"),
    ({"local_worker_num": 3, "master_addr": "10.0.0.1", "node_rank": -2}, "--node_rank -2: must be 0 or more"),
    (
        {"local_worker_num": 3, "master_addr": "h", "heartbeat_time_out_s": 0.5},
        "--heartbeat_time_out 0.5: must be 1 or",
    ),
    ({"local_worker_num": 3, "master_addr": "h", "heartbeat_time_out_s": float("nan")}, "--heartbeat_time_out nan: "),
    ({"node_rank": 1}, "--node_rank 1: "),
    ({"server_num": -1}, "--server_num -1: must be 0 or more"),
    (
        {"server_num": 2, "local_worker_num": 3, "master_addr": "h"},
        "--server_num 2: workers and parameter servers on several hosts know each other by the job's token",
    ),
    ({"node_rank": -2}, "--node_rank -2: "),
    ({"master_port": 65536}, "--master_port 65536: must be 0 to 65535"),
    ({"master_port": -1}, "--master_port -1: must be 0 to 65535"),
    ({"master_addr": "--flag"}, "--master_addr '--flag': "),
    ({"master_addr": "two words"}, "--master_addr 'two words': "),
    ({"grace_s": -0.1}, "--grace -0.1: must be 0 or more"),
    ({"worker_log_name": ""}, "--worker_log_name "),
    ({"worker_log_name": ".."}, "--worker_log_name .."),
    ({"worker_log_name": "a/b"}, "--worker_log_name a/b"),
    ({"worker_log_name": "{user}"}, "--worker_log_name {user}"),
    ({"worker_log_name": "a\n"}, "--worker_log_name a"),
    (
        {"worker_log_name": "server", "server_num": 2},
        "--worker_log_name server: the parameter servers of --server_num 2 have logs of this name; give another one",
    ),
    ({"log_max_bytes": 1}, "--log_max_bytes 1: must be 4096 bytes or more"),
    ({"log_keep": 0}, "--log_keep 0: must be 1 to 1000"),
    ({"log_keep": 1001}, "--log_keep 1001: must be 1 to 1000"),
    ({"splits_logs": True, "log_max_bytes": 4096}, "--log_split and --log_max_bytes: a log that is rotated"),
    ({"has_times": True, "is_raw_tail": True}, "--log_time and --raw: that shows bytes"),
    ({"ssh": SshSettings(user="-oProxyCommand=x")}, "--ssh_user: user '-oProxyCommand=x'"),
    ({"ssh": SshSettings(port=65536)}, "--ssh_port 65536: must be 1 to 65535"),
    ({"ssh": SshSettings(connect_time_out_s=0.0)}, "--ssh_connect_time_out 0: must be more than 0"),
    ({"ssh": SshSettings(connect_time_out_s=float("nan"))}, "--ssh_connect_time_out nan"),
    ({"ssh": SshSettings(window=0)}, "--ssh_window 0: must be 1 to 1024"),
    ({"tail_ranks": (4,)}, "--tail_worker_log 4: no such rank; the ranks of this job are 0 to 3"),
    ({"env": (("A B", "1"),)}, "--env 'A B': not a variable name"),
]


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_good_spec_is_taken(changes: dict[str, Any]) -> None:
    check_spec(build_spec(**changes))


@pytest.mark.parametrize(("changes", "begin"), BAD, ids=[str(row[0]) for row in BAD])
def test_bad_spec_is_refused_by_its_option(changes: dict[str, Any], begin: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_spec(build_spec(**changes))
    assert str(caught.value).startswith(begin)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", sorted(contract.RANK_VARIABLES | contract.JOB_VARIABLES))
def test_variables_of_the_job_cannot_be_set_by_hand(name: str) -> None:
    with pytest.raises(UsageError, match=f"--env {name}: msrun sets it"):
        check_env(name, "1")


def test_value_with_a_nul_byte_is_refused() -> None:
    with pytest.raises(UsageError, match="NUL byte"):
        check_env("A", "x\0y")


TAILS = [
    ("all", (0, 1, 2, 3)),
    ("-1", (0, 1, 2, 3)),
    ("ALL", (0, 1, 2, 3)),
    ("none", ()),
    ("", ()),
    ("0", (0,)),
    ("3,1", (3, 1)),
    ("0-2", (0, 1, 2)),
    (" 1 - 2 , 0 ", (1, 2, 0)),
    ("1,1,0-2", (1, 0, 2)),
]


@pytest.mark.parametrize(("text", "ranks"), TAILS)
def test_tail_list_is_read(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_tail(text, 4) == ranks


@pytest.mark.parametrize(
    "text", ["4", "0-4", "2-1", "a", "1,", ",", "-2", "1-", "1--2", "1.0", "0x1", "+1", "0 1", "²", "1" * 5000]
)
def test_tail_list_that_is_none_or_beyond_the_job_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--tail_worker_log"):
        parse_tail(text, 4)


@given(st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63)).map(sorted), min_size=1))
def test_tail_list_of_ranges_gives_their_ranks_in_order_without_repeats(ranges: list[list[int]]) -> None:
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    expected = dict.fromkeys(rank for a, b in ranges for rank in range(a, b + 1))
    assert parse_tail(text, 64) == tuple(expected)


@given(st.text(max_size=20))
def test_any_tail_text_is_read_or_refused(text: str) -> None:
    try:
        ranks = parse_tail(text, 4)
    except UsageError:
        return
    assert set(ranks) <= {0, 1, 2, 3}


ENV_FILES = [
    ("", ()),
    ("\n  \n# note\n", ()),
    ("A=1", (("A", "1"),)),
    ("A=1\r\nB=2\r\n", (("A", "1"), ("B", "2"))),
    ("export A=1", (("A", "1"),)),
    ("A=", (("A", ""),)),
    ("A=b=c", (("A", "b=c"),)),
    ("A='b c'", (("A", "b c"),)),
    ('A="b c"', (("A", "b c"),)),
    ("A='", (("A", "'"),)),
    ("A='b\"", (("A", "'b\""),)),
    ("A=b # no note", (("A", "b # no note"),)),
    ("  A =x", (("A", "x"),)),
    ("A=1\nA=2", (("A", "1"), ("A", "2"))),
    ("A=$HOME `id`", (("A", "$HOME `id`"),)),
    ("A=one\x0ctwo\u2028three", (("A", "one\x0ctwo\u2028three"),)),
]


@pytest.mark.parametrize(("text", "pairs"), ENV_FILES)
def test_env_file_is_read(text: str, pairs: tuple[tuple[str, str], ...]) -> None:
    assert parse_env_file(text, "job.env") == pairs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\nB", "--env_file job.env, line 2: 'B' is not NAME=value"),
        ("=1", "--env_file job.env, line 1: '' is not a variable name"),
        ("A=1\n\n1B=2", "--env_file job.env, line 3: '1B' is not a variable name"),
        ("A B=2", "--env_file job.env, line 1: 'A B' is not a variable name"),
    ],
)
def test_env_file_mistake_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_env_file(text, "job.env")
    assert str(caught.value).startswith(message)


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
values = st.text(st.characters(exclude_characters="\n\0", exclude_categories=["Cs"]), max_size=30)


@given(st.lists(st.tuples(names, values)))
def test_quoted_values_of_an_env_file_come_back_unchanged(pairs: list[tuple[str, str]]) -> None:
    text = "\n".join(f"{name}='{value}'" for name, value in pairs)
    assert parse_env_file(text, "job.env") == tuple(pairs)


@given(st.text(max_size=80))
def test_any_env_file_is_read_or_refused_with_its_line(text: str) -> None:
    try:
        pairs = parse_env_file(text, "job.env")
    except UsageError as error:
        assert str(error).startswith("--env_file job.env, line ")
        return
    assert all(name.isidentifier() for name, _ in pairs)


def test_env_option_takes_a_value_or_the_callers() -> None:
    assert parse_env(["A=1", "B", "C=", "D=x=y"], {"B": "here"}) == (("A", "1"), ("B", "here"), ("C", ""), ("D", "x=y"))
    with pytest.raises(UsageError, match="--env E: not set here; give --env E=VALUE"):
        parse_env(["E"], {})
