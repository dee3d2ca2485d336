"""From the words of the command line to what was asked: all options translated into a LaunchSpec."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrun.cli.options import read_given
from msrun.errors import UsageError
from msrun.planning.program import Program, parse_program
from msrun.planning.settings import TOKEN_VARIABLE, Option, field_options
from msrun.planning.spec import NO_CONFIG, LaunchSpec, SshSettings, check_env, parse_env, parse_env_file, parse_tail
from msrun.planning.tls_spec import check_private, parse_tls_config

if TYPE_CHECKING:
    from msrun.launch.simulation import Simulation

MINDSPORE_WORKER_NUM = 8  # where nobody says it. Source: mindspore/python/mindspore/parallel/cluster/run.py
TERM = "TERM"


def build_spec(options: dict[str, Any], caller: dict[str, str]) -> LaunchSpec:
    """Translate the command line's words into a LaunchSpec (UsageError: a word that cannot be understood)."""
    working_directory = read_directory(options)
    worker_num = 1 if options["worker_num"] is None else options["worker_num"]
    local_worker_num = worker_num if options["local_worker_num"] is None else options["local_worker_num"]
    tail_ranks = parse_tail(options["tail_worker_log"], worker_num) if worker_num > 0 else ()
    rank = options["interactive"]
    has_terminal = rank is not None and os.isatty(0)
    of_terminal = ((TERM, caller[TERM]),) if has_terminal and TERM in caller else ()
    env_file = options["env_file"]
    file_env = parse_env_file(read_given("--env_file", env_file), str(env_file)) if env_file else ()
    below, above = (parse_env(options[name], caller) for name in ("env_below_file", "env"))
    tls, tls_file = None, options["tls_config"]
    if tls_file is not None:
        text = read_given("--tls_config", tls_file)
        tls = parse_tls_config(text, str(tls_file), str(tls_file.absolute().parent), caller)
    told = {**options, "worker_num": worker_num, "local_worker_num": local_worker_num}
    return LaunchSpec(
        **{
            **_fields(LaunchSpec, told),
            "program": build_program(options, working_directory),
            "script_source": options.get("source", ""),
            "working_directory": working_directory,
            "env": (*of_terminal, *below, *file_env, *above),
            "token": _read_token(options["token_file"], caller),
            "tls": tls,
            "ssh": SshSettings(**_fields(SshSettings, options)),
            "tail_ranks": tail_ranks if rank is None else () if has_terminal else (rank,),
            "has_terminal": has_terminal,
            "is_raw_tail": options["raw"] or rank is not None,
        }
    )


def _fields(spec: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec that are options and are not left at its defaults, from the words of these."""
    required = {one.name for one in fields(spec) if one.default is MISSING}
    return {
        name: _value(one, options[one.name])
        for name, one in field_options(spec).items()
        if name in required or options[one.name] not in (one.default, ())
    }


def _value(option: Option, asked: Any) -> Any:
    if option.parse is not None:
        asked = option.parse(asked)
    if option.is_repeatable:
        return tuple(_value(replace(option, is_repeatable=False), item) for item in asked)
    if not isinstance(asked, Path) or (option.name == "ssh_config" and str(asked) == NO_CONFIG):
        return asked
    try:
        return (asked.expanduser() if option.name.startswith("ssh_") else asked).absolute()
    except RuntimeError:
        who = asked.parts[0].removeprefix("~")
        raise UsageError(f"--{option.name} {asked}: there is no user {who!r}") from None


def _read_token(path: Path | None, caller: dict[str, str]) -> str:
    """Return the token of the file, else that of the environment; a line break at its end does not count."""
    if path is None:
        return caller.get(TOKEN_VARIABLE, "").strip()
    token = read_given("--token_file", path).strip()
    check_private(path.stat().st_mode, f"--token_file {path}", path)
    if not token:
        raise UsageError(f"--token_file {path}: is empty; put some random letters into it, e.g. openssl rand -hex 32")
    return token


def read_directory(options: Mapping[str, Any]) -> Path:
    directory = Path(options["chdir"] or ".").absolute()
    if not directory.is_dir():
        raise UsageError(f"--chdir {options['chdir']}: no such directory; workers have to start somewhere")
    return directory


def build_simulation(options: dict[str, Any], caller: dict[str, str]) -> Simulation:
    """Translate the command line's words into a dry run (UsageError: one that only a job can obey, too)."""
    from msrun.launch.simulation import Simulation

    working_directory = read_directory(options)
    env = parse_env(options["env"], caller)
    for name, value in env:
        check_env(name, value)
    worker_num = MINDSPORE_WORKER_NUM if options["worker_num"] is None else options["worker_num"]
    if isinstance(worker_num, str):
        raise UsageError(f"--sim_level and --worker_num {worker_num}: no host is looked at; give a number")
    return Simulation(
        program=parse_program(options["words"], is_module=options["module"], working_directory=working_directory),
        level=options["sim_level"],
        worker_num=worker_num,
        local_worker_num=options["local_worker_num"] or min(8, worker_num),
        global_rank=options["sim_rank_id"],
        device=options["sim_device"],
        working_directory=working_directory,
        log_dir=Path(options["log_dir"]).absolute(),
        env=env,
    )


OF_ANOTHER = ((":", "-n"), (":", "-np"))  # how another program begins, for mpirun


def build_program(options: Mapping[str, Any], working_directory: Path) -> Program:
    """Return what the job runs (UsageError: a program that does not exist, or several)."""
    words = options["words"]
    if another := next((pair for pair in itertools.pairwise(words) if pair in OF_ANOTHER), None):
        raise UsageError(f"{' '.join(another)}: a job has one program; let a script choose by RANK what it runs")
    program = parse_program(words, is_module=options["module"], working_directory=working_directory)
    return replace(
        program, role=options["role"], has_rank_args=options["rank_args"], passes_local_rank=options["pass_local_rank"]
    )
