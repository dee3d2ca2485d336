"""Rules R3 and R6 to R12: status, counts, the ids of servers, devices and ranks, and the order of the ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from ranktable.hosts.ranges import fold_numbers
from ranktable.kinds import dialect_of, find_repeats
from ranktable.model import COMPLETED, Entry, RankTable, Server
from ranktable.problem import Problem, Severity, join_key, show_value
from ranktable.profile import Profile
from ranktable.rules import Rule, chip_of, citations, severity_on
from ranktable.schema import Schema
from ranktable.values import count_noun, is_loopback, name_placeholder, parse_address

MAX_SERVER_ID_LENGTH = 64
MAX_DEVICE_ID = {"910a": 7, "a2": 15, "a3": 15, "300i-duo": 31, "a5": 64}
"""Highest physical device id of each chip."""
_CONCISE = (citations.CONCISE,)


@Rule("R3", 'status is "completed"', is_whole=True, sources=(citations.PARSER,))
def check_status(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """HCCL reads a file with another status again every second, for half an hour, and then gives up."""
    if table.text("status") not in (None, COMPLETED):
        message = 'the table is not ready: a reader waits until the status is "completed"'
        yield table.complain("status", "R3", message, 'wait for its producer, or write "completed" when it is')


@Rule("R6", "server_count is the number of entries of server_list", sources=_CONCISE)
def check_server_count(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """The count is compared with what is listed."""
    schema = dialect_of(table.dialect).known_schema
    yield from check_counts(table, schema.within(table.path.partition("[")[0]) if table.path else schema)


def check_counts(entry: Entry, schema: Schema) -> Iterator[Problem]:
    """Yield a problem for each count of a table or group that is not the number of what is listed there."""
    for field in schema.fields:
        declared = entry.number(field.name)
        if field.count is None or declared is None:
            continue
        found, noun = field.count.of(entry.members) or 0, field.count.noun
        if declared != found:
            message = f"the {'group' if entry.path else 'table'} lists {count_noun(found, noun)}"
            written = found if field.kind == "integer" else f'"{found}"'
            yield entry.complain(field.name, field.rule, message, f"write {written}, or list the missing {noun}s")


@Rule(
    "R7", "server_id is a unique name or address of 1 to 64 characters", severity="error or warning", sources=_CONCISE
)
def check_server_ids(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """In a group of MindIE two pods of one host share its id and have their own `server_ip`: a warning."""

    def severity(first: Server, second: Server) -> Severity:
        addresses = (first.text("server_ip"), second.text("server_ip"))
        are_pods = bool(table.path) and None not in addresses and addresses[0] != addresses[1]
        return "warning" if are_pods else "error"

    for server in table.servers:
        server_id = server.text("server_id")
        if server_id is None:
            continue
        what = name_placeholder(server_id)
        if what or not server_id.strip():
            message = f"the id is {what or 'empty'}, not the address or name of a host"
            yield server.complain("server_id", "R7", message, "write the address or name of this host")
        elif len(server_id) > MAX_SERVER_ID_LENGTH:
            message = f"the id has {len(server_id)} characters, at most {MAX_SERVER_ID_LENGTH} are read"
            yield server.complain("server_id", "R7", message, "shorten it")
        elif len(table.servers) > 1 and is_loopback(server_id):
            message = "the id is a loopback address in a table of several servers"
            yield server.complain("server_id", "R7", message, "write an address of the host", "warning")
    same, remedy = "the same server_id stands at {}", "give each server its own id"
    yield from find_repeats(table.servers, "server_id", "R7", same, remedy, severity=severity)


@Rule("R8", "device_id is a physical device number that is unique on its server", sources=_CONCISE)
def check_device_ids(table: RankTable, profile: Profile) -> Iterator[Problem]:
    """The highest number depends on the chip; without a chip it is that of the largest, the 300I Duo."""
    chip = chip_of(table, profile)
    highest = MAX_DEVICE_ID[chip or "300i-duo"]
    for server in table.servers:
        for device in server.devices if profile.is_ascend else ():
            if device.device_id > highest:
                message = f"the highest device number is {highest} on {chip or 'any chip of version 1.0'}"
                yield device.complain("device_id", "R8", message, "write the physical number of the device")
        same, remedy = "the same device_id stands at {}", "give each device of a server its own number"
        yield from find_repeats(
            server.devices, "device_id", "R8", same, remedy, lambda device: device.number("device_id")
        )


@Rule("R9", "the rank ids are 0 to n-1, each once", sources=_CONCISE)
def check_rank_ids(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """Ranks go from 0 in each group, and with `deploy_server` "0" on each server where all of them do so."""
    with_ranks = [server for server in table.servers if server.devices]
    is_each_alone = table.text("deploy_server") == "0" and all(server.ranks[:1] == (0,) for server in with_ranks)
    for servers in [[server] for server in with_ranks] if is_each_alone else [table.servers]:
        ranks = [(device, device.rank_id) for server in servers for device in server.devices]
        yield from check_ranks(ranks, "R9", "the group has" if table.path else "the table has", "device", '"{}"')


def check_ranks(
    ranks: Sequence[tuple[Entry, int | None]], rule_id: str, holder: str, noun: str, written: str = "{}"
) -> Iterator[Problem]:
    """Yield a problem for each rank that is not one of 0 to n-1 or stands twice; `written` is the form of a rank."""
    size = len(ranks)
    first_paths: dict[int, str] = {}
    wrong: list[tuple[Entry, str]] = []
    for entry, rank in ranks:
        if rank is None or rank < 0:
            continue
        if rank >= size:
            wrong.append((entry, f"{holder} {count_noun(size, noun)}, so ranks go from 0 to {size - 1}"))
        elif rank in first_paths:
            wrong.append((entry, f"the same rank_id stands at {first_paths[rank]}"))
        else:
            first_paths[rank] = entry.path_of("rank_id")
    missing = (rank for rank in range(size) if rank not in first_paths)
    for entry, message in wrong:
        remedy = f"write {written.format(next(missing))}, a rank that is missing"
        yield entry.complain("rank_id", rule_id, message, remedy)


@Rule(
    "R10", "the ranks of one server follow each other without a gap", severity="warning", sources=(citations.A3_PAGE,)
)
def check_ranks_contiguous(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """Interleaved servers make every rank guess of the form rank = server x devices + i wrong."""
    for server in table.servers:
        ranks = server.ranks
        if any(after - before > 1 for before, after in pairwise(ranks)):
            message = f"the ranks of this server have gaps: {fold_numbers(ranks)}"
            yield about_devices(server, "R10", "warning", message, "number the devices of each server in one row")


@Rule(
    "R11",
    "the order of the ranks is the string order of the server ids, as MindSpore demands",
    severity="error or warning",
    sources=(citations.MINDSPORE,),
)
def check_server_order(table: RankTable, profile: Profile) -> Iterator[Problem]:
    """MindSpore asks for it ("10.0.0.10" before "10.0.0.9"): an error for that reader, a warning without one."""
    if not profile.is_ascend or profile.reader not in (None, "mindspore"):
        return
    with_ranks = [(server.ranks[0], server.server_id, server) for server in table.servers if server.ranks]
    by_rank = sorted(with_ranks, key=lambda entry: entry[0])
    for (_, earlier, _), (rank, server_id, server) in pairwise(by_rank):
        if server_id < earlier:
            message = f"its ranks start at {rank}, after those of {show_value(earlier)}, but its id sorts before that"
            remedy = "number the servers in the string order of their ids"
            yield server.complain("server_id", "R11", message, remedy, "error" if profile.reader else "warning")


@Rule(
    "R12",
    "on one server the order of the ranks is that of the device ids",
    severity="warning",
    chips=("910a", "a2"),
    sources=(citations.A3_PAGE,),
)
def check_device_order(table: RankTable, profile: Profile) -> Iterator[Problem]:
    """The physical order that 910A and A2 expect."""
    for server in table.servers if severity_on(table, profile, "910a", "a2") else ():
        pairs = [
            (device.device_id, device.rank_id)
            for device in server.devices
            if min(device.device_id, device.rank_id) >= 0
        ]
        by_device = [rank for _, rank in sorted(pairs)]
        if by_device != sorted(by_device):
            message = f"in the order of device_id the ranks are {', '.join(map(str, by_device))}"
            yield about_devices(server, "R12", "warning", message, "number the devices in the order of device_id")


@Rule(
    "P6",
    "server_id is the address of the host",
    severity="warning",
    readers=("mindspore",),
    sources=(citations.MINDSPORE,),
)
def check_server_addresses(table: RankTable, _profile: Profile) -> Iterator[Problem]:
    """HCCL takes any name; MindSpore's documentation asks for the address."""
    for server in table.servers:
        if server.text("server_id") is not None and parse_address(server.server_id) is None:
            message = "the id is not an address; MindSpore's documentation asks for the host's address"
            yield server.complain("server_id", "P6", message, "write the address of the host", "warning")


def check_cover(
    members: Collection[Entry], listed: Collection[Entry], key: str, where: str, rule_id: str, holder: str
) -> Iterator[Problem]:
    """Yield a problem for each member that is not listed or is there twice, and for what is listed and no member."""
    known, named = {entry.text(key) for entry in listed}, {entry.text(key) for entry in members}
    for entry in members:
        if entry.text(key) is not None and entry.text(key) not in known:
            yield entry.complain(key, rule_id, f"the id is not in {where}", f"write the id as it stands in {where}")
    inside = (entry for entry in members if entry.text(key) in known)
    yield from find_repeats(inside, key, rule_id, "it stands at {} already", "list it once")
    for entry in listed:
        if entry.text(key) is not None and entry.text(key) not in named:
            message = f"the {key.removesuffix('_id').replace('_', ' ')} is in no {holder}"
            yield entry.complain(key, rule_id, message, f"list it in its {holder.partition(' of ')[0]}")


def about_devices(server: Server, rule_id: str, severity: Severity, message: str, remedy: str) -> Problem:
    """Return a problem about all devices of a server."""
    return Problem(join_key(server.path, "device"), rule_id, severity, message, remedy)
