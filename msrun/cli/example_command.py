"""`msrun examples`: the example programs. A command only as the first word: a script of that name is `./examples`."""

from __future__ import annotations

from pathlib import Path

import click

ALL, DIRECTORY = "all", "msrun_examples"


@click.group("examples", invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def examples_command(context: click.Context) -> str:
    """List or copy the example programs that are installed with msrun.

    `examples` is this command only as the first word; start a program of that name as `msrun ./examples`.
    """
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
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path), default=DIRECTORY)
def copy_command(name: str, directory: Path) -> str:
    """Copy example NAME, or all of them, to DIR/NAME.

    NAME is all unless given, DIR is msrun_examples.
    """
    from msrun.launch.example_programs import copy_examples, how_to_run

    folders = copy_examples(None if name == ALL else name, directory)
    return "\n".join([f"copied {folder}" for folder in folders] + [how_to_run(folders[0])])
