"""What starts no job: the commands that look after one, `trace`, `examples`, `estimate`."""

from __future__ import annotations

import inspect
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from msrun import contract
from msrun.cli.options import PATH, ClickOption
from msrun.errors import UsageError
from msrun.launch import output
from msrun.launch.output import printable
from msrun.planning.program import parse_program
from msrun.planning.settings import make_option


def print_text(text: str) -> None:
    """Print a plan or a status, bytes that are no text as they came (UsageError, but for a reader that has gone)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        click.echo(printable(text, keep_colours=sys.stdout.isatty()))
    except OSError as error:
        output.discard_output(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise UsageError(f"stdout: cannot write ({error.strerror}); give it another place") from None


_HELP = {"help_option_names": ["-h", "--help"]}
_JOB = click.Argument(["log_dir"], metavar="[LOG_DIR]", default="log_output", type=PATH)
_COUNT = click.IntRange(min=0)
_JSON = click.Option(["--json"], is_flag=True, help="As JSON.")


@click.command("trace", context_settings=_HELP)
@click.argument("log_dir", metavar="LOG_DIR", type=PATH)
@click.option("-o", "--output", metavar="FILE", type=PATH, help="[default: LOG_DIR/trace.json]")
def trace_command(log_dir: Path, output: Path | None) -> str:
    """Write what happened in the job of LOG_DIR as a trace for Perfetto or chrome://tracing.

    Processes of all ranks, and the steps and the waits in collectives of a job that was started with --trace."""
    from msrun.launch.trace import write_trace

    return write_trace(log_dir, output)


ALL, DIRECTORY = "all", "msrun_examples"


@click.group("examples", invoke_without_command=True, context_settings=_HELP)
@click.pass_context
def examples_command(context: click.Context) -> str:
    """List or copy the example programs that are installed with msrun."""
    return "" if context.invoked_subcommand else context.get_help()


@examples_command.command("list")
def list_command() -> str:
    """List the examples."""
    from msrun.launch.example_programs import list_examples

    found = list_examples()
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {summary}" for name, summary in found.items())


@examples_command.command("copy")
@click.argument("name", metavar="[NAME]", default=ALL)
@click.argument("directory", metavar="[DIR]", type=PATH, default=DIRECTORY)
def copy_command(name: str, directory: Path) -> str:
    """Copy example NAME, or all of them, to DIR/NAME.

    NAME is all unless given, DIR is msrun_examples."""
    from msrun.launch.example_programs import copy_examples, how_to_run

    folders = copy_examples(None if name == ALL else name, directory)
    return "\n".join([f"copied {folder}" for folder in folders] + [how_to_run(folders[0])])


_ESTIMATED = [
    make_option("device", "PROFILE  Device profile, or a JSON file of one.", default="cpu"),
    make_option("worker_num", "N  Ranks of the job.", kind="whole number", default=8),
    make_option("hosts", "N  Hosts that they fill.  [default: 8 ranks on each]", kind="whole number"),
    make_option("log_dir", "DIR  Directory of the report.", kind="path", default="log_output"),
]


@click.command(
    "estimate",
    context_settings=_HELP,
    params=[
        click.Argument(["words"], metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED),
        *map(ClickOption, _ESTIMATED),
    ],
)
def estimate_command(words: tuple[str, ...], device: str, worker_num: int, hosts: int | None, log_dir: Path) -> int:
    """Tell whether the training step of SCRIPT fits into the memory of a device, how long it takes, and what to change.

    Runs the script up to its first training step in one process, without devices. Every change that it names has been
    computed. Options of the script itself stand after --."""
    from msrun.launch.simulation import Simulation, run_simulation

    if hosts is not None and (hosts < 1 or worker_num % hosts):
        raise UsageError(f"--hosts {hosts}: must divide --worker_num {worker_num}; give another number")
    here = Path.cwd()
    simulation = Simulation(
        program=parse_program(words, is_module=False, working_directory=here),
        level=2,
        worker_num=worker_num,
        local_worker_num=worker_num // hosts if hosts else min(8, worker_num),
        global_rank=0,
        device=device,
        working_directory=here,
        log_dir=log_dir.absolute(),
        tries_changes=True,
    )
    return run_simulation(simulation, dict(os.environ), quiet=False)


def _command(name: str, *params: click.Parameter) -> Callable[[Callable[..., Any]], click.Command]:
    return click.command(name, context_settings=_HELP, params=[*params])


@_command(
    "logs",
    _JOB,
    click.Option(["-f", "--follow"], is_flag=True, help="Go on with what is written, until the job has ended."),
    click.Option(["--ranks"], metavar="RANKS", default="0", show_default=True, help="0,2-3 or all."),
    click.Option(["-n", "--lines"], metavar="N", type=_COUNT, default=20, show_default=True, help="Lines of each log."),
)
def logs_command(log_dir: Path, *, follow: bool, ranks: str, lines: int) -> int:
    """Print the last lines of the workers' logs in LOG_DIR, which is log_output unless given."""
    from msrun.launch.status import show_logs

    try:
        return show_logs(log_dir, ranks, lines=lines, follows=follow)
    except BrokenPipeError:  # | head
        output.discard_output(sys.stdout)
        return contract.EXIT_OK
    except KeyboardInterrupt:
        return contract.EXIT_SIGNAL_BASE + signal.SIGINT


