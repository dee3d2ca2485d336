"""The command launch-template. Its commands are the only place of the package that prints and exits.

Exit status: 0 done; 1 the lint found an error; 2 wrong input.
"""

import sys
from collections.abc import Sequence

import click

from launch_templates.errors import BadFile, LaunchTemplateError
from ranktable.files import write_whole

Words = tuple[str, ...]


def _print_version(context: click.Context, _option: click.Parameter, is_asked: bool) -> None:
    """All packages of the distribution msrun have one version, that of its metadata."""
    if is_asked and not context.resilient_parsing:
        from launch_templates import own_version

        found = own_version()
        why = ": msrun is not installed, only on Python's path" if found == "unknown" else ""
        click.echo(f"launch-template, version {found}{why}")
        context.exit()


def _print(text: str) -> None:
    """Write to stdout, in bytes, because manifests are UTF-8 whatever the locale says."""
    try:
        click.echo(text.encode(), nl=False)
    except BrokenPipeError:
        # the reader has gone, as `head` does: nothing to report, but stdout must not be flushed again at exit
        sys.stdout = None
        sys.exit(0)


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """Render and check jobs that start msrun: Kubernetes manifests, batch scripts, compose files."""


@cli.command("list")
def list_command() -> None:
    """List the kinds."""
    from launch_templates.kinds import list_kinds, load_kind

    names = list_kinds()
    width = max(map(len, names))
    _print("".join(f"{name:<{width}}  {load_kind(name).summary}\n" for name in names))


@cli.command(short_help="Explain a kind: ranks, restarts, settings.")
@click.argument("kind")
def explain(kind: str) -> None:
    """Explain how KIND gives ranks and restarts, and list its settings with type, default and constraint."""
    from launch_templates.kinds import load_kind

    found = load_kind(kind)
    _print(f"{found.comment}\n\n{'setting':<16}  {'type':<8}  {'default':<12}  meaning [constraint]\n")
    for one in found.settings:
        default = "(required)" if one.is_required else "-" if one.default in (None, {}, [], ()) else str(one.default)
        default = default.lower() if isinstance(one.default, bool) else default
        _print(f"{one.name:<16}  {one.value_type.type_name:<8}  {default:<12}  {one.meaning}\n")
        _print(f"{'':<42}[{one.value_type.constraint}]\n")


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
    settings: Words,
    values: Words,
    plan: str | None,
    patch: Words,
    ignore: Words,
    output: str | None,
    script: Words,
) -> int:
    """Render a job for KIND; msrun starts SCRIPT with its ARGS, given after --.

    \b
    launch-template render jobset --set name=train --set image=registry.example/train:1 -- train.py --lr 0.1
    """
    from launch_templates.kinds import load_kind
    from launch_templates.lint import check_rule_names, has_errors, lint_texts
    from launch_templates.lint.documents import read_documents
    from launch_templates.render import render_manifest
    from launch_templates.settings import merge_settings, parse_settings, read_plan, read_text, read_values_file

    given = {} if plan is None else read_plan(read_text(plan), plan)
    for path in values:
        given = merge_settings(given, read_values_file(path))
    given = merge_settings(given, parse_settings(settings))
    patches = [document for path in patch for document in read_documents(read_text(path), path)]
    text = render_manifest(kind, given, script, patches)
    check_rule_names(ignore)
    known = ignore if patches else (*ignore, "no-schemas")  # tests have held what is rendered against the schemas
    findings = lint_texts([(output or "-", text)], known) if load_kind(kind).is_manifest else []
    if output is None:
        _print(text)
    else:
        try:
            write_whole(output, text.encode())
        except OSError as error:
            raise BadFile(output, f"cannot be written: {error.strerror}", "choose another -o FILE") from None
    for finding in findings:
        click.echo(f"launch-template: {finding}", err=True)
    return int(has_errors(findings))


@cli.command(short_help="Check manifests, rendered or written by hand.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--ignore", metavar="RULE", multiple=True, help="Leave out a rule; may be repeated.")
@click.option("--crd", metavar="FILE", multiple=True, help="Definitions of your cluster, over the package's own.")
def lint(files: tuple[str, ...], ignore: tuple[str, ...], crd: tuple[str, ...]) -> int:
    """Check manifests that belong together, rendered or written by hand; - is stdin.

    Every finding is one line: file, object, path, severity, rule, what is wrong, what to do.
    """
    from launch_templates.lint import has_errors, lint_texts
    from launch_templates.settings import read_text

    texts, definitions = ([(path, read_text(path)) for path in paths] for paths in (files, crd))
    findings = lint_texts(texts, ignore, definitions)
    _print("".join(f"{finding}\n" for finding in findings))
    if findings:
        num_errors = sum(finding.severity == "error" for finding in findings)
        click.echo(f"launch-template: {num_errors} errors, {len(findings) - num_errors} warnings", err=True)
    return int(has_errors(findings))


@cli.command(short_help="List the schemas that the lint checks objects against.")
def schemas() -> None:
    """List the kinds of objects whose keys and types the lint checks, and where each schema is from."""
    from launch_templates.lint.schemas import load_table

    _print("".join(f"{kind:<52}  {source}\n" for kind, source in load_table()["sources"].items()))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and exit; see the module for the exit status."""
    try:
        sys.exit(cli.main(args=argv, prog_name="launch-template", standalone_mode=False) or 0)
    except LaunchTemplateError as error:
        _fail(str(error))
    except click.ClickException as error:
        hint = "; options of the script go after --" if isinstance(error, click.NoSuchOption) else ""
        _fail(f"{error.format_message().rstrip('.')}{hint}; see launch-template --help")
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)


def _fail(text: str) -> None:
    click.echo(f"launch-template: error: {' '.join(text.splitlines())}", err=True)
    sys.exit(LaunchTemplateError.exit_code)
