"""The files of --config and --tls_config: what is taken letter by letter, what is refused and in which words."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from msrun.cli import command
from msrun.cli.launch_command import build_spec
from msrun.cli.options import SETTABLE, Sources, apply_sources
from msrun.cli.words import normalise
from msrun.errors import UsageError
from msrun.planning.settings import CIPHERS, PSK_CIPHER, parse_config, parse_tls_config, variable_name
from msrun.planning.spec import SshSettings


def parse(text):
    return parse_config(
        text, "job.yaml", {name: one for name, one in SETTABLE.items() if name not in ("config", "env")}
    )


TAKEN = [
    ("worker_num: 4", {"worker_num": "4"}),
    ("worker_num: '010'", {"worker_num": "010"}),
    ("log_dir: yes", {"log_dir": "yes"}),
    ("exit-time-out: 2.50", {"exit_time_out": "2.50"}),
    ("quiet: true", {"quiet": "true"}),
    ("log_dir: 2026-01-31", {"log_dir": "2026-01-31"}),
    ('log_dir: ""', {"log_dir": ""}),
    ("preload: [a, b.c]", {"preload": ["a", "b.c"]}),
    ("preload:\n- a\n- b\n", {"preload": ["a", "b"]}),
    ("bind_core: true", {"bind_core": "true"}),
    ("bind_core: {device0: [0-3, 7], device1: ['8']}", {"bind_core": '{"device0": ["0-3", "7"], "device1": ["8"]}'}),
    ("", {}),
]


@pytest.mark.parametrize(("text", "options"), TAKEN)
def test_values_are_taken_letter_by_letter(text, options):
    assert parse(text).options == options


def test_program_and_environment_are_taken_as_written():
    config = parse(
        "script: train.py\nargs: [--lr, 0.10, 1e-3, off, 0x10, 'a b', '']\n"
        "module: yes\nenv: {RATE: 0.10, FLAG: on, EMPTY: '', DATE: 2026-01-31}\n"
    )
    assert config.program == ("train.py", "--lr", "0.10", "1e-3", "off", "0x10", "a b", "") and config.is_module
    assert config.env == (("RATE", "0.10"), ("FLAG", "on"), ("EMPTY", ""), ("DATE", "2026-01-31"))


REFUSED = [
    ('log_dir: "a\\0b"', "line 1: log_dir: holds a character that no command line can; remove it"),
    ("log_dir: !!python/object/apply:os.system [id]", "line 1: log_dir: a list; give a single value"),
    ("preload: torch", "line 1: preload: 'torch' is text; give a list such as [a, b]"),
    ("preload:\n- a\n- [b]\n", "line 3: preload: a list; give a single value"),
    ("dry_run: [a]", "line 1: dry_run: a list; give a single value"),
    ("<<: {grace: 1}", "line 1: the file: a merge key (<<) instead of a name; give NAME: value"),
    ("config: a.yaml", "line 1: config: a file cannot name another one; give --config on the command line"),
    ("env:\n  A: 1\n  B: 2\n  A: 3", "line 4: A: given twice, first in line 2; keep one"),
    ("env: {A: }", "line 1: env A: no value; give a single value, '' for an empty one"),
    ("script: a.py\nargs: b", "line 2: args: 'b' is text; give a list such as [a, b]"),
    ("script: a.py\nmodule: 2", "line 2: module: '2': give true or false"),
    ("bind_core: {a: {b: ~}}", "line 1: bind_core a b: no value; give a single value, '' for an empty one"),
    ("a: 1\nenv: *b", "line 2: *b: aliases are not read; write the value again"),
    ("a: b: c", "line 1: not YAML (mapping values are not allowed"),
    ("grace: 1\n---\ngrace: 2\n", "line 2: not YAML ("),
    ("grace: \x00", "line 1: not YAML ("),
    ("\t grace: 1", "line 1: not YAML ("),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_is_wrong_is_named_with_file_line_and_remedy(text, message):
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"--config job.yaml, {message}")
    if not message.endswith("("):
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{a: " * 100_000, "- " * 100_000 + "a", "env: &e {A: *e}"], ids=["{", "-", "itself"])
def test_bombs_are_refused(text):
    with pytest.raises(UsageError, match=r"levels deep; write it flatter|aliases are not read"):
        parse(text)


@given(st.text(max_size=200))
def test_no_text_ends_in_anything_but_a_config_or_a_refusal(text):
    try:
        parse(text)
    except UsageError as error:
        assert str(error).startswith("--config job.yaml, line ")


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "worker_num": st.integers(1, 64),
        "master_port": st.integers(0, 65535),
        "grace": st.floats(0, 1e6).filter(lambda value: "e-" not in str(value)),
        "log_dir": TEXTS.filter(bool),
        "start_method": st.sampled_from(["auto", "fork", "exec"]),
        "tail_worker_log": st.sampled_from(["0", "all", "none", "-1"]),
        "preload": st.lists(TEXTS.filter(bool), max_size=3),
        "env": st.dictionaries(NAMES, TEXTS, max_size=3),
        "quiet": st.booleans(),
    },
)


def spec_of(words, variables):
    """Translate as the command does, without running anything; what only tells where values came from is left out."""
    with (
        mock.patch.dict(os.environ, variables),
        command.make_context("msrun", normalise(words), obj=Sources()) as context,
    ):
        spec = build_spec(apply_sources(context, context.params), dict(os.environ))
        return replace(spec, settings=(), env=tuple(sorted(dict(spec.env).items())))


def as_words(options):
    words = []
    for name, value in options.items():
        if name == "env":
            words += [f"--env={key}={text}" for key, text in value.items()]
        elif isinstance(value, list):
            words += [f"--{name}={item}" for item in value]
        else:
            words.append(f"--{name}={value}")
    return words


def as_variables(options):
    variables = {}
    for name, value in options.items():
        if name == "env":
            value = [f"{key}={text}" for key, text in value.items()]
        variables[variable_name(name)] = shlex.join(value) if isinstance(value, list) else str(value)
    return variables


@given(options=OPTIONS, args=st.lists(TEXTS, max_size=4))
def test_command_line_variables_and_file_give_the_same_job(tmp_path_factory, options, args):
    folder = tmp_path_factory.getbasetemp() / "same-job"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").touch()
    options = {**options, "chdir": str(folder)}
    config = folder / "job.yaml"
    config.write_text(yaml.safe_dump({**options, "script": "train.py", "args": args}), encoding="utf-8")

    expected = spec_of([*as_words(options), "train.py", *args], {})
    assert spec_of(["--config", str(config)], {}) == expected
    assert spec_of(["train.py", *args], as_variables(options)) == expected
    assert spec_of([], {**as_variables(options), "MSRUN_CONFIG": str(config)}) == expected


def settings_of(*words):
    with command.make_context("msrun", normalise([*words, "true"]), obj=Sources()) as context:
        return build_spec(apply_sources(context, context.params), dict(os.environ)).ssh


def test_options_variables_and_file_become_settings(tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text("ssh_identity: [a, /b]\nssh_window: 7\nssh_user: them\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("MSRUN_SSH_PORT", "2222")
    assert settings_of() == SshSettings(port=2222)
    words = (
        "--config=job.yaml",
        "--ssh-user=me",
        "--ssh_config=~/c",
        "--ssh_host_keys=off",
        "--ssh_connect_time_out=5",
    )
    found = settings_of(*words, "--ssh_connect_time_out=5")
    assert found == SshSettings(Path("/home/me/c"), "me", 2222, (tmp_path / "a", Path("/b")), "off", 5.0, 7)
    assert settings_of("--ssh_config=none").config_file == Path("none")


# -- --tls_config: MindSpore's keys, and a reason for everything that is not taken ------------------------------------

DOCUMENTED_CIPHERS = (
    "ECDHE-R SA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-GCM-SHA256:DHE-RSA-AES128-GCM-SHA256:DHE-DSS-AES128-GCM-SHA256:"
    "DHE-PSK-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305:ECDHE-PSK-CHACHA20-POLY1305:DHE-RSA-AES128-CCM"
)
"""As MindSpore's own example has them, shortened: a stray blank, and suites that MindSpore refuses."""
LEAST = {"client_cert_path": "client.pem", "ca_cert_path": "/etc/ca.crt"}


