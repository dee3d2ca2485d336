"""The words of the command line: which are msrun's own, and how they are spelled."""

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from unittest import mock

import click
import pytest
from asked_cases import slow_but
from hypothesis import given
from hypothesis import strategies as st
from job_runner import REPOSITORY

from launch_templates.cli import main as launch_template
from msrun.cli import command, main
from msrun.cli.options import GROUPS, LONG_OPTIONS, MOST_USED, OPTIONS, TAKING_VALUE
from msrun.cli.words import (
    ALIASES,
    FOREIGN_OPTIONS,
    WITHOUT_EFFECT,
    describe_late_options,
    describe_separate_value,
    normalise,
    translate,
)
from msrun.errors import UsageError, near_miss
from msrun.planning.program import Program
from msrun.torchrun import SWITCHES, WITH_VALUE, words_of
from ranktable.cli import main as ranktable


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--join", "train.py"], ["--join=true", "train.py"]),
        (["--dry_run", "train.py"], ["--dry_run=text", "train.py"]),
        (["--log_dir", "--join", "train.py"], ["--log_dir", "--join", "train.py"]),
        (["--log-dir", "a-b", "--dry-run", "t.py"], ["--log-dir", "a-b", "--dry_run=text", "t.py"]),
        (["train.py", "--join", "--dry_run"], ["train.py", "--join", "--dry_run"]),
        (["-m", "pkg", "--dry_run"], ["-m", "pkg", "--dry_run"]),
        (["--quiet", "--join"], ["--quiet=true", "--join=true"]),
        ([], []),
    ],
)
def test_optional_values_are_filled_in_before_the_script_only(words, expected):
    assert normalise(words) == expected


@given(st.lists(st.sampled_from(["--join", "--dry_run", "--dry-run", "-m", "--", "x", "--debug", "--log_dir=a"])))
def test_words_of_the_script_are_never_touched(args):
    assert normalise(["--worker_num", "2", "train.py", *args]) == ["--worker_num", "2", "train.py", *args]


def test_every_option_is_also_spelled_with_dashes():
    for parameter in command.params:
        for spelling in parameter.opts:
            if spelling.startswith("--"):
                assert "--" + spelling[2:].replace("_", "-") in parameter.opts


@pytest.mark.parametrize(
    ("word", "hint"),
    [("--worker_nmu", " (did you mean --worker_num?)"), ("--log", " (did you mean --log_dir?)"), ("--verbose", "")],
)
def test_near_miss_is_hinted(word, hint):
    assert near_miss(word, ["--worker_num", "--log_dir", "--sim_device", "--device_target", "--version"]) == hint


def help_text():
    width = {"terminal_width": 110, "color": False}
    return command.get_help(click.Context(command, info_name="msrun", **{**command.context_settings, **width}))


def option_lines(text):
    options = click.unstyle(text).partition("Examples:")[0]
    return re.findall(r"^  (--?\w[\w-]*)", options, flags=re.MULTILINE)


def test_every_option_stands_in_one_group_and_on_one_line():
    assert len(OPTIONS) == len(set(OPTIONS))
    shown = option_lines(help_text())
    assert shown == [parameter.opts[0] for parameter in OPTIONS] + ["--version", "-h"]


def said(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return click.unstyle(capsys.readouterr().out)


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("--worker_num", "2", "--help", "train.py")])
def test_the_first_screen_has_the_most_used_options_and_says_where_the_others_are(capsys, words):
    text = said(capsys, *words)
    assert len(text.splitlines()) <= 25
    assert option_lines(text) == [parameter.opts[0] for parameter in GROUPS[MOST_USED]]
    assert "--help all" in text


@pytest.mark.parametrize("title", [title for title in GROUPS if title != MOST_USED])
def test_the_options_of_one_group_are_shown_alone(capsys, title):
    shown = option_lines(said(capsys, "--help", title.lower()))
    assert shown[: len(GROUPS[title])] == [parameter.opts[0] for parameter in GROUPS[title]]
    assert shown == option_lines(said(capsys, f"--help={title.upper()}".lower()))


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "is_shown"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_colours_are_shown_on_a_terminal_only(capsys, monkeypatch, is_terminal, no_color, is_shown):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert ("\x1b[" in capsys.readouterr().out) == is_shown


