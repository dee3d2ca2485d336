"""The report on a table and on the host that it is read on: validation, and rules L1 to L7."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ranktable.codec import find_codec
from ranktable.errors import JsonTextError, UnknownDialectError
from ranktable.local.check import LocalFacts, check_local, find_local_servers
from ranktable.problem import Problem
from ranktable.profile import build_profile
from ranktable.reading.document import Document
from ranktable.reading.positions import locate_paths
from ranktable.reading.source import read_document
from ranktable.sources.device_tools import DeviceTools
from ranktable.sources.hccn_conf import read_answers
from ranktable.sources.local_host import find_device_ids, read_local_host
from ranktable.survey import Survey
from ranktable.validate import Report, validate_document, validate_file


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server of the table that is this host, with its ranks in ascending order."""

    server_id: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalReport:
    """What validation and the look at this host found, and which server this host is: one, when all is well."""

    report: Report
    servers: tuple[LocalServer, ...] = ()


def check_file(
    path: str | os.PathLike[str],
    *,
    device_target: str = "ascend",
    chip: str | None = None,
    root: str | os.PathLike[str] = "/",
    environment: Mapping[str, str] | None = None,
) -> LocalReport:
    """Return the report of `validate_file` on the table at `path`, with the findings of rules L1 to L7 in it.

    `root` is the folder with the host's /dev, /etc and /proc; `environment` that of the job, by default this process's.
    hccn_tool and npu-smi are asked about this host's devices if they are here.
    Raises ProfileError, ReadError, UnsupportedDialectError, and SourceError for answers that cannot be taken.
    """
    profile = build_profile(device_target, chip)
    try:
        document = read_document(path)
        report = validate_document(document, profile)
    except (JsonTextError, UnknownDialectError):
        return LocalReport(validate_file(path, device_target=device_target, chip=chip))
    if not report.is_ready:
        return LocalReport(report)
    _, codec = find_codec(document)
    survey = codec.survey(document.value)
    facts = read_local_facts(
        survey, profile.device_target, Path(root), os.environ if environment is None else environment
    )
    problems = _locate(check_local(survey, facts, os.fspath(path)), document)
    merged = sorted([*report.problems, *problems], key=_by_place)
    found = find_local_servers(survey, facts.host)
    servers = tuple(LocalServer(server.server_id or "", tuple(server.ranks)) for server in found)
    return LocalReport(replace(report, problems=tuple(merged)), servers)


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


def _locate(problems: list[Problem], document: Document) -> list[Problem]:
    places = locate_paths(document.text, {problem.path for problem in problems}) if problems else {}
    return [replace(problem, position=places[problem.path]) for problem in problems]


def _by_place(problem: Problem) -> tuple[int, int]:
    position = problem.position
    return (0, 0) if position is None else (position.line, position.column)
