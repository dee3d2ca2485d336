"""From the words of the command line to what was asked: all options translated into a LaunchSpec, with one program or
several, `msrun -n 1 a.py : -n 3 b.py`, as mpirun has it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrun.cli.options import read_given
from msrun.cli.words import ALIASES, underscored
from msrun.errors import UsageError
from msrun.planning.program import DEFAULT_ROLE, Program, join_programs, parse_program
from msrun.planning.settings import TOKEN_VARIABLE, Option, field_options
from msrun.planning.spec import NO_CONFIG, LaunchSpec, SshSettings, check_env, parse_env, parse_env_file, parse_tail
from msrun.planning.tls_spec import check_private, parse_tls_config

if TYPE_CHECKING:
    from msrun.launch.simulation import Simulation

MINDSPORE_WORKER_NUM = 8
"""Where nobody says it. Source: mindspore/python/mindspore/parallel/cluster/run.py."""
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
    if options["others"]:
        raise UsageError("--sim_level and several programs: a dry run stands for a rank of one; name that one")
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


COLON = ":"
"""Begins another program where one of its options follows."""
_OPTIONS = {name: "worker_num" for name, own in ALIASES.items() if own == "--worker_num={}"}
_OPTIONS |= {"--worker_num": "worker_num", "--role": "role"}


@dataclass(frozen=True)
class OtherProgram:
    """A program after a colon."""

    words: tuple[str, ...]
    worker_num: int
    role: str = DEFAULT_ROLE
    is_module: bool = False


def take_programs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with `others`, the programs after colons, and the number of workers of all (UsageError)."""
    words = tuple(options["words"])
    ends = [index for index in range(len(words) - 1) if words[index] == COLON and _option(words[index + 1])]
    if not ends:
        return {**options, "others": ()}
    if not isinstance(options["worker_num"], int):
        raise UsageError(f"{words[0]}: one of several programs; give each its number of workers, as in -n 1 before it")
    bounds = [*ends, len(words)]
    others = [_read(words[start + 1 : end]) for start, end in itertools.pairwise(bounds)]
    total = options["worker_num"] + sum(one.worker_num for one in others)
    return {**options, "words": words[: ends[0]], "others": tuple(others), "worker_num": total}


def build_program(options: Mapping[str, Any], working_directory: Path) -> Program:
    """Return what the job runs (UsageError: a program that does not exist)."""
    first = parse_program(options["words"], is_module=options["module"], working_directory=working_directory)
    others: Sequence[OtherProgram] = options.get("others", ())
    found = [(first, options["role"], (options["worker_num"] or 1) - sum(one.worker_num for one in others))]
    for one in others:
        program = parse_program(one.words, is_module=one.is_module, working_directory=working_directory)
        found.append((program, one.role, one.worker_num))
    flags = {"has_rank_args": options["rank_args"], "passes_local_rank": options["pass_local_rank"]}
    return join_programs([(replace(program, role=role, **flags), count) for program, role, count in found])


def _option(word: str) -> str:
    name = underscored(word.partition("=")[0])
    return "module" if name in ("-m", "--module") else _OPTIONS.get(name, "")


def _read(words: Sequence[str]) -> OtherProgram:
    rest = list(words)
    given: dict[str, Any] = {}
    while rest and rest[0].startswith("-"):
        name, has_value, value = rest.pop(0).partition("=")
        kind = _option(name)
        if not kind:
            raise UsageError(
                f"{name} after a colon: only -n N, --role NAME and -m stand there; give it before the first"
            )
        if kind == "module":
            given["is_module"] = True
            continue
        value = value if has_value else rest.pop(0) if rest else ""
        if kind == "worker_num" and not (value.isascii() and value.isdigit() and int(value[:9]) > 0):
            raise UsageError(f"{name} {value}: give the number of workers of this program, 1 or more")
        given[kind] = int(value[:9]) if kind == "worker_num" else value
    if not rest or "worker_num" not in given:
        raise UsageError(f"{COLON} {' '.join(words)}: give a number of workers and a program, as in {COLON} -n 3 b.py")
    return OtherProgram(tuple(rest), **given)
