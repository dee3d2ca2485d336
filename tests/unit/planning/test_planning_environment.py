"""The environment as a difference: whose value wins, what is hidden, what the fork server gets."""

from pathlib import Path

import pytest
from plans import spec_of

from msrun.errors import UsageError
from msrun.planning.environment import blas_threads, common_environment, of_rank, server_environment
from msrun.planning.settings import Setting, option_variables, settings_note, without_option_variables

SPEC = spec_of(Path("/w"), has_trace=True)


def build(caller=None, extra=None, spec=SPEC):
    return common_environment(
        spec,
        None,
        caller=caller or {},
        extra=extra or {},
        job_id="j",
        run_dir="/r",
        master=("127.0.0.1", 5),
        target="cpu",
        threads=3,
        server_token="secret",
    )


def test_a_value_that_names_a_number_of_the_worker_has_that_number():
    env = (("CACHE", "/tmp/{rank}/{local_rank}_{node_rank}_{rank}"), ("JSON", '{"rank": 1, "x": {}}'), ("PLAIN", "a"))
    assert of_rank(env, {"rank": 9, "local_rank": 1, "node_rank": 2}) == {"CACHE": "/tmp/9/1_2_9"}


@pytest.mark.parametrize(
    ("caller", "extra", "name", "value"),
    [
        ({}, {}, "OMP_NUM_THREADS", "3"),
        ({"OMP_NUM_THREADS": "7"}, {"OMP_NUM_THREADS": "9"}, "OMP_NUM_THREADS", "9"),
        ({"PYTHONFAULTHANDLER": "0"}, {}, "PYTHONFAULTHANDLER", None),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {}, "GLOO_SOCKET_IFNAME", None),
        ({}, {"GLOO_SOCKET_IFNAME": "eth1"}, "GLOO_SOCKET_IFNAME", "eth1"),
        ({"TORCH_GLOO_LAZY_INIT": "0"}, {}, "TORCH_GLOO_LAZY_INIT", "0"),
        ({"WORLD_SIZE": "99"}, {}, "WORLD_SIZE", "2"),
    ],
)
def test_who_wins(caller, extra, name, value):
    assert build(caller, extra).get(name) == value


def test_fork_server_gets_the_common_environment_without_ranks_and_with_one_blas_thread():
    caller = {"RANK": "3", "DEVICE_ID": "1", "HOME": "/h", "OPENBLAS_NUM_THREADS": "8"}
    env = server_environment(caller, {"WORLD_SIZE": "2"})
    assert env == {"HOME": "/h", "WORLD_SIZE": "2", "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("caller", "common", "count"),
    [
        ({}, {"OMP_NUM_THREADS": "4"}, 4),
        ({"OPENBLAS_NUM_THREADS": "many"}, {"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": "4,2"}, {}, 1),
    ],
)
def test_blas_threads_follow_the_variables(caller, common, count):
    assert blas_threads(caller, common) == count


NAMES = ["worker_num", "log_dir", "grace", "device_target", "config"]


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, {}),
        ({"MSRUN_GRACE": "3", "GRACE": "4", "HOME": "/h"}, {"grace": "3"}),
        ({"MSRUN_GRACE": ""}, {}),
        ({"MSRUN_LOG_DIR": "l", "MSRUN_DEVICE_TARGET": "cpu", "MSRUN_JOB_ID": "j"}, {}),
        ({"MSRUN_LOG_DIR": "l", "MSRUN_GRACE": "3", "MSRUN_JOB_ID": "j"}, {"grace": "3"}),
        ({"MSRUN_RENDEZVOUS": "file:///x", "MSRUN_PROGRESS": "x", "MSRUN_STACK_SIGNAL": "42"}, {}),
    ],
)
def test_variables_that_are_settings(environ, found):
    assert option_variables(environ, NAMES) == found


@pytest.mark.parametrize(
    ("name", "meant"), [("MSRUN_WORKER_NMU", "MSRUN_WORKER_NUM"), ("MSRUN_VERIFI", "MSRUN_VERIFY")]
)
def test_misspelled_variable_is_refused_with_the_name_that_was_meant(name, meant):
    with pytest.raises(UsageError) as caught:
        option_variables({name: "1"}, NAMES)
    assert str(caught.value) == f"{name}: no such setting (did you mean {meant}?); correct the variable or unset it"


def test_workers_do_not_inherit_settings_but_keep_the_rest():
    environ = {"MSRUN_GRACE": "3", "MSRUN_LOG_DIR": "l", "MSRUN_CONFIG": "c", "MSRUN_IMAGE": "x", "HOME": "/h"}
    assert without_option_variables(environ, NAMES) == {"MSRUN_IMAGE": "x", "HOME": "/h"}


SETTINGS = [
    Setting("grace", 3.0, "MSRUN_GRACE"),
    Setting("env", ["A=b c", "B=1"], "job.yaml"),
    Setting("worker_num", 2, "command line"),
]


def test_note_names_what_does_not_stand_on_the_command_line():
    assert settings_note(SETTINGS) == ["settings: grace=3 (MSRUN_GRACE), env='A=b c' B=1 (job.yaml)"]
    assert settings_note(SETTINGS[2:]) == []
    assert settings_note([Setting("env", ["A=b\nc"], "MSRUN_ENV")]) == ["settings: env='A=b\\nc' (MSRUN_ENV)"]
