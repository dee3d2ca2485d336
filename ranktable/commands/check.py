"""`ranktable check --local`: the table against the host that it is read on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from ranktable.codec import find_codec
from ranktable.commands.outcome import Outcome
from ranktable.errors import JsonTextError, UnknownDialectError
from ranktable.local_check import LocalFacts, check_local, find_local_servers
from ranktable.problem import Problem
from ranktable.profile import CHIPS, DEVICE_TARGETS, Profile, build_profile
from ranktable.reading.document import Document
from ranktable.reading.positions import locate_paths
from ranktable.reading.read import read_document
from ranktable.report.findings import render_report, render_reports_json, report_as_json
from ranktable.rules.local import LOCAL_RULES
from ranktable.sources.device_tools import DeviceTools
from ranktable.sources.hccn_folder import read_answers
from ranktable.sources.local_host import find_device_ids, read_local_host
from ranktable.survey import Survey
from ranktable.validate import Report, validate_document, validate_file

_RULES = "\n".join(f"{rule}  {title}" for rule, title in LOCAL_RULES.items())


@click.command(epilog=f"\b\nBeside the rules of validate:\n{_RULES}")
@click.argument("file", required=False, metavar="[FILE]")
@click.option("--local", is_flag=True, help="Hold the table against this host.")
@click.option("--root", metavar="DIR", default="/", help="Where the host's /dev, /etc and /proc are.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--strict", is_flag=True, help="Exit with 1 on warnings too.")
@click.option(
    "--device_target",
    type=click.Choice(DEVICE_TARGETS, case_sensitive=False),
    default="ascend",
    show_default=True,
    help="Which devices the host is to have; only ascend has device addresses to compare.",
)
@click.option(
    "--chip", type=click.Choice(CHIPS, case_sensitive=False), metavar=f"[{'|'.join(CHIPS)}]", help="As for validate."
)
def check(
    file: str | None, local: bool, root: str, form: str, strict: bool, device_target: str, chip: str | None
) -> Outcome:
    """Check FILE (by default $RANK_TABLE_FILE) as validate does, and against this host.

    Run it on each host before the job: is the host in the table, are its devices here, are their addresses right.
    """
    if not local:
        raise click.UsageError("say what to check against: --local is this host")
    path = file or os.environ.get("RANK_TABLE_FILE")
    if path is None or path == "-":
        raise click.UsageError("name the file that the job reads, or set RANK_TABLE_FILE")
    report, notes = check_file(path, build_profile(device_target, chip), Path(root), os.environ)
    text = render_reports_json([report_as_json(report)]) if form == "json" else render_report(report) + "\n"
    return Outcome(text, notes, report.exit_code(strict=strict))


def check_file(
    path: str, profile: Profile, root: Path, environment: Mapping[str, str]
) -> tuple[Report, tuple[str, ...]]:
    """Return the report of validation with the findings of this host in it, and which server this host is.

    Raises ReadError, UnsupportedDialectError, and SourceError for answers of tools that cannot be taken.
    """
    try:
        document = read_document(path)
        report = validate_document(document, profile)
    except (JsonTextError, UnknownDialectError):
        return validate_file(path, device_target=profile.device_target, chip=profile.chip), ()
    if not report.is_ready:
        return report, ()
    _, codec = find_codec(document)
    survey = codec.survey(document.value)
    facts = read_local_facts(survey, profile.device_target, root, environment)
    problems = _locate(check_local(survey, facts, path), document)
    merged = sorted([*report.problems, *problems], key=_by_place)
    return replace(report, problems=tuple(merged)), _describe(survey, facts)


def read_local_facts(survey: Survey, device_target: str, root: Path, environment: Mapping[str, str]) -> LocalFacts:
    """Ask this host what the table says about it: only its own devices, and only what the table has values for."""
    host = read_local_host(root)
    present = find_device_ids(device_target, root)
    devices = [device for server in find_local_servers(survey, host) for device in server.devices]
    asked = [number for device in devices if (number := device.device_id) in present and number is not None]
    facts = LocalFacts(host, device_target, tuple(present), environment=environment)
    if device_target != "ascend":
        return facts
    tools, conf = DeviceTools(root), root / "etc/hccn.conf"
    has_addresses = any(device.has("device_ip") for device in devices)
    has_numbers = any(device.has("super_device_id") for device in devices)
    return replace(
        facts,
        tool=tools.ask_addresses(asked) if has_addresses else None,
        conf=read_answers(conf) if has_addresses and conf.is_file() else None,
        super_pod=tools.ask_super_pod(asked) if has_numbers else None,
    )


def _describe(survey: Survey, facts: LocalFacts) -> tuple[str, ...]:
    servers = find_local_servers(survey, facts.host)
    if not servers:
        return ()
    ranks = [rank for server in servers for rank in server.ranks]
    row = f"ranks {ranks[0]} to {ranks[-1]}" if ranks else "no rank"
    return (f"this host is server {servers[0].server_id} of the table, with {row}",)


def _locate(problems: list[Problem], document: Document) -> list[Problem]:
    places = locate_paths(document.text, {problem.path for problem in problems}) if problems else {}
    return [replace(problem, position=places[problem.path]) for problem in problems]


def _by_place(problem: Problem) -> tuple[int, int]:
    position = problem.position
    return (0, 0) if position is None else (position.line, position.column)
