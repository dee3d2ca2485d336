"""The `msrun` command: options -> LaunchSpec -> plan -> run. The only place that prints errors and exits."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from msrun import __version__, contract
from msrun.errors import MsrunError, near_miss
from msrun.options import OPTIONS, build_spec, normalise, own_options
from msrun.planning.spec import LaunchSpec, check_spec

EPILOG = """\b
Examples:
  msrun --worker_num 8 train.py --lr 0.1
  msrun --worker_num 2 -m package.train
  msrun --worker_num 8 --log_dir log_output pytest -s train.py
  msrun --worker_num 4 --dry_run=json train.py
"""


@click.command(
    params=list(OPTIONS),
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
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def command(**options: Any) -> int:
    """Start a parallel job: one scheduler and one worker per device, logs in LOG_DIR/worker_<rank>.log.

    SCRIPT is a Python file, -m MODULE, `python x.py`, `pytest x.py` or any executable. Everything after SCRIPT is its
    own.
    """
    caller = dict(os.environ)
    spec = build_spec(options, caller)
    check_spec(spec)
    from msrun.launch.preflight import check_host

    check_host(spec)
    from msrun.launch.job import plan_dry_run

    if options["dry_run"]:
        from msrun.planning.plan import render_plan

        _print_plan(render_plan(plan_dry_run(spec, caller), as_json=options["dry_run"] == "json"))
        return contract.EXIT_OK
    if not options["join"]:
        from msrun.launch.detach import detach
        from msrun.launch.preflight import check_port

        plan_dry_run(spec, caller)  # what is wrong is said while somebody reads it
        check_port(spec.master_port)
        detach(spec.log_dir)
    return _run(spec, caller, quiet=options["quiet"])


def _run(spec: LaunchSpec, caller: dict[str, str], *, quiet: bool) -> int:
    from msrun.launch.failure import render_failure
    from msrun.launch.job import run_job

    result = run_job(spec, caller, quiet=quiet)
    if result.failure:
        _print_error(str(result.failure.reason))
        report = render_failure(result.failure)
        if report:
            _print_lines(report)
    if result.survivors:
        _print_error(f"processes that could not be ended: {', '.join(map(str, result.survivors))}")
    return result.exit_code


def _print_plan(text: str) -> None:
    """Print a plan; bytes of the command line that are no text come out as they came in."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")
    click.echo(text)


def _print_error(text: str) -> None:
    """Print one line; a line break in a value that the text quotes is shown as \\n."""
    line = text.replace("\r", "\\r").replace("\n", "\\n")
    _print_lines(f"msrun: error: {line}")


def _print_lines(text: str) -> None:
    try:
        click.echo(text, err=True)
    except OSError:  # nobody reads any more; the exit status still tells
        from msrun.launch.console import discard_output

        discard_output(sys.stderr)


def _usage_text(error: click.ClickException) -> str:
    """Return click's message in our form: one line, with a hint for a misspelled option."""
    if isinstance(error, click.NoSuchOption):
        spellings = [spelling for parameter in command.params for spelling in parameter.opts]
        return f"{error.option_name}: no such option{near_miss(error.option_name, spellings)}; msrun --help lists them"
    if isinstance(error, click.BadParameter) and error.param is not None:
        return f"{error.param.opts[0]}: {error.message.rstrip('.')}"
    return error.format_message().rstrip(".") + "; see msrun --help"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with the job's status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = command.main(normalise(words), prog_name="msrun", standalone_mode=False)
    except MsrunError as error:
        if "--debug" in [words[index] for index in own_options(words)]:
            raise
        _print_error(str(error))
        status = error.exit_code
    except click.ClickException as error:
        _print_error(_usage_text(error))
        status = contract.EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        status = contract.EXIT_SIGNAL_BASE + 2
    sys.exit(status)
