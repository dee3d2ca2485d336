"""`ranktable convert`: a table in another dialect, or as the files and commands of another launcher."""

from __future__ import annotations

import shlex

import click
from click.core import ParameterSource

from ranktable.commands.outcome import Outcome
from ranktable.errors import EXIT_PROBLEMS
from ranktable.export.exporter import Export, export_names, export_table
from ranktable.export.nodes import ADDRESSES, Address
from ranktable.profile import DEVICE_TARGETS
from ranktable.report.words import count_noun

_BELONGS_TO = {
    "address": export_names(),
    "master_port": ("torchrun", "env", "env-rank", "accelerate", "ansible"),
    "script": ("torchrun",),
    "device_target": ("torchrun", "env", "accelerate"),
}
"""The formats that each option means something to; all others mean something to every format."""


@click.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--to",
    required=True,
    type=click.Choice(export_names()),
    metavar="FORMAT",
    help=f"What to convert to: {', '.join(export_names())}.",
)
@click.option(
    "-o", "--output", metavar="OUT", default="-", help="File, or folder for several files.  [default: print them]"
)
@click.option("--strict", is_flag=True, help="Write nothing and exit with 1 when the format cannot hold everything.")
@click.option("--renumber", is_flag=True, help="Number the ranks anew where the format counts them itself.")
@click.option(
    "--address", type=click.Choice(ADDRESSES), default="server_id", show_default=True, help="What names the hosts."
)
@click.option("--master_port", type=click.IntRange(1, 65535), default=29500, show_default=True)
@click.option(
    "--script", default="train.py", show_default=True, help='The script and its arguments: "train.py --lr 1".'
)
@click.option(
    "--device_target",
    type=click.Choice(DEVICE_TARGETS, case_sensitive=False),
    default="ascend",
    show_default=True,
    help="Decides which variable says the devices.",
)
@click.pass_context
def convert(
    context: click.Context,
    file: str,
    to: str,
    output: str,
    strict: bool,
    renumber: bool,
    address: Address,
    master_port: int,
    script: str,
    device_target: str,
) -> Outcome:
    """Write the rank table FILE in another form; - is standard input. Says on stderr what the form cannot hold."""
    from ranktable.reading.read import read_table

    _refuse_strange_options(context, to)
    export = export_table(
        read_table(file),
        to,
        address=address,
        master_port=master_port,
        command=_split_words(script),
        device_target=device_target,
        renumber=renumber,
    )
    notes = _notes_on(export)
    if strict and export.lost:
        return Outcome(notes=(*notes, "nothing is written, because of --strict"), exit_code=EXIT_PROBLEMS)
    return _write(export, output, notes)


def _refuse_strange_options(context: click.Context, to: str) -> None:
    """Refuse options that would change nothing."""
    for name, formats in _BELONGS_TO.items():
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and to not in formats:
            raise click.UsageError(f"--{name} means nothing to {to}, only to {', '.join(formats)}; leave it out")


def _split_words(script: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(script))
    except ValueError as error:
        raise click.UsageError(f"--script {script!r} cannot be split into words: {str(error).lower()}") from error
    if not words:
        raise click.UsageError("--script is empty; write the script and its arguments")
    return words


def _notes_on(export: Export) -> tuple[str, ...]:
    renumbered = ("the ranks are numbered anew, host by host",) if export.is_renumbered else ()
    return (*(f"left out: {what}" for what in export.lost), *renumbered)


def _write(export: Export, output: str, notes: tuple[str, ...]) -> Outcome:
    from ranktable.write import write_bytes
    from ranktable.write_folder import write_folder

    if output == "-":
        return Outcome(export.text, notes)
    if export.is_folder:
        write_folder(output, export.files)
        return Outcome(notes=(f"wrote {output}: {count_noun(len(export.files), 'file')}", *notes))
    write_bytes(output, export.text.encode("utf-8"))
    return Outcome(notes=(f"wrote {output}", *notes))
