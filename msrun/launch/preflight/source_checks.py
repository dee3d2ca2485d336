"""Do all hosts have the same program and the same modules beside it? A stale copy hangs or spoils a job. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msrun import contract
from msrun.launch.preflight.fleet_finding import FleetFinding, name_hosts
from msrun.launch.preflight.host_report import HostAnswer
from msrun.launch.preflight.majority import find_majority
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.program import Program

SHOWN_DIGITS = 8
MISSING = ""
REMEDY = "copy one to all, or use a disk that they share"


def check_sources(
    entries: Sequence[HostEntry],
    reached: Mapping[int, HostAnswer],
    program: Program,
    here: Sequence[tuple[str, str]] = (),
) -> Iterator[FleetFinding]:
    """Compare the files of the program over all hosts; a host without any has said so itself.

    Another program fails, another module beside it is a warning: a host may have settings of its own there. Of other
    executables than Python programs, such as /bin/bash, hosts may well have different ones: a warning, too.

    Args:
        here: the launcher's own files, if it has them.
    """
    files = {node: dict(answer.report.sources) for node, answer in reached.items() if answer.report.sources}
    if not files:
        return
    names = dict.fromkeys(name for own in files.values() for name in own)
    main, local = next(iter(names)), dict(here)
    has_odd = False
    for name in names:
        digests = find_majority({node: own.get(name, MISSING) for node, own in files.items()})
        is_program = name == main and program.is_python
        for digest, nodes in digests.odd.items():
            has_odd = True
            others = digests.name_usual(entries)
            text = f"{name_hosts(nodes, entries)} {'has' if len(nodes) == 1 else 'have'} "
            text += _describe(name, digest, digests.usual, others)
            if is_program:
                yield FleetFinding("fail", "program", f"{text}; {REMEDY}", exit_code=contract.EXIT_USAGE)
            else:
                yield FleetFinding("warn", "program", f"{text}; {REMEDY}")
        if name in local and digests.usual not in (MISSING, local[name]):
            has_odd = True
            text = f"the {name} there (sha256 {digests.usual[:SHOWN_DIGITS]}) is another than the one here "
            text += f"(sha256 {local[name][:SHOWN_DIGITS]}); the one there is run"
            yield FleetFinding("warn", "program", text, digests.groups[digests.usual])
    if not has_odd:
        beside = f" and {len(names) - 1} module{'s' if len(names) > 2 else ''} beside it" if len(names) > 1 else ""
        text = f"{program.kind} {program.target}{beside}: the same (sha256 {files[min(files)][main][:SHOWN_DIGITS]})"
        yield FleetFinding("ok", "program", text, tuple(files))


def _describe(name: str, digest: str, usual: str, others: str) -> str:
    if digest == MISSING:
        return f"no {name}, {others} one"
    if usual == MISSING:
        return f"{name} (sha256 {digest[:SHOWN_DIGITS]}), {others} none"
    return f"another {name} (sha256 {digest[:SHOWN_DIGITS]}) than {others} (sha256 {usual[:SHOWN_DIGITS]})"
