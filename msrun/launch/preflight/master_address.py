"""At which address of node 0 the scheduler listens, so that the other hosts reach it. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msrun.errors import UsageError
from msrun.launch.preflight.host_report import HostAnswer, is_numeric
from msrun.planning.hosts.host_entry import HostEntry
from msrun.planning.spec import is_loopback

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class MasterAddress:
    """The scheduler's numeric address, and why it is this one."""

    address: str
    reason: str


def choose_master_address(
    entries: Sequence[HostEntry], answers: Mapping[int, HostAnswer], given: str = ""
) -> MasterAddress:
    """Return where the scheduler listens.

    The given address, or that of the host list; without them the one that another machine is known to have reached
    node 0 by: the launcher, or the hosts that see it as their launcher; else one in a network that the others are in.

    Args:
        answers: of the hosts that have answered, node 0 among them.
        given: --master_addr; empty when it was not given. A name was resolved on node 0.

    Raises:
        UsageError: the address is not node 0's, or it is loopback, or none can be found.
    """
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
            return MasterAddress(_checked(address, own, entry, source), source)
    for address, reason in _candidates(answers):
        if address in own:
            return MasterAddress(address, reason)
    raise UsageError(
        f"{entry.name}: no address of it is known that the other hosts could reach, and it is to run the scheduler; "
        "give --master_addr"
    )


def _checked(address: str, own: set[str], entry: HostEntry, source: str) -> str:
    if address and is_loopback(address):
        raise UsageError(f"{source}: other hosts cannot reach {address}; give an address of {entry.name} that they can")
    normal = str(ipaddress.ip_address(address)) if address else ""
    if normal not in own:
        raise UsageError(
            f"{source}: not an address of {entry.name}, the first host, which runs the scheduler; "
            f"give one of {', '.join(sorted(own)) or 'its addresses'}"
        )
    return normal


def _candidates(answers: Mapping[int, HostAnswer]) -> Iterator[tuple[str, str]]:
    first = answers[0]
    others = [answer for node, answer in sorted(answers.items()) if node]
    yield first.reached_as, "by which it was reached from here"
    for address, count in Counter(answer.report.ssh_client for answer in others).most_common():
        yield address, f"by which {count} of the other hosts were reached"
    yield first.report.ssh_server, "by which it was reached through ssh"
    for entry in first.report.routable:
        network = entry.network
        if network is not None and all(_is_in(answer, network) for answer in others):
            yield entry.address, f"in {network}, a network of all hosts"
    yield next((entry.address for entry in first.report.routable), ""), "the first address of its host"


def _is_in(answer: HostAnswer, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    return any(ipaddress.ip_address(entry.address) in network for entry in answer.report.routable)
