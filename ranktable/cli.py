"""The `ranktable` command. The only place of the package that prints and exits.

Exit status: 0 valid (warnings allowed), 1 problems, 2 wrong usage or unreadable, 3 not ready.
Every option --a_b is also accepted as --a-b.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

import click

from ranktable.commands import Outcome
from ranktable.commands.generate import generate
from ranktable.commands.tables import convert, merge, rules, show
from ranktable.commands.validate import validate
from ranktable.errors import EXIT_VALID, RankTableError

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("-", "_"),
    "max_content_width": 110,
}
_EXIT_INTERRUPTED = 130
_COMMANDS = (generate, validate, show, convert, merge, rules)


def _print_version(context: click.Context, _option: click.Parameter, is_asked: bool) -> None:
    """All packages of the distribution msrun have one version, that of its metadata."""
    if is_asked and not context.resilient_parsing:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"ranktable, version {version('msrun')}")
        except PackageNotFoundError:
            click.echo("ranktable, version unknown: msrun is not installed, only on Python's path")
        context.exit()


@click.group(no_args_is_help=False, context_settings=_SETTINGS)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """Generate, validate, show, convert and merge rank tables for parallel training."""


for _command in _COMMANDS:
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (the process's own by default), print, and return the exit status."""
    try:
        words = None if arguments is None else list(arguments)
        result = cli.main(args=words, prog_name="ranktable", standalone_mode=False)
        return _print(result) if isinstance(result, Outcome) else int(result or 0)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        _print_note(f"error: {error.format_message()}{hint}")
        return error.exit_code
    except RankTableError as error:
        _print_note(f"error: {error}")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; keep the interpreter from flushing into the closed pipe once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_VALID


def _print(outcome: Outcome) -> int:
    sys.stdout.write(_fit(outcome.output, sys.stdout))
    sys.stdout.flush()
    for note in outcome.notes:
        _print_note(note)
    return outcome.exit_code


def _print_note(text: str) -> None:
    """Print one line, whatever stands in names that the user gave."""
    line = " ".join(text.split())
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
    print(_fit(f"ranktable: {shown}", sys.stderr), file=sys.stderr)


def _fit(text: str, stream: TextIO) -> str:
    """Return the text with escapes for what the stream cannot encode."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
