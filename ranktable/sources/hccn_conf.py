"""Reads /etc/hccn.conf: which device has which address. `address_N` lines in any order; ids may have gaps.

Source: the network configuration pages of the Ascend driver (`address_N`, `netmask_N`, `netdetect_N`, gateway and
`xsfp_reset` lines, as key=value), and the MindSpore tutorial that takes `device_ip` from it.
"""

from __future__ import annotations

import re

from ranktable.errors import SourceError
from ranktable.sources.answer import HostAnswers, Said, check_device_address

_ADDRESS = re.compile(r"(?:ipv6)?address_([0-9]{1,4})", re.IGNORECASE)
_LINE = re.compile(r"([^=\s]+)\s*=\s*(.*)")


def parse_hccn_conf(data: bytes, source: str) -> HostAnswers:
    """Return the addresses in a copy of hccn.conf; an IPv6 address counts where a device has no other.

    Raises SourceError with the line for an address that is none, for a device with two, and for a file without any.
    """
    first: dict[int, Said] = {}
    second: dict[int, Said] = {}
    for number, text in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        line = text.partition("#")[0].strip()
        match = _LINE.fullmatch(line)
        if line and match is None:
            raise SourceError(source, number, f"{line[:60]!r} is not key=value", "give a copy of /etc/hccn.conf")
        key = _ADDRESS.fullmatch(match.group(1)) if match else None
        if match is None or key is None:
            continue
        said, device_id = Said(match.group(2).strip().partition("/")[0], source, number), int(key.group(1))
        is_ipv6 = check_device_address(said, device_id).version == 6
        _add(second if is_ipv6 else first, device_id, said)
    if not first and not second:
        raise SourceError(source, None, "it has no address_N line", "give a copy of /etc/hccn.conf, or of hccn_tool")
    left_out = sum(device_id in first for device_id in second)
    notes = (f"{source}: the IPv6 addresses of {left_out} devices are left out beside IPv4 ones",) if left_out else ()
    return HostAnswers({**second, **first}, notes=notes)


def _add(addresses: dict[int, Said], device_id: int, said: Said) -> None:
    earlier = addresses.setdefault(device_id, said)
    if earlier.value != said.value:
        message = f"device {device_id} has address {said.value} here and {earlier.value} at {earlier.origin}"
        raise said.refuse(message, "remove the stale line")
