"""The `msrun` command: options -> LaunchSpec -> plan -> run. The only place that prints errors and exits."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from msrun import __version__, contract
from msrun.cli.commands import FIRST_WORDS, end_warm_servers, estimate_command, look_after, print_text
from msrun.cli.options import BY_NAME, EXCLUSIVE, HOST_OPTIONS, OPTIONS, SETTABLE, Sources, apply_sources, read_given
from msrun.cli.words import (
    LaunchCommand,
    a_file,
    describe_late_options,
    describe_separate_value,
    read_options,
    translate,
    workers_here,
)
from msrun.errors import LIMITS, MsrunError, UsageError, describe_limit, near_miss, refused_as
from msrun.launch import output
from msrun.launch.output import one_line
from msrun.planning.program import COMMANDS, ONCE, Program, parse_program
from msrun.planning.settings import (
    TOKEN_VARIABLE,
    TRUE_WORDS,
    FoundSetting,
    Option,
    check_private,
    field_options,
    parse_tls_config,
    refuse_together,
    without_option_variables,
)
from msrun.planning.spec import (
    NO_CONFIG,
    LaunchSpec,
    SshSettings,
    check_env,
    check_spec,
    is_loopback,
    parse_env,
    parse_env_file,
    parse_tail,
)

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


MAX_SHOWN = 80  # of a path that is too long
EPILOG = """\b
Examples:
  msrun --worker_num 8 train.py --lr 0.1
  msrun --worker_num 2 -m package.train
  msrun --worker_num 4 --dry_run=json train.py
  msrun --config job.yaml --check
  msrun --hosts node[01-16]:8 train.py
  msrun --rehearse 4x2 train.py
  msrun --worker_num 16 --local_worker_num 8 --master_addr 10.0.0.1 train.py    (on each of two hosts)
  srun --ntasks-per-node=1 msrun train.py
  msrun examples list
  msrun trace log_output
  msrun estimate train.py --device h100 --worker_num 64

--a-b is the same as --a_b; S is a number of seconds. A value that may be left out follows =, as in --dry_run=json or
--quiet=False. Everything after SCRIPT belongs to the script. Any option may also be set as MSRUN_<OPTION> in the
environment (MSRUN_WORKER_NUM=4) or in the --config file (worker_num: 4). Precedence: command line, then environment,
then file; --dry_run shows each value and its source.
"""


@click.command(
    cls=LaunchCommand,
    params=[
        *OPTIONS,
        click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...", shell_complete=a_file),
    ],
    epilog=EPILOG,
    context_settings={
        "ignore_unknown_options": False,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
    options_metavar="[OPTIONS]",
)
@click.version_option(__version__, prog_name="msrun")
def command(**options: Any) -> int:
    """Start a parallel job: one worker process per device, with logs in LOG_DIR/worker_<rank>.log.

    SCRIPT is a Python file, `python x.py`, `pytest x.py`, any executable, or a module after -m."""
    if any(options[name] for name in ("status", "stop", "watch", "json")):
        return look_after(options)
    if options["warm"] == "stop":
        return end_warm_servers(options)
    context = click.get_current_context()
    options = apply_sources(context, options)
    sources = context.ensure_object(Sources)
    _say(sources.hint, options)
    refuse_together({name for name, one in BY_NAME.items() if options[name] != one.default}, EXCLUSIVE)
    options = _read_script(options)
    if options["check"]:
        return _check(options)
    if options["sim_level"] is not None:
        from msrun.launch.simulation import run_simulation

        return run_simulation(build_simulation(options, dict(os.environ)), dict(os.environ), quiet=options["quiet"])
    spec = _spec(options, sources)
    _say(describe_late_options(spec.program), options)
    if spec.interactive_rank is not None and not options["join"]:
        raise UsageError(f"--interactive={spec.interactive_rank} and --join=False: a job in the background has no user")
    caller = without_option_variables(os.environ, SETTABLE)
    from msrun.launch.preflight.checks import check_host

    check_host(spec, is_dry_run=bool(options["dry_run"] or options["plan"]))
    if options["dry_run"] or options["plan"]:
        return _plan(spec, caller, options)
    return _run(spec, caller, quiet=options["quiet"], join=options["join"])


def _read_script(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the content of a SCRIPT that can be read only once: `-`, or a pipe as of `<(...)`."""
    words = options["words"]
    if not words or options["module"] or not (words[0] == ONCE or Path(words[0]).is_fifo()):
        return options
    for name in ("sim_level", *HOST_OPTIONS):
        if options[name] not in (None, False):
            raise UsageError(f"{words[0]} and --{name}: the script is read here, once; give a file")
    with refused_as(f"{words[0]}: cannot be read", "give a file"):
        source = sys.stdin.buffer.read() if words[0] == ONCE else Path(words[0]).read_bytes()
    if not source.strip():
        raise UsageError(f"{words[0]}: no program came from there; give a file, or write one into msrun")
    return {**options, "words": (ONCE, *words[1:]), "source": source.decode("utf-8", "surrogateescape")}


