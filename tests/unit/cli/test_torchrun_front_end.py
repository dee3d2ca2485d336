"""torchrun's command lines under `python -m msrun.torchrun`: names cut short, PET_ variables, defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_runner import JobRunner
from torch.distributed.run import get_args_parser

from msrun.torchrun import SWITCHES, WITH_VALUE, words_of

DEFAULTS = ["--nproc_per_node=1", "--redirects=0"]


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ("train.py --nn 3", {}, [*DEFAULTS, "train.py", "--nn", "3"]),
        ("--nproc 4 --redirect=3 x.py", {}, [*DEFAULTS, "--nproc_per_node", "4", "--redirects=3", "x.py"]),
        (
            "--nproc-per-node 4 -t 3 -m pkg --run-path",
            {},
            [*DEFAULTS, "--nproc_per_node", "4", "-t", "3", "-m", "pkg", "--run-path"],
        ),
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
def test_words_are_those_that_torchrun_understands(argv: str, environ: dict[str, str], expected: list[str]) -> None:
    assert words_of(argv.split(), environ) == expected


def test_every_option_of_the_installed_torchrun_is_known() -> None:
    options = {
        max(action.option_strings, key=len).removeprefix("--").replace("-", "_"): action.nargs != 0
        for action in get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    }
    unknown = {name for name in options if name not in (*SWITCHES, *WITH_VALUE)}
    assert unknown == set()
    assert {name: name in WITH_VALUE for name in options if name in SWITCHES} == dict.fromkeys(SWITCHES, False)


def test_msrun_itself_has_these_defaults_where_the_environment_says_so(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    words = ("--dry_run=json", "--nproc-per=3", "train.py")
    plan = json.loads(msrun.run(*words, cwd=tmp_path, env={"MSRUN_AS_TORCHRUN": "1"}).stdout)
    assert (plan["world_size"], plan["tail_ranks"]) == (3, [0, 1, 2])
    assert msrun.run(*words, cwd=tmp_path).code == 2, "a name that is cut short is torchrun's alone"
    listed = msrun.run("list", cwd=tmp_path, env={"MSRUN_AS_TORCHRUN": "1"})
    assert "no job has used it" in listed.stderr, "commands stay commands"
