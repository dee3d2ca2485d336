"""What the launcher makes of what hosts say before a job starts: one list of findings, or why an agent has ended. Pure.
A report is from another machine: it is cut to size and made printable, and what is missing or of another type is left
empty."""

from __future__ import annotations

import ipaddress
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msrun import contract
from msrun.agent.processes.process_control import signal_name
from msrun.cluster.host_report import Finding, HostReport, ReachResult
from msrun.errors import ClusterError, MsrunError, UsageError
from msrun.launch.output import one_line
from msrun.planning.hosts import HostEntry
from msrun.planning.program import Program
from msrun.planning.record import Record
from msrun.planning.spec import LOOPBACK, is_loopback, is_numeric
from ranktable.hosts.brackets import fold


def render_finding(finding: Finding) -> str:
    text = finding.text.replace("\r", "\\r").replace("\n", "\\n")
    return f"{finding.status:<4}  {finding.name:<13}  {text}"


def exit_code_of_findings(findings: Iterable[Finding]) -> int:
    """Return 0 when nothing failed, else the status of the first kind: what the user has to change before the host."""
    return min((finding.exit_code for finding in findings if finding.status == "fail"), default=contract.EXIT_OK)


MAX_FOLDED_CHARS = 60
SHOWN_NAMES = 3
HOST = "{host}"  # in a text: the name of the host that it is said of
_NUMBER = re.compile(r"(?<![\w.:/+-])\d+(?:\.\d+)?(?![\w.:/+-])")  # that stands alone: a size or a time
_DIGITS = re.compile(r"\d+(?:\.\d+)*")
_ORDER = ("fail", "warn", "ok")


def fold_findings(findings: Iterable[tuple[int, Finding]], entries: Sequence[HostEntry]) -> list[Finding]:
    """Return findings of hosts, by node rank, as those of all that say the same but for numbers and the own name."""
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
        ordered = [sorted(column, key=float) for column in columns]
        ranges = iter([one[0] if float(one[0]) == float(one[-1]) else f"{one[0]} to {one[-1]}" for one in ordered])
        return _NUMBER.sub(lambda _: next(ranges), first).replace(HOST, "the host")
    example = first.replace(HOST, first_name)
    return f"such as {example}" if first.startswith(HOST) else f"on {first_name}: {example}"


SHOWN_GROUPS = 3


class Majority(Record):
    """Hosts by what they have."""

    usual: str  # what most have; of two groups of one size, what the earlier host has
    groups: Mapping[str, tuple[int, ...]]  # value -> node ranks, in the order of each value's first host

    @property
    def odd(self) -> Mapping[str, tuple[int, ...]]:
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
    groups: dict[str, tuple[int, ...]] = {}
    for node, value in sorted(values.items()):
        groups[value] = (*groups.get(value, ()), node)
    return Majority(max(groups, key=lambda value: len(groups[value]), default=""), groups)


MAX_TEXT_CHARS = 400
MAX_QUOTED_CHARS = 200
MAX_ITEMS = 256