@pytest.mark.parametrize(("command_name", "run"), [("ranktable", ranktable), ("launch-template", launch_template)])
def test_version_without_an_installation_is_said_to_be_unknown(capsys, monkeypatch, command_name, run):
    monkeypatch.setattr(importlib.metadata, "version", mock.Mock(side_effect=importlib.metadata.PackageNotFoundError))
    with contextlib.suppress(SystemExit):
        assert run(["--version"]) == 0
    said = f"{command_name}, version unknown: msrun is not installed, only on Python's path\n"
    assert capsys.readouterr() == (said, "")


def complete(*words):
    """Return what bash is told for the last of the words, as `kind,value`."""
    env = {"COMP_WORDS": " ".join(["msrun", *words]), "COMP_CWORD": str(len(words)), "_MSRUN_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-c", "from msrun.cli import main; main()"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "proposed"),
    slow_but(
        ("--worker_n", "--join tr"),
        [
            ("--worker_n", "plain,--worker_num"),
            ("--worker-n", "plain,--worker-num"),
            ("--start_method f", "plain,fork"),
            ("--hostfile ho", "file,ho"),
            ("--worker_num 2 tr", "file,tr"),
            ("--join tr", "file,tr"),  # its value may be left out, so this is the script
        ],
        key=lambda words, _: words,
    ),
)
def test_options_values_and_files_are_proposed(words, proposed):
    assert complete(*words.split()) == [proposed]


# -- command lines of torchrun, mpirun, srun, accelerate and DeepSpeed, in msrun's own words --------------------------


def told(line, devices=0, environ: Mapping[str, str] = {}):
    return " ".join(translate(line.split(), environ, lambda: devices)[0])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nproc-per-node 4 t.py --nproc-per-node 9", "--local_worker_num=4 t.py --nproc-per-node 9"),
        ("--nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr n1 t.py",
         "--node-rank 1 --master-addr n1 --worker_num=16 --local_worker_num=8 t.py"),
        ("--nnodes=2:2 --nproc-per-node 8 --rdzv-endpoint n1:29500 t.py",
         "--master_addr=n1 --master_port=29500 --worker_num=16 --local_worker_num=8 t.py"),
        ("--hosts h1,h2 --nnodes 2:4 --nproc-per-node 8 t.py", "--hosts h1,h2 --nnodes=2:4 --local_worker_num=8 t.py"),
        ("-m --nproc-per-node=2 pkg.train -m x", "--local_worker_num=2 -m pkg.train -m x"),
        ("--no-python --nproc-per-node=2 ./job.sh", "--local_worker_num=2 ./job.sh"),
        ("--max-restarts 3 --monitor-interval 5 t.py", "--max-restarts 3 t.py"),
        ("--tee 3 t.py", "--tail_worker_log=all t.py"),
        ("-r 3 -t 0:3,2:1,1:0 t.py", "--tail_worker_log=0,2 t.py"),
        ("--start-method spawn t.py", "--start_method=exec t.py"),
        ("--numa-binding node t.py", "--bind_numa=True t.py"),
        ("--shutdown-timeout 30 t.py", "--grace=30 t.py"),
        ("-np 4 -x FOO=1 -x BAR -wd /w --tag-output t.py",
         "--worker_num=4 --env=FOO=1 --env=BAR --chdir=/w --tail_worker_log=all t.py"),
        ("-n 4 -H h1:2,h2:2 t.py", "--worker_num=4 --hosts=h1:2,h2:2 t.py"),
        ("--num_processes 8 --num_machines 2 --machine_rank 1 --main_process_ip n1 --main_process_port 7 t.py",
         "--worker_num=8 --node_rank=1 --master_addr=n1 --master_port=7 --local_worker_num=4 t.py"),
        ("--cpu --multi_gpu t.py", "--device_target=cpu t.py"),
        ("--env -n t.py", "--env -n t.py"),
        ("examples list -n", "examples list -n"),
    ],
)  # fmt: skip
def test_line_of_another_launcher_means_the_same_here(line, words):
    assert told(line) == words