def parse_tls(values, **environ):
    return parse_tls_config(json.dumps(values), "tls.json", "/conf", environ)


def refusal(values):
    with pytest.raises(UsageError) as caught:
        parse_tls(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_paths_count_from_the_folder_of_the_file():
    spec = parse_tls({**LEAST, "crl_path": "", "server_cert_path": "keys/server.pem"})
    assert (spec.client_cert_path, spec.ca_cert_path, spec.crl_path) == ("/conf/client.pem", "/etc/ca.crt", "")
    assert spec.server_cert_path == "/conf/keys/server.pem"
    assert spec.place("ca_cert_path") == "--tls_config tls.json: ca_cert_path /etc/ca.crt"


def test_without_a_list_all_allowed_suites_are_taken_and_90_days_are_warned():
    spec = parse_tls({**LEAST, "cipher_list": ""})
    assert (spec.ciphers, spec.warning_days) == (CIPHERS, 90)
    assert not any(name.startswith("DHE") or "PSK" in name for name in CIPHERS)


def test_suites_keep_their_order_and_the_one_without_certificates_is_left_out():
    names = f"{CIPHERS[5]}:{PSK_CIPHER}::{CIPHERS[0]}:{CIPHERS[5]}"
    assert parse_tls({**LEAST, "cipher_list": names}).ciphers == (CIPHERS[5], CIPHERS[0])


def test_documented_list_of_suites_is_refused_by_name_with_a_remedy():
    reason = refusal({**LEAST, "cipher_list": DOCUMENTED_CIPHERS})
    assert "'ECDHE-R SA-AES128-GCM-SHA256' (did you mean ECDHE-RSA-AES128-GCM-SHA256?)" in reason
    assert "'DHE-RSA-AES128-GCM-SHA256'" in reason and "and 2 more: not allowed" in reason
    assert "leave cipher_list out to have all that are" in reason and ":".join(CIPHERS) in reason


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "is no JSON object"),
        ({"ca_cert_path": "c"}, "client_cert_path: is missing"),
        ({**LEAST, "crl_paht": "x"}, "'crl_paht': no such key (did you mean crl_path?)"),
        ({**LEAST, "server_password": "x"}, "no password belongs into this file; set MSRUN_TLS_SERVER_PASSWORD"),
        ({**LEAST, "crl_path": 3}, "crl_path: 3 is no text"),
        ({**LEAST, "cert_expire_warning_time_in_day": 6}, "6: must be 7 to 180 days"),
        ({**LEAST, "cert_expire_warning_time_in_day": True}, "true: must be 7 to 180 days"),
        ({**LEAST, "cipher_list": PSK_CIPHER}, "alone cannot be used with certificates"),
        ({**LEAST, "cipher_list": "ALL"}, "'ALL': not allowed"),
    ],
)
def test_what_is_wrong_is_named(values, reason):
    assert reason in refusal(values)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "is empty"), ("{\n'a': 1}", "not JSON (line 2:"), ("[" * 100_000, "more than 100 levels deep")],
)
def test_what_is_no_json_is_told(text, reason):
    with pytest.raises(UsageError, match=r"^--tls_config tls.json: ") as caught:
        parse_tls_config(text, "tls.json", "/conf", {})
    assert reason in str(caught.value)


KEYS = (*LEAST, "server_cert_path", "crl_path", "cipher_list", "cert_check_interval_time", "x")
JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.lists(st.text(max_size=3))


@given(st.dictionaries(st.sampled_from(KEYS), JUNK | st.dictionaries(st.text(), JUNK, max_size=2)))
def test_any_values_are_taken_or_refused_in_one_line(values):
    try:
        parse_tls(values)
    except UsageError as error:
        assert "\n" not in str(error)
