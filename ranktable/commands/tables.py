"""`ranktable merge`, `convert`, `show` and `rules`."""

from __future__ import annotations

import click
from click.core import ParameterSource

from ranktable.commands import FORMAT, Outcome, choice_option, deliver_table, target_option
from ranktable.convert import convert_table, write_hostfile
from ranktable.errors import EXIT_PROBLEMS, MergeError
from ranktable.kinds import read_names, written_names
from ranktable.merge import MERGE_ORDERS, MergeOrder
from ranktable.model import RankTable
from ranktable.profile import CHIPS, READERS, build_profile
from ranktable.rules import registered_rules
from ranktable.values import count_noun, render_json

_SHOWN = 20
_HOSTFILE = "hostfile"


@click.command(short_help="Write one table of all servers of several.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", metavar="FILE", help="Where to write; - or nothing is standard output.")
@click.option(
    "--order",
    type=click.Choice(MERGE_ORDERS),
    default="server_id",
    show_default=True,
    help="Order of servers and ranks; Ascend readers ask for server_id, the string order.",
)
@click.option("--allow_initializing", is_flag=True, help='Merge also tables whose status is not "completed".')
@target_option("For which devices to check the result.")
@choice_option("--chip", CHIPS, "Hold the result to the rules of this chip.")
def merge(
    files: tuple[str, ...],
    output: str | None,
    order: MergeOrder,
    allow_initializing: bool,
    device_target: str,
    chip: str | None,
) -> Outcome:
    """Write one table of all servers of the FILEs, ranks 0 to n-1; - is standard input.

    A server, an address or a number of a super pod that stands twice is an error, and nothing is written. Super pods
    of equal ids are joined.
    """
    from ranktable.document import read_document
    from ranktable.merge import merge_tables
    from ranktable.tables import decode_table

    build_profile(device_target, chip)  # refuses a chip of another target
    try:
        edited = merge_tables(
            [decode_table(read_document(name)) for name in files],
            names=files,
            order=order,
            allow_initializing=allow_initializing,
            device_target=device_target,
            chip=chip,
        )
    except MergeError as error:
        shown = [f"error: {conflict}" for conflict in error.conflicts[:_SHOWN]]
        more = [f"and {len(error.conflicts) - _SHOWN} more"] if len(error.conflicts) > _SHOWN else []
        return Outcome(notes=(*shown, *more, "nothing is written"), exit_code=error.exit_code)
    return deliver_table(edited.table, edited.notes, output)


@click.command(short_help="Write a table in another dialect, or as a host file.")
@click.argument("file", metavar="FILE")
@click.option(
    "--to",
    required=True,
    type=click.Choice((*written_names(), _HOSTFILE)),
    help="hostfile: lines `host slots=8`, which Open MPI, DeepSpeed, Horovod and msrun read.",
)
@click.option("-o", "--output", metavar="OUT", default="-", help="Where to write.  [default: standard output]")
@click.option("--strict", is_flag=True, help="Write nothing and exit with 1 when the format cannot hold everything.")
@click.option(
    "--super_pods", multiple=True, metavar="ID=SERVERS", help="For 1.2: the servers of a super pod: 0=node[1-4]."
)
@click.option("--super_device_ids", metavar="FILE", help="YAML of lists, for 1.2: the SDIDs of each server's devices.")
@target_option("What the new table is checked for.")
@click.pass_context
def convert(
    context: click.Context,
    file: str,
    to: str,
    output: str,
    strict: bool,
    super_pods: tuple[str, ...],
    super_device_ids: str | None,
    device_target: str,
) -> Outcome:
    """Write the rank table FILE in another dialect; - is standard input.

    Says on standard error what the format cannot hold.
    """
    from ranktable.commands.generate import read_super_device_ids
    from ranktable.files import write_bytes
    from ranktable.generate import parse_super_pods
    from ranktable.tables import read_table

    for name in ("super_pods", "super_device_ids"):
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and to != written_names()[-1]:
            raise click.UsageError(f"--{name} means nothing to {to}, only to {written_names()[-1]}; leave it out")
    table = read_table(file)
    if to == _HOSTFILE:
        text, lost = write_hostfile(table)
        notes = tuple(f"left out: {what}" for what in lost)
    else:
        numbers = read_super_device_ids(super_device_ids) if super_device_ids is not None else {}
        result = convert_table(table, to, super_pods=parse_super_pods(super_pods), super_device_ids=numbers)
        lost = result.notes
        notes = (*(f"left out: {what}" for what in lost), *_check(result.table, device_target))
    if strict and lost:
        return Outcome(notes=(*notes, "nothing is written, because of --strict"), exit_code=EXIT_PROBLEMS)
    if to != _HOSTFILE:
        return deliver_table(result.table, notes, output)
    if output == "-":
        return Outcome(text, notes)
    write_bytes(output, text.encode())
    return Outcome(notes=(f"wrote {output}", *notes))