def _plan(spec: LaunchSpec, caller: dict[str, str], options: dict[str, Any]) -> int:
    from msrun.launch.job import Start, plan_dry_run
    from msrun.planning.plan import render_plan

    if options["plan"] and spec.is_remote:
        from msrun.launch.directory.log_directory import new_job_id
        from msrun.launch.fleet.hosts import ask_for_plan

        plan = ask_for_plan(spec, Start(caller, new_job_id(), options["quiet"]))
    else:
        plan = plan_dry_run(spec, caller)
    print_text(render_plan(plan, as_json=(options["plan"] or options["dry_run"]) == "json"))
    return contract.EXIT_OK


def _spec(options: dict[str, Any], sources: Sources) -> LaunchSpec:
    hosts: dict[str, Any] = {}
    given = {setting.name for setting in sources.settings}
    if isinstance(options["worker_num"], str):
        options = _count_here(options)
        given = given ^ {"worker_num", "local_worker_num"}
    table = options["rank_table_file"]
    if table is not None and not (options["dry_run"] or options["plan"] or options["check"]):
        from msrun.launch.rank_table_file import await_rank_table

        await_rank_table(table.absolute(), options["cluster_time_out"], functools.partial(_say, options=options))
    named = [name for name in HOST_OPTIONS if options[name] not in (None, False, 0, ())]
    if not named and options["min_hosts"] == 0:
        raise UsageError("--min_hosts 0: must be 1 or more hosts; leave it out to need all")
    if named and not (named == ["min_hosts"] and options["local_worker_num"] is not None):  # hosts that come themselves
        from msrun.launch.job_hosts import read_job_hosts

        found = read_job_hosts(options, given)
        hosts = {"host_entries": found.entries, "table_hosts": found.assignments, "spares": found.spares}
        options = found.options
    elif table is not None:
        from msrun.launch.job_hosts import read_host_list

        host_list = read_host_list(table.absolute())
        if host_list is not None:
            hosts, options = {"table_hosts": host_list.hosts}, host_list.apply(options, given)
    elif options["discover"]:
        from msrun.launch.rendezvous import discover_host

        place = discover_host(options, given, os.environ)
        sources.settings = (*sources.settings, *place.settings)
        for line in place.lines:
            _say(line, options)
        options = {**options, **place.options}
    if options["worker_num"] is None:
        options = _with_worker_num(options, sources)
    spec = replace(build_spec(options, dict(os.environ)), settings=sources.settings, **hosts)
    check_spec(spec)
    if spec.is_several:
        from msrun.launch.rendezvous import is_under_scheduler

        spec = replace(spec, is_under_scheduler=is_under_scheduler(os.environ))
    return spec


def _count_here(options: dict[str, Any]) -> dict[str, Any]:
    word = options["worker_num"]
    if named := next((name for name in (*HOST_OPTIONS, "local_worker_num") if options[name] not in (None, False)), ""):
        raise UsageError(f"--worker_num {word} and --{named}: it counts on this host alone; give a number")
    return {**options, "worker_num": None, "local_worker_num": workers_here("--worker_num", word, _count_devices)}


