"""`ranktable convert`: a table in another dialect, or as the files and commands of another launcher."""

from __future__ import annotations

import shlex

import click
from click.core import ParameterSource

from ranktable.commands import Outcome, deliver_table, target_option
from ranktable.edit.convert import (
    BOARD_IDS,
    CHIP_INFOS,
    Converted,
    ConvertWishes,
    SuperPodWishes,
    convert_table,
    dialect_names,
    refused_names,
)
from ranktable.errors import EXIT_PROBLEMS
from ranktable.export import ADDRESSES, Address, Export, export_names, export_table
from ranktable.text import count_noun

_TEMPLATE2 = ("template2-cloud", "template2-lab")
_BELONGS_TO = {
    "super_pods": ("1.2",),
    "super_device_ids": ("1.2",),
    "group_name": _TEMPLATE2,
    "board_id": ("template2-lab",),
    "chip_info": ("template2-lab",),
    "address": export_names(),
    "master_port": ("torchrun", "env", "env-rank", "accelerate", "ansible"),
    "script": ("torchrun",),
    "device_target": (*dialect_names(), "torchrun", "env", "accelerate"),
}
"""The formats that each option means something to; all others mean something to every format."""


@click.command(short_help="Write a table in another form.")
@click.argument("file", metavar="FILE")
@click.option(
    "--to",
    required=True,
    type=click.Choice((*dialect_names(), *export_names(), *refused_names())),
    metavar="FORMAT",
    help=f"What to convert to. Rank tables: {', '.join(dialect_names())}. For others: {', '.join(export_names())}.",
)
@click.option(
    "-o", "--output", metavar="OUT", default="-", help="File, or folder for several files.  [default: print them]"
)
@click.option("--strict", is_flag=True, help="Write nothing and exit with 1 when the format cannot hold everything.")
@click.option("--renumber", is_flag=True, help="Number the ranks anew where the format counts them itself.")
@click.option(
    "--super_pods", multiple=True, metavar="ID=SERVERS", help="For 1.2: the servers of a super pod: 0=node[1-4]."
)
@click.option("--super_device_ids", metavar="FILE", help="YAML of lists, for 1.2: the SDIDs of each server's devices.")
@click.option("--group_name", metavar="NAME", help="Name of the group, for template 2.  [default: hccl_world_group]")
@click.option("--board_id", type=click.Choice(BOARD_IDS), help="For template2-lab.")
@click.option("--chip_info", type=click.Choice(CHIP_INFOS), help="For template2-lab.")
@click.option(
    "--address", type=click.Choice(ADDRESSES), default="server_id", show_default=True, help="What names the hosts."
)
@click.option("--master_port", type=click.IntRange(1, 65535), default=29500, show_default=True)
@click.option(
    "--script", default="train.py", show_default=True, help='The script and its arguments: "train.py --lr 1".'
)
@target_option("Decides which variable says the devices, and what a new table is checked for.")
@click.pass_context
def convert(
    context: click.Context,
    file: str,
    to: str,
    output: str,
    strict: bool,
    renumber: bool,
    super_pods: tuple[str, ...],
    super_device_ids: str | None,
    group_name: str | None,
    board_id: str | None,
    chip_info: str | None,
    address: Address,
    master_port: int,
    script: str,
    device_target: str,
) -> Outcome:
    """Write the rank table FILE in another form; - is standard input.

    Says on standard error what the form cannot hold and what had to be made up for it.
    """
    from ranktable.codec import read_table
    from ranktable.sources.option_values import parse_super_pods, read_super_device_ids

    _refuse_strange_options(context, to)
    table = read_table(file)
    result: Converted | Export
    if to in export_names():
        command = _split_words(script)
        result = export_table(
            table,
            to,
            address=address,
            master_port=master_port,
            command=command,
            device_target=device_target,
            renumber=renumber,
        )
    else:
        numbers = read_super_device_ids(super_device_ids) if super_device_ids is not None else {}
        pods = SuperPodWishes(list(parse_super_pods(super_pods).items()), numbers)
        result = convert_table(table, to, ConvertWishes(renumber, pods, group_name, board_id, chip_info))
    notes = (*_notes_on(result, to), *_check(result, device_target))
    if strict and result.lost:
        return Outcome(notes=(*notes, "nothing is written, because of --strict"), exit_code=EXIT_PROBLEMS)
    if isinstance(result, Converted):
        return deliver_table(result.table, notes, output)
    return _write(result, output, notes)


def _refuse_strange_options(context: click.Context, to: str) -> None:
    """Refuse options that would change nothing."""
    for name, formats in _BELONGS_TO.items():
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and to not in formats and to not in refused_names():
            raise click.UsageError(f"--{name} means nothing to {to}, only to {', '.join(formats)}; leave it out")


def _split_words(script: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(script))
    except ValueError as error:
        raise click.UsageError(f"--script {script!r} cannot be split into words: {str(error).lower()}") from error
    if not words:
        raise click.UsageError("--script is empty; write the script and its arguments")
    return words


def _notes_on(result: Converted | Export, to: str) -> tuple[str, ...]:
    order = "in the string order of server_id, then device_id" if to in dialect_names() else "host by host"
    renumbered = (f"the ranks are numbered anew, {order}",) if result.is_renumbered else ()
    lost = (f"left out: {what}" for what in result.lost)
    return (*lost, *(f"made up: {what}" for what in result.invented), *renumbered)


def _check(result: Converted | Export, device_target: str) -> tuple[str, ...]:
    """Say when the new table breaks rules: the old one did so too, or the new dialect asks for more."""
    if isinstance(result, Export):
        return ()
    from ranktable.validate import validate_table

    errors = [problem for problem in validate_table(result.table, device_target=device_target) if problem.is_error]
    if not errors:
        return ()
    rules = ", ".join(dict.fromkeys(problem.rule for problem in errors))
    found = f"{count_noun(len(errors), 'error')} ({rules}), first {errors[0].subject}: {errors[0].message}"
    return (f"the new table has {found}; ranktable validate lists them",)


def _write(export: Export, output: str, notes: tuple[str, ...]) -> Outcome:
    from ranktable.files import write_bytes, write_folder

    if output == "-":
        return Outcome(export.text, notes)
    if export.is_folder:
        write_folder(output, ((name, text.encode("utf-8")) for name, text in export.files.items()))
        return Outcome(notes=(f"wrote {output}: {count_noun(len(export.files), 'file')}", *notes))
    write_bytes(output, export.text.encode("utf-8"))
    return Outcome(notes=(f"wrote {output}", *notes))
