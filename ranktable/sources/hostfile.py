"""Host files of other launchers: DeepSpeed, Open MPI, MPICH and Intel MPI, Slurm host lists, plain names.

Source: DeepSpeed's launcher (`name slots=N`, a doubled host is an error), the host file pages of Open MPI and PRRTE
(`slots`, `max_slots`, `user@node`; lines of one host add up, a line without slots counts one when it is repeated),
the Hydra pages of MPICH (`host:N`, 1 without N, lines of one host add up), Slurm (`node[1-4]`).

And the hosts of a Slurm job out of its environment: node lists are folded (`node[01-16,20]`), tasks per node are counts
with repeats (`8(x2),4`). Source: the environment variables of Slurm's sbatch and srun pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ranktable.errors import HostListError, SourceError
from ranktable.files import read_source
from ranktable.hostlist.brackets import MAX_HOSTS
from ranktable.hostlist.host_list import HostList
from ranktable.hostlist.host_name import MAX_SLOTS, slots_of
from ranktable.values import parse_address

HostfileFormat = Literal["auto", "deepspeed", "openmpi", "mpich", "slurm", "plain"]
HOSTFILE_FORMATS: tuple[HostfileFormat, ...] = ("auto", "deepspeed", "openmpi", "mpich", "slurm", "plain")

_ASSIGNMENT = re.compile(r"\s*=\s*")
_MPICH = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:]+)(?::(\S*))?")
_RANKFILE = re.compile(r"rank\s+\d+\s*=")
_NODE_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASK_COUNTS = ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_COUNT = re.compile(r"([1-9][0-9]{0,5})(?:\(x([1-9][0-9]{0,5})\))?")


@dataclass(frozen=True, slots=True)
class ListedHost:
    """A host as a list names it: how many slots it says, None where it does not, and where it stands."""

    name: str
    num_slots: int | None
    origin: str


@dataclass(frozen=True, slots=True)
class _Line:
    """One line that is neither blank nor a comment."""

    source: str
    number: int
    text: str

    @property
    def origin(self) -> str:
        return f"{self.source}:{self.number}"

    def refuse(self, message: str, remedy: str) -> SourceError:
        return SourceError(self.source, self.number, message, remedy)


def read_hostfile(path: str, form: HostfileFormat = "auto") -> tuple[ListedHost, ...]:
    """Return the hosts of the file at `path` (`-` is standard input) in their order, each once.

    Raises ReadError, SourceError with file and line.
    """
    name, data = read_source(path)
    return parse_hostfile(data, name, form)


def parse_hostfile(data: bytes, source: str = "<hostfile>", form: HostfileFormat = "auto") -> tuple[ListedHost, ...]:
    """Return the hosts in `data`, which is UTF-8; raises SourceError with the line."""
    lines = _split_lines(data, source)
    if not lines:
        raise SourceError(source, None, "the file names no host", "write lines such as  host-a slots=8")
    chosen = detect_format(line.text for line in lines) if form == "auto" else form
    listed = [host for line in lines for host in _READERS[chosen](line)]
    if len(listed) > MAX_HOSTS:
        raise SourceError(source, None, f"the file has more than {MAX_HOSTS} hosts", "check the ranges")
    return _join_repeats(listed, lines, chosen, is_guess=form == "auto")


def detect_format(texts: Iterable[str]) -> HostfileFormat:
    """Return the format that the lines show: by `slots=`, `user@`, `host:N` and brackets."""
    lines = [text for text in texts if text.strip()]
    if any("slots" in _key_names(text) for text in lines):
        is_openmpi = any(
            _key_names(text) - {"slots"} or "@" in text or re.search(r"slots\s+=|=\s", text) for text in lines
        )
        has_slots = all("slots" in _key_names(text) for text in lines)
        return "deepspeed" if has_slots and not is_openmpi else "openmpi"
    if any("@" in text for text in lines):
        return "openmpi"
    if any("[" in text and not text.startswith("[") for text in lines):
        return "slurm"
    return "mpich" if any(_has_count(text) for text in lines) else "plain"


def _key_names(text: str) -> set[str]:
    words = _ASSIGNMENT.sub("=", text).split()[1:]
    return {word.partition("=")[0].replace("-", "_") for word in words if "=" in word}


def _has_count(text: str) -> bool:
    is_bare_ipv6 = parse_address(text.split()[0]) is not None
    return not is_bare_ipv6 and re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:]+):\S+.*", text) is not None


def _split_lines(data: bytes, source: str) -> list[_Line]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        raise SourceError(source, number, f"byte 0x{data[error.start]:02x} is not UTF-8", "save it as UTF-8") from error
    stripped = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1))
    return [_Line(source, number, line) for number, line in stripped if line]


def _read_deepspeed(line: _Line) -> Iterable[ListedHost]:
    name, *rest = line.text.split()
    if len(rest) != 1 or not rest[0].startswith("slots="):
        raise line.refuse(f"{line.text!r} is no line of DeepSpeed's host file", f"write  {name} slots=8")
    yield ListedHost(_check_name(name, line), _parse_slots(rest[0].removeprefix("slots="), line), line.origin)


def _read_openmpi(line: _Line) -> Iterable[ListedHost]:
    if _RANKFILE.match(line.text):
        raise line.refuse(f"{line.text!r} is a line of a rank file, not of a host file", "give the host file")
    name, *words = _ASSIGNMENT.sub("=", line.text).split()
    if name.startswith("+"):
        raise line.refuse(f"{name!r} is a place in an allocation, not a host", "write the name of the host")
    values: dict[str, int] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = {"max_slots": "max_slots", "slots_max": "max_slots", "count": "slots", "cpu": "slots"}.get(
            key.replace("-", "_"), key
        )
        if not equals or key not in ("slots", "max_slots"):
            raise line.refuse(f"{word!r} is not known in a host file of Open MPI", "write slots=8 or max_slots=8")
        values[key] = _parse_slots(value, line)
    slots, most = values.get("slots"), values.get("max_slots")
    if slots is not None and most is not None and slots > most:
        raise line.refuse(f"slots={slots} is more than max_slots={most}", "lower slots")
    yield ListedHost(_check_name(name.rpartition("@")[2], line), slots, line.origin)


def _read_mpich(line: _Line) -> Iterable[ListedHost]:
    first, *options = line.text.split()
    match = _MPICH.fullmatch(f"[{first}]" if first.count(":") > 1 and first[0] != "[" else first)
    strange = next((word for word in options if not re.match(r"(binding|ifname|user|iface)=", word)), None)
    if match is None or strange is not None:
        shown = strange or first
        raise line.refuse(f"{shown!r} is not known in a host file of MPICH", "write  host-a:8")
    count = None if match.group(2) is None else _parse_slots(match.group(2), line)
    yield ListedHost(_check_name(match.group(1).strip("[]"), line), 1 if count is None else count, line.origin)


def _read_slurm(line: _Line) -> Iterable[ListedHost]:
    try:
        for host in HostList.parse(line.text):
            yield ListedHost(host.name, host.num_devices, line.origin)
    except HostListError as error:
        raise line.refuse(error.message, error.remedy) from error


def _read_plain(line: _Line) -> Iterable[ListedHost]:
    if len(line.text.split()) > 1:
        raise line.refuse(f"{line.text!r} is more than a name", "write one host per line, or host-a slots=8")
    yield ListedHost(_check_name(line.text, line), None, line.origin)


_READERS: dict[str, Callable[[_Line], Iterable[ListedHost]]] = {
    "deepspeed": _read_deepspeed,
    "openmpi": _read_openmpi,
    "mpich": _read_mpich,
    "slurm": _read_slurm,
    "plain": _read_plain,
}


def _parse_slots(text: str, line: _Line) -> int:
    slots = slots_of(text)
    if not slots:
        raise line.refuse(f"{text!r} is no number of slots", f"write a number from 1 to {MAX_SLOTS}")
    return slots


def _check_name(name: str, line: _Line) -> str:
    try:
        hosts = HostList.parse(f"[{name}]" if name.count(":") > 1 else name).hosts
    except HostListError as error:
        raise line.refuse(f"{name!r} is no host name or address", "write host-a slots=8") from error
    if len(hosts) != 1 or hosts[0].name != name:
        raise line.refuse(f"{name!r} is not one host", "write one host per line, or give --hostfile_format slurm")
    return name


def _join_repeats(
    listed: list[ListedHost], lines: list[_Line], form: HostfileFormat, *, is_guess: bool
) -> tuple[ListedHost, ...]:
    """Add the slots of repeated hosts up where the format says so, else refuse them."""
    kept: dict[str, ListedHost] = {}
    for host in listed:
        first = kept.setdefault(host.name, host)
        if first is host:
            continue
        if form in ("deepspeed", "slurm", "plain"):
            raise _refuse_repeat(first, host, lines[0].source, form, is_guess=is_guess)
        added = (1 if first.num_slots is None else first.num_slots) + (1 if host.num_slots is None else host.num_slots)
        kept[host.name] = ListedHost(host.name, added, first.origin)
    return tuple(kept.values())


def _refuse_repeat(
    first: ListedHost, second: ListedHost, source: str, form: HostfileFormat, *, is_guess: bool
) -> SourceError:
    line = int(second.origin.rpartition(":")[2])
    reader = {"deepspeed": "DeepSpeed refuses that", "slurm": "a host list names each once"}.get(form, "")
    message = f"host {second.name!r} stands at {first.origin} already{f'; {reader}' if reader else ''}"
    remedy = "remove one, or add the lines up with --hostfile_format openmpi" if is_guess else "remove one of the two"
    return SourceError(source, line, message, remedy)


def read_slurm_hosts(environment: Mapping[str, str]) -> tuple[ListedHost, ...]:
    """Return the hosts of the job in Slurm's order with their tasks as slots (None where Slurm does not tell).

    Raises SourceError that names the variable.
    """
    list_name = next((name for name in _NODE_LISTS if environment.get(name)), None)
    if list_name is None:
        message = "the variable is not set, so this is no job of Slurm"
        raise SourceError(_NODE_LISTS[0], None, message, "run it inside sbatch or salloc, or give --hosts")
    hosts = _parse_nodes(environment[list_name], list_name)
    count_name = next((name for name in _TASK_COUNTS if environment.get(name)), None)
    if count_name is None:
        return tuple(ListedHost(name, None, list_name) for name in hosts)
    counts = parse_task_counts(environment[count_name], count_name)
    if count_name == "SLURM_NTASKS_PER_NODE" and len(counts) == 1:
        counts *= len(hosts)
    if len(counts) != len(hosts):
        message = f"{environment[count_name]!r} counts {len(counts)} hosts, {list_name} names {len(hosts)}"
        raise SourceError(count_name, None, message, "take both from the same job")
    return tuple(ListedHost(name, count, list_name) for name, count in zip(hosts, counts, strict=True))


def parse_task_counts(text: str, source: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Return the count of each host: `8(x2),4` is 8, 8, 4. Raises SourceError.

    >>> parse_task_counts("8(x2),4")
    [8, 8, 4]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise SourceError(source, None, f"{part!r} is no count of tasks", "it is to look like 8(x2),4")
        repeats = int(match.group(2) or 1)
        if len(counts) + repeats > MAX_HOSTS:
            raise SourceError(source, None, f"it counts more than {MAX_HOSTS} hosts", "check the repeats")
        counts += [int(match.group(1))] * repeats
    return counts


def _parse_nodes(text: str, source: str) -> list[str]:
    try:
        hosts = HostList.parse(text)
    except HostListError as error:
        raise SourceError(source, None, error.fault, error.remedy) from error
    counted = next((host for host in hosts if host.num_devices is not None), None)
    if counted is not None:
        message = f"host {counted.name!r} has a count, which node lists of Slurm do not have"
        raise SourceError(source, None, message, "check the variable")
    return [host.name for host in hosts]
