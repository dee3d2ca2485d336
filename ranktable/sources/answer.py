"""What one source says about one device of a host, with its place; and how several sources are put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ranktable.errors import SourceError
from ranktable.model import Device
from ranktable.values import Address, name_placeholder, parse_address


@dataclass(frozen=True, slots=True)
class Said:
    """A value and where it stands."""

    value: str
    source: str
    line: int | None = None

    @property
    def origin(self) -> str:
        """`FILE:LINE`, or the name of what was asked."""
        return self.source if self.line is None else f"{self.source}:{self.line}"

    def refuse(self, message: str, remedy: str) -> SourceError:
        """Return the error that this value cannot be taken."""
        return SourceError(self.source, self.line, message, remedy)


@dataclass(frozen=True, slots=True)
class HostAnswers:
    """What one source says about the devices of one host."""

    addresses: Mapping[int, Said] = field(default_factory=dict)
    """`device_ip` by device id."""
    super_device_ids: Mapping[int, Said] = field(default_factory=dict)
    super_pod_id: Said | None = None
    failed: Mapping[int, Said] = field(default_factory=dict)
    """Devices whose address was asked for and not given; the value is what the tool said instead."""
    notes: tuple[str, ...] = ()


def check_device_address(said: Said, device_id: int) -> Address:
    """Return the address that a tool or file gives; raises SourceError for what is none."""
    address = parse_address(said.value)
    what = name_placeholder(said.value) or ("not an IPv4 or IPv6 address" if address is None else None)
    if address is None or what:
        message = f"the address {said.value!r} of device {device_id} is {what}"
        raise said.refuse(message, f"set one with hccn_tool -i {device_id} -ip -s address A netmask M, and ask again")
    return address


def add_answer(addresses: dict[int, Said], device_id: int, said: Said, remedy: str) -> None:
    """Add the address of a device; raises SourceError when the same source gives it another one elsewhere."""
    earlier = addresses.setdefault(device_id, said)
    if earlier.value != said.value:
        message = f"device {device_id} has address {said.value} here and {earlier.value} at {earlier.origin}"
        raise said.refuse(message, remedy)


def join_answers(answers: Iterable[HostAnswers]) -> HostAnswers:
    """Return what several sources say together; raises SourceError with both places when two disagree."""
    addresses: dict[int, Said] = {}
    numbers: dict[int, Said] = {}
    failed: dict[int, Said] = {}
    pod: Said | None = None
    notes: tuple[str, ...] = ()
    for answer in answers:
        for device_id, said in answer.addresses.items():
            _agree(addresses.setdefault(device_id, said), said, f"device_ip of device {device_id}")
        for device_id, said in answer.super_device_ids.items():
            _agree(numbers.setdefault(device_id, said), said, f"super_device_id of device {device_id}")
        if answer.super_pod_id is not None:
            pod = pod or answer.super_pod_id
            _agree(pod, answer.super_pod_id, "super pod id")
        failed.update(answer.failed)
        notes += answer.notes
    return HostAnswers(addresses, numbers, pod, failed, notes)


def found_devices(answers: HostAnswers, device_ids: Iterable[int] | None, server_id: str) -> tuple[Device, ...]:
    """Return the devices that the answers speak of, or those of `device_ids`.

    A device whose address a tool failed to give is an error that quotes the tool, never a device without address.
    Raises SourceError.
    """
    known = sorted({*answers.addresses, *answers.super_device_ids, *answers.failed})
    chosen = known if device_ids is None else list(device_ids)
    for device_id in chosen:
        failure = answers.failed.get(device_id)
        if failure is not None and device_id not in answers.addresses:
            shown = f"the answer is {failure.value!r}" if failure.value else "the answer is empty"
            message = f"device {device_id} of {server_id!r} has no address: {shown}"
            raise failure.refuse(message, "set its address with hccn_tool, or leave the device out with --devices")
    return tuple(
        Device(device_id, -1, _value(answers.addresses, device_id), _value(answers.super_device_ids, device_id))
        for device_id in chosen
    )


def _value(said: Mapping[int, Said], device_id: int) -> str | None:
    found = said.get(device_id)
    return None if found is None else found.value


def _agree(first: Said, second: Said, what: str) -> None:
    if first is second or _plain(first.value) == _plain(second.value):
        return
    message = f"the {what} is {second.value} here, but {first.value} at {first.origin}"
    raise second.refuse(message, "one of the two is stale: correct it, the device itself (hccn_tool) is right")


def _plain(text: str) -> object:
    return parse_address(text) or text