def _with_worker_num(options: dict[str, Any], sources: Sources) -> dict[str, Any]:
    """Return the options with the number of workers where none is given (UsageError: of a job with other hosts)."""
    from msrun.planning.program import imports_package

    directory = read_directory(options)
    program = parse_program(options["words"], is_module=options["module"], working_directory=directory)
    is_among_others = options["node_rank"] > 0 or not is_loopback(options["master_addr"])
    if options["local_worker_num"] is not None and not is_among_others:
        number = max(1, options["local_worker_num"])
        source = "--local_worker_num" if "local_worker_num" in {s.name for s in sources.settings} else "counted here"
    elif any(imports_package(file, "mindspore") for file in program.files(directory)):
        number, source = MINDSPORE_WORKER_NUM, "MindSpore's default"
        _say(f"{number} workers, as of MindSpore's msrun; --worker_num N starts N", options)
    elif options["local_worker_num"] is not None:
        raise UsageError(
            "--worker_num: is left out, but --master_addr or --node_rank says that there are other hosts; give the "
            "number of workers over all of them"
        )
    else:
        devices = _count_devices(options["device_target"])
        number, source = devices or 1, "accelerators of this host" if devices else "no accelerator on this host"
    sources.settings = (*sources.settings, FoundSetting("worker_num", number, source))
    return {**options, "worker_num": number}


def _count_devices(target: str = "auto") -> int:
    from msrun.launch.rendezvous import count_devices

    return count_devices(target, os.environ)


def _say(text: str, options: dict[str, Any]) -> None:
    if text:
        from msrun.launch.console import say

        say(text, quiet=options["quiet"])


def _check(options: dict[str, Any]) -> int:
    from msrun.launch.preflight.checks import inspect_host
    from msrun.launch.preflight.fleet_checks import exit_code_of_findings, render_fleet_findings

    spec = _spec(options, click.get_current_context().ensure_object(Sources))
    caller, quiet = without_option_variables(os.environ, SETTABLE), options["quiet"]
    if spec.is_remote:
        from msrun.launch.directory.log_directory import new_job_id
        from msrun.launch.fleet.hosts import check_fleet
        from msrun.launch.job import Start

        findings = check_fleet(spec, Start(caller, new_job_id(), quiet))
    else:
        findings = inspect_host(spec, caller)
    for line in render_fleet_findings(findings, spec.host_entries, quiet=quiet):
        print_text(line)
    return exit_code_of_findings(findings)


def _run(spec: LaunchSpec, caller: dict[str, str], *, quiet: bool, join: bool) -> int:
    from msrun.agent.observer import OwnFaults
    from msrun.launch.console import say
    from msrun.launch.directory.log_directory import new_job_id, of_job, write_script
    from msrun.launch.failure import render_failure
    from msrun.launch.job import Start, run_job
    from msrun.launch.terminal import describe_unread_input, detach, is_in_background

    if spec.interactive_rank is None:
        _say(describe_unread_input(), {"quiet": quiet})
    elif spec.has_terminal and is_in_background():
        raise UsageError(f"--interactive={spec.interactive_rank}: msrun runs in the background (&); start it without")
    job_id = new_job_id()
    spec = spec if spec.is_several else of_job(spec, job_id)  # that of node 0 counts, when hosts come together
    if spec.script_source:
        spec = write_script(spec)
    run = run_job
    if spec.is_remote:
        from msrun.launch.fleet.fleet_job import run_fleet_job as run
    elif spec.is_several:
        from msrun.launch.joined_job import run_joined_job as run
    start = Start(caller, job_id, quiet)
    result = run(spec, start if join else replace(start, on_directory=detach(quiet=quiet)))
    if result.failure:
        _print_error(str(result.failure.reason))
        folder = result.plan.log_dir
        with OwnFaults(folder, functools.partial(say, quiet=False), found_in=folder).kept_from_job("failure report"):
            report = render_failure(result.failure, result.plan.tail_ranks if join and output.is_one_place() else ())
            if report:
                output.say_lines(report)
    if result.survivors:
        _print_error(f"processes that could not be ended: {', '.join(map(str, result.survivors))}")
    return result.exit_code


