"""What one check of a host has found."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from msrun import contract
from msrun.cluster.protocol import Finding
from msrun.errors import ClusterError, MsrunError, UsageError
from msrun.planning.hosts.host_entry import HostEntry
from ranktable.hosts.brackets import fold


def render_finding(finding: Finding) -> str:
    """Return `status  name  text`."""
    text = finding.text.replace("\r", "\\r").replace("\n", "\\n")
    return f"{finding.status:<4}  {finding.name:<13}  {text}"


def exit_code_of_findings(findings: Iterable[Finding]) -> int:
    """Return 0 when nothing failed, else the status of the first kind: what the user has to change before the host."""
    return min((finding.exit_code for finding in findings if finding.status == "fail"), default=contract.EXIT_OK)


MAX_FOLDED_CHARS = 60
SHOWN_NAMES = 3
HOST = "{host}"
"""In a text: the name of the host that it is said of."""
_NUMBER = re.compile(r"(?<![\w.:/+-])\d+(?:\.\d+)?(?![\w.:/+-])")
"""One that stands alone: a size or a time, no version, no address, no part of a path."""
_DIGITS = re.compile(r"\d+(?:\.\d+)*")
_ORDER = ("fail", "warn", "ok")


def fold_findings(findings: Iterable[tuple[int, Finding]], entries: Sequence[HostEntry]) -> list[Finding]:
    """Return findings of single hosts as findings of all that say the same; only numbers and the host's name differ.

    Args:
        findings: pairs of node rank and finding.
    """
    groups: dict[tuple[str, str, int, str], list[tuple[int, str]]] = {}
    for node, finding in findings:
        name = re.escape(entries[node].name)  # at the front an error names its host already
        text = re.sub(rf"(?<![\w.-]){name}(?![\w-])", HOST, finding.text.removeprefix(f"{entries[node].name}: "))
        key = (finding.status, finding.name, finding.exit_code, _DIGITS.sub("#", text))
        groups.setdefault(key, []).append((node, text))
    folded = []
    for (status, name, exit_code, _), said in groups.items():
        nodes = tuple(node for node, _ in said)
        text = _common_text([text for _, text in said], entries[nodes[0]].name)
        folded.append(Finding(status, name, text, exit_code, nodes))  # type: ignore[arg-type]
    return folded


def order_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return what fails first, then warnings, then what is well; otherwise in their order."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.status))


def render_fleet_findings(
    findings: Iterable[Finding], entries: Sequence[HostEntry], *, quiet: bool = False
) -> list[str]:
    """Return one line for each finding; with `quiet` only of what needs attention."""
    return [
        render_finding(replace(finding, text=describe_finding(finding, entries)))
        for finding in findings
        if finding.status != "ok" or not quiet
    ]


def describe_finding(finding: Finding, entries: Sequence[HostEntry]) -> str:
    """Return a finding with the hosts that it is said of in front: "h[3-5]: 512 MiB free for logs in /"."""
    if not finding.nodes:
        return finding.text
    if len(finding.nodes) == 1 and re.match(rf"{re.escape(entries[finding.nodes[0]].name)}[ :]", finding.text):
        return finding.text  # which names its host itself
    return f"{name_hosts(finding.nodes, entries)}: {finding.text}"


def name_hosts(nodes: Sequence[int], entries: Sequence[HostEntry]) -> str:
    """Return hosts by name: all of them as "all 64 hosts", some as "h[03-05]", many odd ones with a count."""
    if len(nodes) == len(entries) > 1:
        return f"all {len(entries)} hosts"
    names = [entries[node].name for node in nodes]
    text = fold(names)
    if len(text) <= MAX_FOLDED_CHARS or len(names) <= SHOWN_NAMES:
        return text
    return f"{', '.join(names[:SHOWN_NAMES])} and {len(names) - SHOWN_NAMES} more hosts"


def fleet_error(findings: Sequence[Finding], entries: Sequence[HostEntry]) -> MsrunError | None:
    """Return the error that a run ends with: the first failure, and how many there are beside it. None: all is well."""
    failures = [finding for finding in findings if finding.status == "fail"]
    if not failures:
        return None
    exit_code = exit_code_of_findings(failures)
    first = next(finding for finding in failures if finding.exit_code == exit_code)
    more = f" (and {len(failures) - 1} more; --check shows all)" if len(failures) > 1 else ""
    kind = UsageError if exit_code == contract.EXIT_USAGE else ClusterError
    error = kind(f"{describe_finding(first, entries)}{more}")
    error.exit_code = exit_code
    return error


def _common_text(texts: Sequence[str], first_name: str) -> str:
    """Return the text of many hosts: with ranges where only numbers differ, else that of the first as an example."""
    first = texts[0]
    if all(text == first for text in texts):
        return first.replace(HOST, first_name if len(texts) == 1 else "the host")
    if len({_NUMBER.sub("#", text) for text in texts}) == 1:
        columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
        ranges = iter([_range(column) for column in columns])
        return _NUMBER.sub(lambda _: next(ranges), first).replace(HOST, "the host")
    example = first.replace(HOST, first_name)
    return f"such as {example}" if first.startswith(HOST) else f"on {first_name}: {example}"


def _range(numbers: Sequence[str]) -> str:
    ordered = sorted(numbers, key=float)
    return ordered[0] if float(ordered[0]) == float(ordered[-1]) else f"{ordered[0]} to {ordered[-1]}"


SHOWN_GROUPS = 3


@dataclass(frozen=True)
class Majority:
    """Hosts by what they have."""

    usual: str
    """What most have; of two groups of one size, what the earlier host has."""
    groups: Mapping[str, tuple[int, ...]]
    """Value -> node ranks, in the order of each value's first host."""

    @property
    def odd(self) -> Mapping[str, tuple[int, ...]]:
        """Those who have something else."""
        return {value: nodes for value, nodes in self.groups.items() if value != self.usual}

    def name_usual(self, entries: Sequence[HostEntry]) -> str:
        """Return the others in words: "the other 15 hosts", or the only one by its name."""
        nodes = self.groups[self.usual]
        return f"the other {len(nodes)} hosts" if len(nodes) > 1 else name_hosts(nodes, entries)

    def describe(self, entries: Sequence[HostEntry], *, has: str = "has", have: str = "have") -> str:
        """Return who is odd and how: "h3 has 2.12.0, the other 15 hosts 2.13.0"."""
        odd = list(self.odd.items())
        words = [
            f"{name_hosts(nodes, entries)} {has if len(nodes) == 1 else have} {value}"
            for value, nodes in odd[:SHOWN_GROUPS]
        ]
        if left := sum(len(nodes) for _, nodes in odd[SHOWN_GROUPS:]):
            words.append(f"{left} more {have} others")
        return ", ".join([*words, f"{self.name_usual(entries)} {self.usual}"])


def find_majority(values: Mapping[int, str]) -> Majority:
    """Group hosts, given by node rank, by a value of each."""
    groups: dict[str, tuple[int, ...]] = {}
    for node, value in sorted(values.items()):
        groups[value] = (*groups.get(value, ()), node)
    return Majority(max(groups, key=lambda value: len(groups[value]), default=""), groups)


def is_numeric(address: str) -> bool:
    """Return whether this is an address and no name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