def _check(table: RankTable, device_target: str) -> tuple[str, ...]:
    """Say when the new table breaks rules: the old one did so too, or the new dialect asks for more."""
    from ranktable.validate import validate_table

    errors = [problem for problem in validate_table(table, device_target=device_target) if problem.is_error]
    if not errors:
        return ()
    rules = ", ".join(dict.fromkeys(problem.rule for problem in errors))
    found = f"{count_noun(len(errors), 'error')} ({rules}), first {errors[0].subject}: {errors[0].message}"
    return (f"the new table has {found}; ranktable validate lists them",)


@click.command(short_help="Print what a file is, and its servers, ranks and devices.")
@click.argument("file", metavar="FILE")
@click.option("--ranks", is_flag=True, help="A line per rank.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Who is rank N: its server, device, addresses.")
@FORMAT
def show(file: str, ranks: bool, rank: int | None, form: str) -> Outcome:
    """Print the servers of FILE with their ranks and devices, also while its producer works on it; - is stdin.

    Of a file that is known and is no table for a job of training it says what it is, who reads it, and what to do.
    """
    from ranktable import report
    from ranktable.document import read_document
    from ranktable.kinds import detect_dialect
    from ranktable.tables import decode_table

    if rank is not None and ranks:
        raise click.UsageError("--ranks and --rank exclude each other; give one of them")
    document = read_document(file)
    kind = detect_dialect(document.value)
    if kind is not None and kind.dialect.schema is None:
        facts = report.describe_kind(document.source, kind)
        return Outcome(render_json(facts) if form == "json" else report.render_kind(facts) + "\n")
    table = decode_table(document)
    found = report.list_ranks(table, rank) if ranks or rank is not None else None
    if form == "json":
        return Outcome(render_json(report.overview_as_json(table) if found is None else found))
    if rank is not None:
        return Outcome("\n\n".join(map(report.render_rank, found or ())) + "\n")
    return Outcome((report.render_table(table) if ranks else report.render_overview(table)) + "\n")


@click.command(short_help="List the rules of validate.")
@FORMAT
@click.option("--dialect", type=click.Choice(read_names()), metavar="NAME", help="Only the rules of this dialect.")
@choice_option("--chip", CHIPS, "Only the rules that hold for this chip.")
@choice_option("--profile", READERS, "Only the rules that this reader's tables are held to.")
@click.option("--sources", is_flag=True, help="Where each rule can be read up.")
def rules(form: str, sources: bool, dialect: str | None, chip: str | None, profile: str | None) -> Outcome:
    """List the rules that `validate` holds tables to: id, severity, chips, profiles, and what each asks for."""
    from ranktable.report import render_rules, render_sources, rules_as_json

    chosen = [
        entry
        for entry in registered_rules()
        if (dialect is None or dialect in entry.dialects)
        and (chip is None or not entry.chips or chip in entry.chips)
        and (profile is None or not entry.readers or profile in entry.readers)
    ]
    if form == "json":
        return Outcome(rules_as_json(chosen))
    return Outcome(render_sources(chosen) if sources else render_rules(chosen))