def _print_error(text: str) -> None:
    """Print one line; a line break in a value that the text quotes is shown as \\n."""
    output.say_lines(f"msrun: error: {one_line(text)}")


def _usage_text(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    name = context.command_path if context is not None else "msrun"
    if isinstance(error, click.NoSuchOption):
        known = context.command if context is not None else command
        spellings = [spelling for parameter in known.params for spelling in parameter.opts]
        script = ", options of SCRIPT stand after --" if context and context.command is estimate_command else ""
        hint = near_miss(error.option_name, spellings)
        return f"{error.option_name}: no such option{hint}; {name} --help lists them{script}"
    if isinstance(error, click.BadOptionUsage) and "requires" in error.message:
        return f"{error.option_name}: no value after it; {name} --help says what it takes"
    has_reason = not isinstance(error, click.MissingParameter)
    if isinstance(error, click.BadParameter) and error.param is not None and has_reason:
        place, option = "", str(error.param.name)
        if context is not None and context.get_parameter_source(option) is ParameterSource.DEFAULT_MAP:
            place = context.ensure_object(Sources).place(option)
        return f"{place or error.param.opts[0]}: {error.message.rstrip('.')}"
    return f"{error.format_message().rstrip('.')}; see {name} --help"


def _os_error_text(error: OSError) -> tuple[str, int]:
    """Return what an error of the system says to the user, and the exit status; empty for one that nobody expects."""
    if error.errno in LIMITS:
        return f"{error.filename or 'msrun'}: {describe_limit(error)}", contract.EXIT_CLUSTER
    if error.errno == errno.ENAMETOOLONG:
        shown = str(error.filename)[:MAX_SHOWN]
        return f"{shown}...: the path is too long for this system; give a shorter one", contract.EXIT_USAGE
    try:
        os.getcwd()  # noqa: PTH109 - nothing relative can be found without a current directory
    except FileNotFoundError:
        return "the current directory has been removed; change to one that exists", contract.EXIT_USAGE
    return "", contract.EXIT_OK


def _wants_tracebacks(words: Sequence[str], sources: Sources) -> bool:
    for _, name, value in read_options(words)[0]:
        if name == "--debug":
            return not value or value.lower() in TRUE_WORDS
    return sources.raw("debug").lower() in TRUE_WORDS


def _start(words: list[str], sources: Sources, hint: str = "") -> int:
    if words and words[0] in COMMANDS:
        text = FIRST_WORDS[words[0]].main(words[1:], prog_name=f"msrun {words[0]}", standalone_mode=False)
        if type(text) is int:  # the exit status of what it has run
            return text
        if isinstance(text, str):  # click itself has printed --help
            print_text(text)
        return contract.EXIT_OK
    sources.hint = describe_separate_value(words) or hint
    return int(command.main(words, prog_name="msrun", standalone_mode=False, obj=sources) or 0)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with the job's status."""
    output.open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    sources = Sources()
    try:
        words, without_effect = translate(words, os.environ, _count_devices)
        hint = f"{', '.join(without_effect)}: taken, and without effect here" if without_effect else ""
        status = _start(words, sources, hint)
    except MsrunError as error:
        if _wants_tracebacks(words, sources):
            raise
        _print_error(sources.explain(str(error)) if isinstance(error, UsageError) else str(error))
        status = error.exit_code
    except click.ClickException as error:
        _print_error(_usage_text(error))
        status = contract.EXIT_USAGE
    except OSError as error:
        text, status = _os_error_text(error)
        if not text:
            raise
        _print_error(text)
    except (click.Abort, KeyboardInterrupt):
        status = contract.EXIT_SIGNAL_BASE + 2
    output.flush()
    sys.exit(status)