@_command("list", _JOB, _JSON)
def jobs_command(log_dir: Path, *, json: bool) -> str:
    """List the jobs of LOG_DIR, the oldest first. LOG_DIR is log_output unless given."""
    from msrun.launch.directory.log_directory import list_jobs
    from msrun.launch.status import read_status, render_jobs, render_json

    jobs = list_jobs(log_dir.absolute())
    if not jobs:
        raise UsageError(f"msrun list {log_dir}: no job has used it; give the --log_dir of jobs")
    found = [read_status(job, "msrun list") for job in jobs]
    return "\n".join(map(render_json, found)) if json else render_jobs(found)


@_command("drain", click.Argument(["host"], metavar="HOST"), _JOB)
def drain_command(host: str, log_dir: Path) -> int:
    """Take HOST out of the job of LOG_DIR, as TERM to its agent does.

    Its workers get TERM and --grace. The job starts again without it where --max_restarts and --spares, --min_hosts or
    --nnodes allow, else it ends. LOG_DIR is log_output unless given."""
    from msrun.launch.status import drain_host

    print_text(drain_host(log_dir, host))
    return contract.EXIT_OK


def look_after(options: dict[str, Any]) -> int:
    """--status and --stop: show or end the job of a log directory."""
    for name in ("watch", "json"):
        if options[name] and options["status"] is None:
            raise UsageError(f"--{name}: shows a job that was started before; give its --status LOG_DIR, too")
    if options["words"] or (options["status"] is not None and options["stop"] is not None):
        raise UsageError("--status LOG_DIR, --stop LOG_DIR and SCRIPT: give one of the three")
    for name in ("status", "stop"):
        if options[name] is not None and options[name].name.startswith("--"):  # the next option
            raise UsageError(f"--{name} {options[name].name}: give the --log_dir of a job after --{name}")
    if options["stop"] is not None:
        return stop(options["stop"], quiet=options["quiet"])
    if options["watch"] is not None:
        return watch_job(options["status"], options["watch"], json=options["json"])
    return show_status(options["status"], json=options["json"])


def stop(log_dir: Path, *, quiet: bool = False) -> int:
    """End the job of LOG_DIR and wait for its end; as --stop. LOG_DIR is log_output unless given."""
    from msrun.launch.status import stop_job

    print_text(stop_job(log_dir, (lambda _: None) if quiet else output.say_lines))
    return contract.EXIT_OK


def show_status(log_dir: Path, *, json: bool) -> int:
    """Show the job of LOG_DIR, running or ended; as --status. LOG_DIR is log_output unless given."""
    from msrun.launch.status import read_status, render_json, render_status

    status = read_status(log_dir)
    print_text(render_json(status) if json else render_status(status, has_colours=sys.stdout.isatty()))
    return status.status_code


def watch_job(log_dir: Path, every: float | str, *, json: bool) -> int:
    """Show the job of LOG_DIR until it has ended; as --status LOG_DIR --watch. LOG_DIR is log_output unless given."""
    from msrun.launch.status import watch_status

    try:
        return watch_status(log_dir, None if isinstance(every, str) else every, as_json=json)
    except BrokenPipeError:  # `msrun --status DIR --watch | head` has enough
        output.discard_output(sys.stdout)
        return contract.EXIT_OK


def end_warm_servers(options: dict[str, Any]) -> int:
    """--warm=stop: end the processes that jobs with --warm have left."""
    from msrun.agent.warm import stop_warm_servers

    if options["words"]:
        raise UsageError("--warm=stop: ends what earlier jobs have left; leave SCRIPT out")
    count = stop_warm_servers(os.environ)
    if not options["quiet"]:
        print_text(f"stopped {count} warm server{'' if count == 1 else 's'}")
    return contract.EXIT_OK


_EVERY = ClickOption(make_option("every", "S  Seconds between two looks.", kind="interval", default="auto"))
_JSON_LINES = click.Option(["--json"], is_flag=True, help="As lines of JSON.")
FIRST_WORDS: dict[str | None, click.Command] = {  # the commands by the first word that calls them, one of `COMMANDS`
    command.name: command
    for command in (
        *(examples_command, trace_command, estimate_command, logs_command, drain_command, jobs_command),
        _command("status", _JOB, _JSON)(show_status),
        _command("watch", _JOB, _EVERY, _JSON_LINES)(watch_job),
        _command("stop", _JOB)(stop),
    )
}
for _word, _command in FIRST_WORDS.items():
    _said = f"`{_word}` is this command only as the first word; start a program of that name as `msrun ./{_word}`."
    _command.help = f"{inspect.cleandoc(_command.help or '')}\n\n{_said}"
