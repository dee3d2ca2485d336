"""MSRUN_ variables: which are settings, which are misspelled, which a worker inherits, and how settings are shown."""

from __future__ import annotations

import pytest

from msrun.errors import UsageError
from msrun.planning.settings import (
    Setting,
    option_variables,
    render_settings,
    settings_note,
    without_option_variables,
)

NAMES = ["worker_num", "log_dir", "grace", "device_target", "config"]


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, {}),
        ({"MSRUN_GRACE": "3", "GRACE": "4", "HOME": "/h"}, {"grace": "3"}),
        ({"MSRUN_GRACE": ""}, {}),
        ({"MSRUN_LOG_DIR": "l"}, {"log_dir": "l"}),
        ({"MSRUN_LOG_DIR": "l", "MSRUN_DEVICE_TARGET": "cpu", "MSRUN_JOB_ID": "j"}, {}),
        ({"MSRUN_LOG_DIR": "l", "MSRUN_GRACE": "3", "MSRUN_JOB_ID": "j"}, {"grace": "3"}),
        ({"MSRUN_RENDEZVOUS": "file:///x", "MSRUN_PROGRESS": "x", "MSRUN_STACK_SIGNAL": "42"}, {}),
        ({"MSRUN_IMAGE": "x", "MSRUN_": "y"}, {}),
    ],
)
def test_variables_that_are_settings(environ: dict[str, str], found: dict[str, str]) -> None:
    assert option_variables(environ, NAMES) == found


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MSRUN_WORKER_NMU", "MSRUN_WORKER_NUM"),
        ("MSRUN_LOGDIR", "MSRUN_LOG_DIR"),
        ("MSRUN_GRACES", "MSRUN_GRACE"),
        ("MSRUN_VERIFI", "MSRUN_VERIFY"),
    ],
)
def test_misspelled_variable_is_refused_with_the_name_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        option_variables({name: "1"}, NAMES)
    assert str(caught.value) == f"{name}: no such setting (did you mean {meant}?); correct the variable or unset it"


def test_variables_of_others_with_our_prefix_are_none_of_our_business() -> None:
    assert option_variables({"MSRUN_CPU_LIST": "1", "MSRUN_IMAGE": "x", "MSRUN_DIR": "/d"}, NAMES) == {}


def test_workers_do_not_inherit_settings_but_keep_the_rest() -> None:
    environ = {"MSRUN_GRACE": "3", "MSRUN_LOG_DIR": "l", "MSRUN_CONFIG": "c", "MSRUN_IMAGE": "x", "HOME": "/h"}
    assert without_option_variables(environ, NAMES) == {"MSRUN_IMAGE": "x", "HOME": "/h"}


def test_workers_inherit_what_is_set_for_them() -> None:
    environ = {"MSRUN_VERIFY": "1", "MSRUN_DEBUG": "1"}
    assert without_option_variables(environ, [*NAMES, "debug"]) == environ
    assert option_variables(environ, [*NAMES, "debug"]) == {"debug": "1"}


def test_a_nested_job_keeps_the_variables_of_the_outer_one() -> None:
    environ = {"MSRUN_GRACE": "3", "MSRUN_LOG_DIR": "l", "MSRUN_JOB_ID": "j"}
    assert without_option_variables(environ, NAMES) == {"MSRUN_LOG_DIR": "l", "MSRUN_JOB_ID": "j"}


SETTINGS = [
    Setting("grace", 3.0, "MSRUN_GRACE"),
    Setting("env", ["A=b c", "B=1"], "job.yaml"),
    Setting("worker_num", 2, "command line"),
]


def test_note_names_what_does_not_stand_on_the_command_line() -> None:
    assert settings_note(SETTINGS) == ["settings: grace=3 (MSRUN_GRACE), env='A=b c' B=1 (job.yaml)"]
    assert settings_note(SETTINGS[2:]) == []
    assert settings_note([Setting("env", ["A=b\nc"], "MSRUN_ENV")]) == ["settings: env='A=b\\nc' (MSRUN_ENV)"]


def test_table_shows_all_of_them() -> None:
    assert render_settings(SETTINGS) == [
        "settings",
        "  grace=3          MSRUN_GRACE",
        "  env='A=b c' B=1  job.yaml",
        "  worker_num=2     command line",
    ]
    assert render_settings([]) == ["settings     all defaults"]