def quote(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Return text of another host on one line, cut to size."""
    return one_line(text[:limit])[:limit]


class HostAnswer(Record):
    """A report, and when the launcher asked for it and got it."""

    report: HostReport
    sent_at: float  # the launcher's clock (s since the epoch) when it asked
    received_at: float  # the same when the report had come
    reached_as: str = ""  # numeric address by which the launcher reached the host; empty when that is not known


def printable_record(value: Any) -> Any:
    """Return what another host has sent with all text in it on one line each, and lists cut to size."""
    if isinstance(value, dict):
        return {key: printable_record(item) for key, item in value.items()}
    if isinstance(value, list):
        return [printable_record(item) for item in value[:MAX_ITEMS]]
    return quote(value) if isinstance(value, str) else value


SHOWN_DIGITS = 8
MISSING = ""
REMEDY = "copy one to all, or use a disk that they share"


def check_sources(
    entries: Sequence[HostEntry],
    reached: Mapping[int, HostAnswer],
    program: Program,
    here: Sequence[tuple[str, str]] = (),
) -> Iterator[Finding]:
    """Compare the files of the program over all hosts, and with the launcher's own, `here`. Another Python program
    fails; another module beside it, or another executable such as /bin/bash, is a warning."""
    files = {node: dict(answer.report.sources) for node, answer in reached.items() if answer.report.sources}
    if not files:
        return
    names = dict.fromkeys(name for own in files.values() for name in own)
    main, local = next(iter(names)), dict(here)
    has_odd = False
    for name in names:
        digests = find_majority({node: own.get(name, MISSING) for node, own in files.items()})
        usual, others = digests.usual, digests.name_usual(entries)
        for digest, nodes in digests.odd.items():
            has_odd = True
            text = f"another {name} (sha256 {digest[:SHOWN_DIGITS]}) than {others} (sha256 {usual[:SHOWN_DIGITS]})"
            if digest == MISSING:
                text = f"no {name}, {others} one"
            elif usual == MISSING:
                text = f"{name} (sha256 {digest[:SHOWN_DIGITS]}), {others} none"
            text = f"{name_hosts(nodes, entries)} {'has' if len(nodes) == 1 else 'have'} {text}; {REMEDY}"
            is_program = name == main and program.is_python
            yield (
                Finding("fail", "program", text, contract.EXIT_USAGE)
                if is_program
                else Finding("warn", "program", text)
            )
        if name in local and usual not in (MISSING, local[name]):
            has_odd = True
            text = f"the {name} there (sha256 {usual[:SHOWN_DIGITS]}) is another than the one here "
            text += f"(sha256 {local[name][:SHOWN_DIGITS]}); the one there is run"
            yield Finding("warn", "program", text, nodes=digests.groups[usual])
    if not has_odd:
        beside = f" and {len(names) - 1} module{'s' if len(names) > 2 else ''} beside it" if len(names) > 1 else ""
        text = f"{program.kind} {program.target}{beside}: the same (sha256 {files[min(files)][main][:SHOWN_DIGITS]})"
        yield Finding("ok", "program", text, nodes=tuple(files))


class MasterAddress(Record):
    """The scheduler's numeric address, and why it is this one."""

    address: str
    reason: str


def choose_master_address(
    entries: Sequence[HostEntry], answers: Mapping[int, HostAnswer], given: str = ""
) -> MasterAddress:
    """Return where the scheduler listens: the address `given`, else that of the host list, else the one by which node 0
    was reached, else one in a network of all (UsageError: it is not node 0's, is loopback, or none is found).
    `answers`: of those that have answered, node 0 among them."""
    if len(entries) == 1:
        return MasterAddress(LOOPBACK, "one host")
    first, entry = answers[0], entries[0]
    if entry.is_rehearsed:
        return MasterAddress(entry.address, "of a rehearsal")
    own = {address.address for address in first.report.routable}
    for said, source in (
        (given, f"--master_addr {given}"),
        (entry.address, f"{entry.source}: address {entry.address}"),
    ):
        if said:
            address = said if is_numeric(said) else first.report.master_address
            if address and is_loopback(address):
                raise UsageError(
                    f"{source}: other hosts cannot reach {address}; give an address of {entry.name} that they can"
                )
            normal = str(ipaddress.ip_address(address)) if address else ""
            if normal not in own:
                raise UsageError(
                    f"{source}: not an address of {entry.name}, the first host, which runs the scheduler; "
                    f"give one of {', '.join(sorted(own)) or 'its addresses'}"
                )
            return MasterAddress(normal, source)
    for address, reason in _candidates(answers):
        if address in own:
            return MasterAddress(address, reason)
    raise UsageError(
        f"{entry.name}: no address of it is known that the other hosts could reach, and it is to run the scheduler; "
        "give --master_addr"
    )


def _candidates(answers: Mapping[int, HostAnswer]) -> Iterator[tuple[str, str]]:
    first = answers[0]
    others = [answer for node, answer in sorted(answers.items()) if node]
    yield first.reached_as, "by which it was reached from here"
    for address, count in Counter(answer.report.ssh_client for answer in others).most_common():
        yield address, f"by which {count} of the other hosts were reached"
    yield first.report.ssh_server, "by which it was reached through ssh"
    for entry in first.report.routable:
        network = entry.network
        addresses = ([ipaddress.ip_address(one.address) for one in answer.report.routable] for answer in others)
        if network is not None and all(any(one in network for one in own) for own in addresses):
            yield entry.address, f"in {network}, a network of all hosts"
    yield next((entry.address for entry in first.report.routable), ""), "the first address of its host"


MAX_SKEW_S = 1.0
FAR_SKEW_S = 300.0  # keeps a host out of a restart. Source: the limit of RFC 4120, 8.2
NONE = "none"


class LauncherFacts(Record):
    """What the hosts are compared with, beside each other."""

    program: Program
    msrun_version: str
    master_addr: str = ""  # as given by the user; empty when not
    sources: tuple[tuple[str, str], ...] = ()  # the program's files here; empty: only on the hosts
    is_restart: bool = False  # the job has run before, on other hosts


def compare_hosts(
    entries: Sequence[HostEntry], answers: Mapping[int, HostAnswer | MsrunError], launcher: LauncherFacts
) -> list[Finding]:
    """Return all findings, failures first; `answers`: by node rank, of a host that could not be asked the reason."""
    reached = {node: answer for node, answer in sorted(answers.items()) if isinstance(answer, HostAnswer)}
    failed = [(node, one) for node, one in sorted(answers.items()) if not isinstance(one, HostAnswer)]
    findings = fold_findings(((node, Finding("fail", "host", str(e), e.exit_code)) for node, e in failed), entries)
    if reached:
        findings.append(Finding("ok", "host", "reached", nodes=tuple(reached)))
        said = ((node, finding) for node, answer in reached.items() for finding in answer.report.findings)
        findings += fold_findings(said, entries)
        findings += _check_machines(entries, reached)
        findings += _check_versions(entries, reached, launcher)
        findings += check_sources(entries, reached, launcher.program, launcher.sources)
        targets = {node: answer.report.device_target for node, answer in reached.items() if answer.report.device_target}
        if (target := find_majority(targets)).odd:  # collectives need one kind of device; `auto` decides on each host
            text = target.describe(entries, has="would use", have="would use")
            text += "; give --device_target, or leave hosts out"
            findings.append(Finding("fail", "device_target", text, contract.EXIT_USAGE))
        findings += fold_findings(_check_clocks(reached, launcher), entries)
        for sees, text in (
            (True, "log directory shared with this host: logs are not sent"),
            (False, "logs are sent here while the job runs"),
        ):
            if nodes := tuple(node for node, answer in reached.items() if answer.report.sees_log_dir is sees):
                findings.append(Finding("ok", "logs", text, nodes=nodes))
    own = reached[0].report.findings if 0 in reached else ()
    if 0 in reached and not any(one.name in ("master_addr", "packages") and one.status == "fail" for one in own):
        try:
            master = choose_master_address(entries, reached, launcher.master_addr)
            text = f"the scheduler is to listen at {master.address} of {entries[0].name} ({master.reason})"
            findings.append(Finding("ok", "master_addr", text))
        except UsageError as error:
            findings.append(Finding("fail", "master_addr", str(error), error.exit_code))
    return order_findings(findings)


def check_reach(
    entries: Sequence[HostEntry], results: Mapping[int, ReachResult], address: str, port: int
) -> list[Finding]:
    """Return which hosts cannot reach the scheduler, and why; `results` by node rank, of all hosts but node 0."""
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    remedy = "name the right address by --master_addr, or by address= in the hostfile"
    said = []
    for node, result in sorted(results.items()):
        if not result.error:
            said.append((node, Finding("ok", "scheduler", f"can reach the scheduler at {place}")))
            continue
        if result.is_own:
            why = f"{address} is its own address, too, on {result.interface or 'an interface'}: no network of all hosts"
        elif not result.source:
            why = "it has no route there: another network"
        else:
            own = f"{result.source} ({result.interface})" if result.interface else result.source
            why = f"its way there begins at {own}: a firewall, or another network"
        text = f"cannot reach the scheduler at {place}: {result.error}; {why}; {remedy}"
        said.append((node, Finding("fail", "scheduler", text, contract.EXIT_CLUSTER)))
    return order_findings(fold_findings(said, entries))


def _check_machines(entries: Sequence[HostEntry], reached: Mapping[int, HostAnswer]) -> Iterator[Finding]:
    """Two names of one machine: its workers would get the same devices, and its log files the same names."""
    machines: dict[tuple[str, str, frozenset[str]], list[int]] = {}
    for node, answer in reached.items():
        report = answer.report
        owned = frozenset(address.address for address in report.routable)
        if report.boot_id:
            machines.setdefault((report.boot_id, report.host_name, owned), []).append(node)
    for (_, host_name, _), nodes in machines.items():
        if len(nodes) > 1:
            text = f"are one machine, {host_name}: one agent starts all workers of a host; name it once, with all slots"
            yield Finding("fail", "machine", text, contract.EXIT_USAGE, tuple(nodes))
    kinds = {node: answer.report.architecture for node, answer in reached.items() if answer.report.architecture}
    if (kind := find_majority(kinds)).odd:
        text = kind.describe(entries, has="is", have="are")
        yield Finding("warn", "machine", f"{text}: floating-point results may differ between them")


def _check_versions(
    entries: Sequence[HostEntry], reached: Mapping[int, HostAnswer], launcher: LauncherFacts
) -> Iterator[Finding]:
    reports = {node: answer.report for node, answer in reached.items()}
    same = "install the same on all hosts"
    python = {node: report.python_version for node, report in reports.items()}
    minor = {node: ".".join(version.split(".")[:2]) for node, version in python.items()}
    remedy = f"{same}, or name another by --python or python= in the hostfile"
    yield _compared(entries, "python", python, minor, remedy)
    torch = {node: report.torch_version or NONE for node, report in reports.items()}
    if set(torch.values()) != {NONE}:  # which each host warns of itself
        public = {node: version.partition("+")[0] for node, version in torch.items()}
        yield _compared(entries, "torch", torch, public, same)
    numpy = find_majority({node: report.numpy_version or NONE for node, report in reports.items()})
    if numpy.odd:
        yield Finding("warn", "numpy", f"{numpy.describe(entries)}; {same}")
    msrun = {node: report.msrun_version or "unknown" for node, report in reports.items()}
    here = launcher.msrun_version
    for version, nodes in find_majority(msrun).groups.items():
        if version == here:
            yield Finding("ok", "msrun", version, nodes=nodes)
        else:
            text = f"msrun {version} there, {here} here; install the same version, or send this one along with --ship"
            yield Finding("fail", "msrun", text, contract.EXIT_CLUSTER, nodes)


def _compared(
    entries: Sequence[HostEntry], name: str, exact: Mapping[int, str], must: Mapping[int, str], remedy: str
) -> Finding:
    versions = find_majority(exact)
    if find_majority(must).odd:
        return Finding("fail", name, f"{versions.describe(entries)}; {remedy}", contract.EXIT_CLUSTER)
    if versions.odd:
        return Finding("warn", name, versions.describe(entries))
    return Finding("ok", name, versions.usual, nodes=tuple(exact))


def _check_clocks(reached: Mapping[int, HostAnswer], launcher: LauncherFacts) -> Iterator[tuple[int, Finding]]:
    for node, answer in reached.items():
        skew_s = clock_skew(answer)
        if launcher.is_restart and (text := describe_skew(*skew_s, FAR_SKEW_S)):
            yield node, Finding("fail", "clock", f"{text}; start chrony or ntpd there", contract.EXIT_CLUSTER)
        elif text := describe_skew(*skew_s, MAX_SKEW_S):
            yield node, Finding("warn", "clock", f"{text}: times in logs do not agree; start chrony or ntpd there")
        else:
            yield node, Finding("ok", "clock", f"clock agrees with the one here to {MAX_SKEW_S:g} s")


def describe_skew(least_s: float, most_s: float, limit_s: float) -> str:
    """Return how far a clock is off, from bounds as `clock_skew` gives them; empty when it may be within the limit."""
    if least_s <= limit_s and most_s >= -limit_s:
        return ""
    return f"clock {abs(least_s):.1f} s {'ahead of' if least_s > 0 else 'behind'} the one here"


def clock_skew(answer: HostAnswer) -> tuple[float, float]:
    """Return how far (s) a host's clock is ahead, at least and at most: the truth lies between, near the first, for the
    question waits for the agent's start. Source: RFC 5905, section 8."""
    return answer.report.made_at - answer.received_at, answer.report.received_at - answer.sent_at


MAX_STDERR_CHARS = 16_384
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # of a shell. Source: POSIX, Shell Command Language, 2.8.2

_OTHER = "name another Python by --python, or by python= in the hostfile"

_SIGNS = (  # text on stderr, and what it means; the first that is found counts
    (r"^msrun agent: (?P<what>.+)$", "{what}"),
    (r"No space left on device", "a disk there is full; make room, or set TMPDIR there to a folder on another one"),
    (r"Disk quota exceeded", "the user's disk quota there is used up; make room"),
    (r"error while loading shared libraries: (?P<what>[^:\s]+)", f"{{python}} lacks the library {{what}}; {_OTHER}"),
    (r"No module named '?encodings\b", f"{{python}} finds no library of its own; unset PYTHONHOME there, or {_OTHER}"),
    (
        r"Error: No module named '?msrun\b(?!\.)",
        f"msrun is not installed for {{python}}; install it there, {_OTHER}, or send it along with --ship",
    ),
    (
        r"Error: No module named '?msrun\.|cannot import name .* from .*\bmsrun\b",
        "another version of msrun is installed for {python}; install this one there, or send it along with --ship",
    ),
    (
        r"future feature annotations|from 'typing'|keyword argument 'kw_only'|^TypeError: file\(\)|^SyntaxError: ",
        f"{{python}} is too old: msrun needs Python 3.11 or newer; {_OTHER}",
    ),
    (
        r"Error: No module named '?(?P<what>[\w.]+)",
        "{python} lacks the module {what}; install msrun there with all that it requires",
    ),
    (
        r"^MemoryError|Cannot allocate memory|std::bad_alloc",
        "there is not enough memory there; end what uses it, or raise the limit of the user or the container",
    ),
    (
        r"Resource temporarily unavailable|can't start new thread",
        "the user may not start more processes there; raise ulimit -u or the container's limit",
    ),
    (r"account is currently not available|nologin", "the user has no shell there; give another user by --ssh_user"),
    (r"login as the user \W*(?P<what>[\w.-]+)", "that user may not log in there; give --ssh_user {what}"),
    (r"password (?:has )?expired|change your password", "the user's password there has expired; log in once by hand"),
)


def explain_agent_end(exit_status: int, stderr_text: str, entry: HostEntry) -> ClusterError:
    """Return why an agent, or its shell, ended with this status (128 + N for signal N) and these last words."""
    python = entry.python or sys.executable
    stderr_text = stderr_text[-MAX_STDERR_CHARS:]
    for pattern, text in _SIGNS:
        if match := re.search(pattern, stderr_text, re.MULTILINE):
            what = quote(match.groupdict().get("what") or "", MAX_QUOTED_CHARS)
            return ClusterError(f"{entry.name}: {text.format(python=python, what=what)}")
    return ClusterError(f"{entry.name}: {_by_status(exit_status, stderr_text, python)}")


def _by_status(exit_status: int, stderr_text: str, python: str) -> str:
    lines = [line for line in map(str.strip, stderr_text.splitlines()) if line]
    blaming = [line for line in lines if python in line and exit_status in (NOT_EXECUTABLE, NOT_FOUND)]
    last = quote([*blaming[:1], *lines[-1:]][0], MAX_QUOTED_CHARS) if lines else ""
    said = f": {last}" if last else ""
    if exit_status == NOT_FOUND:
        return f"there is no {python}{said}; install it there, or {_OTHER}"
    if exit_status == NOT_EXECUTABLE:
        kind = " (is it for another kind of processor?)" if "xec format error" in stderr_text else ""
        return f"{python} cannot be run{kind}{said}; {_OTHER}"
    if exit_status > contract.EXIT_SIGNAL_BASE:
        name = signal_name(exit_status - contract.EXIT_SIGNAL_BASE)
        why = "; somebody, or the kernel for want of memory, has ended it" if name == "SIGKILL" else ""
        return f"the agent was ended by {name}{why}{said}"
    if exit_status == contract.EXIT_OK and not last:
        return (
            "its login shell ended before it started the agent; look for exit or exec in its start-up files, such as "
            "~/.bashrc, and for a forced command in authorized_keys"
        )
    return f"the agent ended with exit code {exit_status}{said or ', and said nothing'}"