def test_words_for_a_number_are_those_of_torchrun():
    processors = len(os.sched_getaffinity(0))
    assert told("--nproc-per-node auto t.py", devices=4) == told("--nproc-per-node gpu t.py", devices=4)
    assert told("--nproc-per-node auto t.py", devices=4) == "--local_worker_num=4 t.py"
    assert told("--nproc-per-node auto t.py") == f"--local_worker_num={processors} t.py"
    assert told("--nproc-per-node cpu t.py", devices=4) == f"--local_worker_num={processors} t.py"
    assert told("--nnodes 2 t.py", devices=4) == "--worker_num=8 --local_worker_num=4 t.py"


def test_number_of_hosts_of_torchruns_variable_stands_for_its_option():
    environ = {"PET_NNODES": "3"}
    assert told("--nproc_per_node=2 t.py", environ=environ) == "--worker_num=6 --local_worker_num=2 t.py"
    assert told("--worker_num=2 t.py", environ=environ) == "--worker_num=2 t.py", "discovery reads it then"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--nproc-per-node gpu t.py", "--nproc-per-node gpu: no accelerator is visible"),
        ("--nproc_per_node 0 t.py", "--nproc_per_node 0: give a number of 1 or more"),
        ("--nproc_per_node", "--nproc_per_node: no value after it"),
        ("--nnodes 4:1 --nproc_per_node 2 t.py", "--nnodes 4:1: give MIN:MAX, such as 2:4"),
        ("--rdzv-backend etcd t.py", "--rdzv-backend etcd: msrun has a store of its own"),
        ("--tee 7 t.py", "--tee 7: give 0 to 3"),
        ("--numa-binding socket t.py", "--numa-binding socket: msrun binds to nodes"),
        ("--num_processes 5 --num_machines 2 t.py", "--num_machines 2: does not divide the 5 workers"),
    ],
)
def test_value_without_a_meaning_is_named_as_it_was_typed(line, reason):
    with pytest.raises(UsageError) as caught:
        told(line)
    assert str(caught.value).startswith(reason)


def test_what_changes_nothing_is_said():
    words = ["--rdzv-id=7", "--monitor-interval", "1", "t.py"]
    assert translate(words, {}, lambda: 0) == (["t.py"], ["--rdzv-id", "--monitor-interval"])


def test_no_alias_hides_an_option_of_ours_and_each_leads_to_one():
    assert not {*ALIASES, *WITHOUT_EFFECT, "--module"} & (LONG_OPTIONS | FOREIGN_OPTIONS.keys())
    assert {own.removesuffix("={}") for own in ALIASES.values() if "{}" in own} <= TAKING_VALUE
    assert {own.partition("=")[0] for own in ALIASES.values() if own} <= LONG_OPTIONS


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--mixed-precision=fp16", "t.py"], "--mixed-precision is accelerate's, .*leave it out: .*the script"),
        (["--map-by", "core", "t.py"], "--map-by is mpirun's, .*did you mean --bind_core"),
        (["--worker_num", "2", "--export", "FOO", "t.py"], "--export is srun's, .*did you mean --env"),
    ],
)
def test_option_of_another_launcher_is_answered_with_ours(words, answer):
    with pytest.raises(UsageError, match=answer):
        translate(words, {}, lambda: 0)


