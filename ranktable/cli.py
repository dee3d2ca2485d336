"""The `ranktable` command: generate, validate, show. The only place of the package that prints and exits.

Exit status: 0 valid (warnings allowed), 1 problems, 2 wrong usage or unreadable, 3 not ready.
Every option --a_b is also accepted as --a-b.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import click

from ranktable.errors import EXIT_NOT_READY, EXIT_PROBLEMS, EXIT_USAGE, EXIT_VALID, RankTableError
from ranktable.generate import SERVER_ORDERS, ServerOrder, build_table, default_file_name
from ranktable.hosts import HostList, parse_numbers
from ranktable.model import RankTable
from ranktable.profile import CHIPS, DEVICE_TARGETS
from ranktable.report import render_report, render_reports_json, render_table, report_as_json
from ranktable.validate import validate_file, validate_table

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("-", "_"),
    "max_content_width": 110,
}
_EXIT_INTERRUPTED = 130
# The worst of several files decides: what could not be judged, then what is wrong, then what is not ready.
_BY_WEIGHT = (EXIT_USAGE, EXIT_PROBLEMS, EXIT_NOT_READY, EXIT_VALID)

_TARGET_HELP = "For which devices to check: cpu and gpu tables need no device_ip and follow none of Ascend's rules."


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command leaves to be printed, and its exit status."""

    output: str = ""
    notes: tuple[str, ...] = ()
    exit_code: int = EXIT_VALID


@click.group(context_settings=_SETTINGS)
def cli() -> None:
    """Generate, validate and show rank tables for parallel training."""


@cli.command()
@click.option("--hosts", required=True, metavar="LIST", help="Hosts with device counts: a:8,b:8 or node[01-16]:8.")
@click.option("--devices", metavar="IDS", help="Device ids used on every host, such as 4-7, in place of counts.")
@click.option(
    "-o", "--output", metavar="FILE", help="Where to write; - is standard output.  [default: rank_table_<n>pcs.json]"
)
@click.option(
    "--order",
    type=click.Choice(SERVER_ORDERS),
    default="server_id",
    show_default=True,
    help="Order of the ranks over the hosts; Ascend readers demand server_id, the string order.",
)
@click.option("--device_ips", metavar="PATTERN|FILE", help="192.168.{device+1}.{server+10}, or a YAML file of lists.")
def generate(
    hosts: str, devices: str | None, output: str | None, order: ServerOrder, device_ips: str | None
) -> Outcome:
    """Write a rank table for HOSTS with contiguous ranks. Without --device_ips the devices get no device_ip."""
    from ranktable.codec import encode_table
    from ranktable.write import write_table

    servers = _servers_of(HostList.parse(hosts), devices)
    table = build_table(servers, device_ips=_device_ips_of(device_ips, servers), order=order)
    notes = _notes_on(table, order)
    if output == "-":
        return Outcome(encode_table(table), notes)
    target = output or default_file_name(table)
    if output is None and Path(target).exists():
        raise click.UsageError(f"{target} is there already; name it with -o to replace it")
    write_table(target, table)
    return Outcome(notes=(f"wrote {target}: {len(table.servers)} servers, {table.world_size} devices", *notes))


@cli.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--strict", is_flag=True, help="Exit with 1 on warnings too.")
@click.option(
    "--device_target",
    type=click.Choice(DEVICE_TARGETS, case_sensitive=False),
    default="ascend",
    show_default=True,
    help=_TARGET_HELP,
)
@click.option(
    "--chip",
    type=click.Choice(CHIPS, case_sensitive=False),
    metavar=f"[{'|'.join(CHIPS)}]",
    help="Hold the table to the rules of this chip; without it they are warnings.",
)
def validate(files: tuple[str, ...], form: str, strict: bool, device_target: str, chip: str | None) -> Outcome:
    """Check each FILE against every rule and list all problems; - is standard input."""
    texts: list[str] = []
    objects: list[dict[str, object]] = []
    codes: list[int] = []
    for name in files:
        try:
            report = validate_file(name, device_target=device_target, chip=chip)
            texts.append(render_report(report))
            objects.append(report_as_json(report))
            codes.append(report.exit_code(strict=strict))
        except RankTableError as error:
            if len(files) == 1 and form == "text":
                raise
            texts.append(f"ranktable: error: {error}")
            objects.append({"file": name, "error": error.message, "remedy": error.remedy})
            codes.append(error.exit_code)
    worst = next(code for code in _BY_WEIGHT if code in codes)
    text = render_reports_json(objects) if form == "json" else "\n".join(texts) + "\n"
    return Outcome(text, exit_code=worst)


@cli.command()
@click.argument("file", metavar="FILE")
def show(file: str) -> Outcome:
    """Print the ranks of FILE as plain columns; - is standard input."""
    from ranktable.read import read_table

    return Outcome(render_table(read_table(file)) + "\n")


def _servers_of(hosts: HostList, devices: str | None) -> list[tuple[str, Sequence[int]]]:
    device_ids = parse_numbers(devices) if devices is not None else None
    servers: list[tuple[str, Sequence[int]]] = []
    for host in hosts:
        if device_ids is None and host.num_devices is None:
            raise click.UsageError(
                f"host {host.name!r} has no number of devices; write {host.name}:8, or give --devices"
            )
        if device_ids is not None and host.num_devices not in (None, len(device_ids)):
            raise click.UsageError(
                f"host {host.name!r} has {host.num_devices} devices, --devices lists {len(device_ids)}; leave one out"
            )
        servers.append((host.name, device_ids if device_ids is not None else range(host.num_devices or 0)))
    return servers


def _device_ips_of(option: str | None, servers: Sequence[tuple[str, Sequence[int]]]) -> dict[str, list[str]] | None:
    from ranktable.device_ips import expand_pattern, is_pattern, read_device_ips

    if option is None:
        return None
    return expand_pattern(option, servers) if is_pattern(option) else read_device_ips(option)


def _notes_on(table: RankTable, order: ServerOrder) -> tuple[str, ...]:
    """Say which order was used, and what keeps the table from use on Ascend."""
    meaning = {
        "server_id": "the string order of the server ids",
        "numeric": "numeric order",
        "given": "the order given",
    }
    first = table.servers[0].server_id
    notes = [f"ranks follow {meaning[order]}; rank 0 is on {first}"] if len(table.servers) > 1 else []
    problems = validate_table(table)
    if any(problem.rule == "R16" for problem in problems):
        notes.append("no device_ip was given: right for cpu and gpu, while Ascend needs --device_ips")
    if any(problem.rule == "R11" for problem in problems):
        notes.append("warning: Ascend readers demand --order server_id")
    return tuple(notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (the process's own by default), print, and return the exit status."""
    try:
        result = cli.main(
            args=None if arguments is None else list(arguments), prog_name="ranktable", standalone_mode=False
        )
        return _print(result) if isinstance(result, Outcome) else int(result or 0)
    except click.ClickException as error:
        return _print_error(error.format_message(), _help_hint(error), error.exit_code)
    except RankTableError as error:
        return _print_error(str(error), "", error.exit_code)
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


def _print_error(message: str, hint: str, exit_code: int) -> int:
    _print_note(f"error: {message}{hint}")
    return exit_code


def _print_note(text: str) -> None:
    """Print one line, whatever stands in names that the user gave."""
    line = " ".join(text.split())
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in line)
    print(_fit(f"ranktable: {shown}", sys.stderr), file=sys.stderr)


def _fit(text: str, stream: TextIO) -> str:
    """Return the text with escapes for what the stream cannot encode."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _help_hint(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f" (see {context.command_path} --help)" if context is not None else ""
