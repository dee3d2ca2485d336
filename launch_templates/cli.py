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
from ranktable.files import write_whole

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
        from launch_templates import own_version

        found = own_version()
        why = ": msrun is not installed, only on Python's path" if found == "unknown" else ""
        click.echo(f"launch-template, version {found}{why}")
        context.exit()


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """Render and check jobs that start msrun: Kubernetes manifests, batch scripts, compose files."""


@cli.command("list")
def list_command() -> Outcome:
    """List the kinds."""
    from launch_templates.kinds import list_kinds, load_kind

    names = list_kinds()
    width = max(map(len, names))
    return Outcome("".join(f"{name:<{width}}  {load_kind(name).summary}\n" for name in names))


@cli.command(short_help="Explain a kind: ranks, restarts, settings.")
@click.argument("kind")
def explain(kind: str) -> Outcome:
    """Explain how KIND gives ranks and restarts, and list its settings with type, default and constraint."""
    from launch_templates.kinds import load_kind
    from launch_templates.spec import Setting

    def row(setting: Setting) -> str:
        default = "(required)" if setting.is_required else _word(setting.default)
        head = f"{setting.name:<16}  {setting.value_type.type_name:<8}  {default:<12}"
        return f"{head}  {setting.meaning}\n{'':<42}[{setting.value_type.constraint}]\n"

    found = load_kind(kind)
    head = f"{'setting':<16}  {'type':<8}  {'default':<12}  meaning [constraint]\n"
    return Outcome(f"{found.comment}\n\n{head}{''.join(map(row, found.settings))}")


@cli.command(short_help="Render a job for a kind.")
@click.argument("kind")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Set a field of the job; may be repeated.")
@click.option("--values", metavar="FILE", multiple=True, help="YAML mapping of fields; --set goes over it.")
@click.option("--from", "plan", metavar="FILE", help="Plan of msrun --dry_run=json; - is stdin. All others go over it.")
@click.option("--patch", metavar="FILE", multiple=True, help="YAML to merge in: null removes, lists merge by name.")
@click.option("--ignore", metavar="RULE", multiple=True, help="Leave out a rule of the lint; may be repeated.")
@click.option("-o", "--output", metavar="FILE", help="Write there instead of to stdout.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
def render(
    kind: str,
    settings: tuple[str, ...],
    values: tuple[str, ...],
    plan: str | None,
    patch: tuple[str, ...],
    ignore: tuple[str, ...],
    output: str | None,
    script: tuple[str, ...],
) -> Outcome:
    """Render a job for KIND; msrun starts SCRIPT with its ARGS, given after --.

    \b
    launch-template render jobset --set name=train --set image=registry.example/train:1 -- train.py --lr 0.1
    """
    from launch_templates import settings as reading
    from launch_templates.kinds import load_kind
    from launch_templates.lint import check_rule_names, has_errors, lint_texts
    from launch_templates.lint.documents import read_documents
    from launch_templates.render import render_manifest

    given: dict[str, Any] = {}
    if plan is not None:
        given = reading.read_plan(_read(plan), plan)
    for path in values:
        given = reading.merge_settings(given, reading.read_values_file(path))
    given = reading.merge_settings(given, reading.parse_settings(settings))
    patches = [document for path in patch for document in read_documents(_read(path), path)]
    text = render_manifest(kind, given, script, patches)
    check_rule_names(ignore)
    known = ignore if patches else (*ignore, "no-schemas")  # tests have held what is rendered against the schemas
    findings = lint_texts([(output or "-", text)], known) if load_kind(kind).is_manifest else []
    notes = "".join(f"launch-template: {finding}\n" for finding in findings)
    return Outcome(text, notes, int(has_errors(findings)), output=output)


@cli.command(short_help="Check manifests, rendered or written by hand.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--ignore", metavar="RULE", multiple=True, help="Leave out a rule; may be repeated.")
@click.option(
    "--crd", metavar="FILE", multiple=True, help="Definitions of your cluster, in place of the package's own."
)
def lint(files: tuple[str, ...], ignore: tuple[str, ...], crd: tuple[str, ...]) -> Outcome:
    """Check manifests that belong together, rendered or written by hand; - is stdin.

    Every finding is one line: file, object, path, severity, rule, what is wrong, what to do.
    """
    from launch_templates.lint import has_errors, lint_texts

    findings = lint_texts([(path, _read(path)) for path in files], ignore, [(path, _read(path)) for path in crd])
    num_errors = sum(finding.severity == "error" for finding in findings)
    notes = f"launch-template: {num_errors} errors, {len(findings) - num_errors} warnings\n" if findings else ""
    return Outcome("".join(f"{finding}\n" for finding in findings), notes, int(has_errors(findings)))


@cli.command(short_help="List the schemas that the lint checks objects against.")
def schemas() -> Outcome:
    """List the kinds of objects whose keys and types the lint checks, and where each schema is from."""
    from launch_templates.lint.schemas import load_table

    return Outcome("".join(f"{kind:<52}  {source}\n" for kind, source in load_table()["sources"].items()))


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
        write_whole(path, text.encode())
    except OSError as error:
        raise BadFile(path, f"cannot be written: {error.strerror}", "choose another -o FILE") from None


def _fail(text: str) -> None:
    click.echo(f"launch-template: error: {' '.join(text.splitlines())}", err=True)
    sys.exit(_WRONG_INPUT)


def _click_text(error: click.ClickException) -> str:
    hint = "; options of the script go after --" if isinstance(error, click.NoSuchOption) else ""
    return f"{error.format_message().rstrip('.')}{hint}"


def _read(path: str) -> str:
    """Content of a file; - is stdin."""
    from launch_templates.settings import read_text

    return read_text(path)


def _word(value: object) -> str:
    if value in (None, {}, [], ()):
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