def test_every_answer_names_options_that_exist_and_none_hides_one_of_ours():
    assert not LONG_OPTIONS & set(FOREIGN_OPTIONS)
    for whose, here in FOREIGN_OPTIONS.values():
        assert whose.endswith("'s")
        named = {word.strip("(),;:") for word in here.split() if word.startswith("--")}
        assert named <= LONG_OPTIONS, here


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--join", "false", "x.py"], "--join=false"),
        (["--hosts", "h1", "h2", "x.py"], "--hosts h1,h2"),
        (["--hosts", "h1", "hostname"], ""),
        (["--log_dir", "false", "x.py"], ""),
        (["false"], ""),
        (["--join", "--", "false"], ""),
    ],
)
def test_value_after_a_space_is_noticed(words, hint):
    text = describe_separate_value(words)
    assert hint in text and bool(text) == bool(hint)


def test_program_that_is_there_under_such_a_name_is_no_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "true").touch()
    assert describe_separate_value(["--join", "true"]) == ""


@pytest.mark.parametrize(
    ("source", "args", "named"),
    [
        ("print(1)", ["--worker_num", "4", "--log-dir=x"], "--worker_num, --log_dir after train.py"),
        ("parser.add_argument('--log-dir')", ["--log_dir", "x"], ""),
        ("def main(log_dir): ...", ["--log-dir", "x"], ""),
        ("print(1)", ["--help", "--config=c.yaml"], ""),
    ],
)
def test_options_after_the_script_are_noticed_unless_the_script_speaks_of_them(tmp_path, source, args, named):
    (tmp_path / "train.py").write_text(source)
    text = describe_late_options(Program("script", str(tmp_path / "train.py"), tuple(args)))
    assert named in text and bool(text) == bool(named)


DEFAULTS = ["--nproc_per_node=1", "--redirects=0"]


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ("train.py --nn 3", {}, [*DEFAULTS, "train.py", "--nn", "3"]),
        ("--nproc 4 --redirect=3 x.py", {}, [*DEFAULTS, "--nproc_per_node", "4", "--redirects=3", "x.py"]),
        ("--nproc-per-node 4 -m pkg --run-path", {}, [*DEFAULTS, "--nproc_per_node", "4", "-m", "pkg", "--run-path"]),
        ("--rdzv=1 --master 2 x.py", {}, [*DEFAULTS, "--rdzv=1", "--master", "2", "x.py"]),
        ("--standalone --grace 3 --dry_run x.py", {}, [*DEFAULTS, "--standalone", "--grace", "3", "--dry_run", "x.py"]),
        (
            "x.py",
            {"PET_NPROC_PER_NODE": "4", "PET_NO_PYTHON": "1", "PET_MODULE": "0"},
            ["--nproc_per_node=4", "--redirects=0", "--no_python", "x.py"],
        ),
        ("--nnodes=1 x.py", {"PET_NNODES": "2", "PET_LOG_DIR": ""}, ["--nnodes=2", *DEFAULTS, "--nnodes=1", "x.py"]),
    ],
)
def test_words_are_those_that_torchrun_understands(argv, environ, expected):
    assert words_of(argv.split(), environ) == expected


def test_every_option_of_the_installed_torchrun_is_known():
    options = {
        max(action.option_strings, key=len).removeprefix("--").replace("-", "_"): action.nargs != 0
        for action in pytest.importorskip("torch.distributed.run").get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    }
    unknown = {name for name in options if name not in (*SWITCHES, *WITH_VALUE)}
    assert unknown == set()
    assert {name: name in WITH_VALUE for name in options if name in SWITCHES} == dict.fromkeys(SWITCHES, False)


def test_msrun_itself_has_these_defaults_where_the_environment_says_so(msrun, msrun_here, tmp_path):
    (tmp_path / "train.py").write_text("")
    words = ("--dry_run=json", "--nproc-per=3", "train.py")
    plan = json.loads(msrun.run(*words, cwd=tmp_path, env={"MSRUN_AS_TORCHRUN": "1"}).stdout)
    assert (plan["world_size"], plan["tail_ranks"]) == (3, [0, 1, 2])
    assert msrun_here(*words, cwd=tmp_path).code == 2, "a name that is cut short is torchrun's alone"
    listed = msrun.run("list", cwd=tmp_path, env={"MSRUN_AS_TORCHRUN": "1"})
    assert "no job has used it" in listed.stderr, "commands stay commands"
