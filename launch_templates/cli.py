"""The command launch-template. `main` is the only place of the package that prints and exits.

Exit status: 0 done; 1 the lint found an error; 2 wrong input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from launch_templates.errors import BadFile, LaunchTemplateError

_WRONG_INPUT = 2


@dataclass(frozen=True)
class Outcome:
    """What a command has to say."""

    text: str = ""
    """For stdout, or for `output` when given."""
    notes: str = ""
    """For stderr."""
    exit_code: int = 0
    output: str | None = None


def _print_version(context: click.Context, _option: click.Parameter, is_asked: bool) -> None:
    """All packages of the distribution msrun have one version, that of its metadata."""
    if is_asked and not context.resilient_parsing:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"launch-template, version {version('msrun')}")
        except PackageNotFoundError:
            click.echo("launch-template, version unknown: msrun is not installed, only on Python's path")
        context.exit()


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """Render and check Kubernetes manifests that start msrun in pods."""


@cli.command("list")
def list_command() -> Outcome:
    """List the templates."""
    from launch_templates.template import list_templates, load_template

    names = list_templates()
    width = max(map(len, names))
    return Outcome("".join(f"{name:<{width}}  {load_template(name).summary}\n" for name in names))


@cli.command()
@click.argument("name")
def show(name: str) -> Outcome:
    """Show what template NAME is, and its placeholders with type, default and constraint."""
    from launch_templates.placeholder import Placeholder
    from launch_templates.template import load_template

    def row(placeholder: Placeholder) -> str:
        default = "-" if placeholder.default in (None, {}) else _word(placeholder.default)
        kind = placeholder.value_type
        head = f"{placeholder.name:<16}  {kind.type_name:<8}  {default:<16}"
        return f"{head}  {placeholder.meaning}\n{'':<46}[{kind.constraint}]\n"

    template = load_template(name)
    head = f"{'placeholder':<16}  {'type':<8}  {'default':<16}  meaning [constraint]\n"
    return Outcome(f"{template.comment}\n\n{head}{''.join(map(row, template.placeholders))}")


@cli.command()
@click.argument("name")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Set a placeholder; may be repeated.")
@click.option("--values", metavar="FILE", multiple=True, help="YAML mapping of placeholders; --set goes over it.")
@click.option("-o", "--output", metavar="FILE", help="Write there instead of to stdout.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
def render(
    name: str, settings: tuple[str, ...], values: tuple[str, ...], output: str | None, script: tuple[str, ...]
) -> Outcome:
    """Render template NAME; msrun starts SCRIPT with its ARGS, given after --.

    \b
    launch-template render jobset --set name=train --set image=registry.example/train:1 -- train.py --lr 0.1
    """
    from launch_templates import settings as reading
    from launch_templates.lint.linter import has_errors, lint_texts
    from launch_templates.render import render_manifest

    given: dict[str, Any] = {}
    for path in values:
        given = reading.merge_settings(given, reading.read_values_file(path))
    given = reading.merge_settings(given, reading.parse_settings(settings))
    text = render_manifest(name, given, script)
    findings = lint_texts([(output or "-", text)])
    notes = "".join(f"launch-template: {finding}\n" for finding in findings)
    return Outcome(text, notes, int(has_errors(findings)), output=output)


@cli.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
def lint(files: tuple[str, ...]) -> Outcome:
    """Check manifests that belong together, rendered or written by hand; - is stdin.

    Every finding is one line: file, object, path, severity, rule, what is wrong, what to do.
    """
    from launch_templates.lint.linter import has_errors, lint_texts
    from launch_templates.settings import read_text

    findings = lint_texts([(path, _read_stdin() if path == "-" else read_text(path)) for path in files])
    lines = "".join(f"{finding}\n" for finding in findings)
    num_errors = sum(finding.severity == "error" for finding in findings)
    notes = f"launch-template: {num_errors} errors, {len(findings) - num_errors} warnings\n" if findings else ""
    return Outcome(lines, notes, int(has_errors(findings)))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and exit; see the module for the exit status.

    Raises:
        SystemExit: always.
    """
    try:
        outcome = cli.main(args=argv, prog_name="launch-template", standalone_mode=False)
        # click itself has printed --help and gives an integer then
        sys.exit(_deliver(outcome) if isinstance(outcome, Outcome) else int(outcome or 0))
    except LaunchTemplateError as error:
        _fail(str(error))
    except click.ClickException as error:
        _fail(f"{_click_text(error)}; see launch-template --help")
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # the reader has gone, as `head` does: nothing to report, but stdout must not be flushed again at exit
        sys.stdout = None
        sys.exit(0)


def _deliver(outcome: Outcome) -> int:
    if outcome.output is None:
        # bytes, because manifests are UTF-8 whatever the locale says
        sys.stdout.buffer.write(outcome.text.encode())
        sys.stdout.flush()
    else:
        _write_file(outcome.output, outcome.text)
    click.echo(outcome.notes, err=True, nl=False)
    return outcome.exit_code


def _write_file(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123 - also for /dev/stdout and its like
            file.write(text)
    except OSError as error:
        raise BadFile(path, f"cannot be written: {error.strerror}", "choose another -o FILE") from None


def _fail(text: str) -> None:
    click.echo(f"launch-template: error: {' '.join(text.splitlines())}", err=True)
    sys.exit(_WRONG_INPUT)


def _click_text(error: click.ClickException) -> str:
    hint = "; options of the script go after --" if isinstance(error, click.NoSuchOption) else ""
    return f"{error.format_message().rstrip('.')}{hint}"


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise BadFile("-", "cannot be read: not UTF-8 text", "give UTF-8") from None


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
