"""Asks this host what it has: device nodes, hccn.conf, hccn_tool, npu-smi, its address. Nothing is guessed.

On a host with GPUs or without accelerators the result has the host's address and no device address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ranktable.assembly.inventory import FoundDevice, HostInventory
from ranktable.errors import BuildError, SourceError
from ranktable.sources.answer import HostAnswers, found_devices, join_answers
from ranktable.sources.device_tools import DeviceTools
from ranktable.sources.hccn_conf import read_answers
from ranktable.sources.local_host import find_device_ids, read_local_host

_NODE_NAMES = {"ascend": "/dev/davinciN", "gpu": "/dev/nvidiaN"}


@dataclass(frozen=True, slots=True)
class Probed:
    """What this host has, for which target, and what is worth a word."""

    host: HostInventory
    device_target: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probe:
    """How to ask this host."""

    root: Path = Path("/")
    """Folder that holds the host's /dev, /etc and /proc: another one in a container that has them mounted."""
    tools: DeviceTools | None = None
    """How to ask hccn_tool and npu-smi; None means on PATH, then where the driver below `root` has them."""
    server_id: str | None = None
    """The id to use in place of the host's main address."""
    asks_super_pod: bool = False

    def ask(self, device_target: str | None = None, device_ids: Sequence[int] | None = None) -> Probed:
        """Return the host with its devices, or those of `device_ids`.

        Raises BuildError for a target or a device that is not there, SourceError for answers that cannot be taken.
        """
        target = device_target or self._find_target()
        local = read_local_host(self.root)
        chosen = self._choose_devices(target, device_ids)
        devices, pod_id, notes = self._ask_devices(chosen) if target == "ascend" else (_plain(chosen), None, ())
        address = None if local.main_address is None else str(local.main_address)
        server_id = self.server_id or address or local.name
        if self.server_id is None and len(local.addresses) > 1:
            notes += (f"server_id is {server_id}, one of {len(local.addresses)} addresses; choose with --server_id",)
        elif self.server_id is None and address is None:
            notes += (f"server_id is the name {server_id}: this host has no address but loopback",)
        host = HostInventory(server_id, devices, address, super_pod_id=pod_id, origin="this host")
        return Probed(host, target, (f"asked this host: {target}, {_count(devices)}", *notes))

    def _find_target(self) -> str:
        found = [target for target in ("ascend", "gpu") if find_device_ids(target, self.root)]
        if len(found) > 1:
            raise BuildError("this host has Ascend devices and GPUs", "choose with --device_target")
        return found[0] if found else "cpu"

    def _choose_devices(self, target: str, asked: Sequence[int] | None) -> Sequence[int]:
        present = find_device_ids(target, self.root)
        if target == "cpu":
            if asked is None:
                message = "this host has no accelerator, so the number of its processes is not known"
                raise BuildError(message, "give --devices 0-7 for 8 processes")
            return asked
        if not present:
            message = f"there is no {_NODE_NAMES[target]} below {self.root}"
            raise BuildError(message, "mount the devices into the container, or choose another --device_target")
        missing = [device_id for device_id in asked or () if device_id not in present]
        if missing:
            message = f"device {missing[0]} is not on this host, which has {', '.join(map(str, present))}"
            raise BuildError(message, "give physical device ids")
        return present if asked is None else asked

    def _ask_devices(self, device_ids: Sequence[int]) -> tuple[tuple[FoundDevice, ...], str | None, tuple[str, ...]]:
        """Ask hccn_tool and read hccn.conf, which must agree; npu-smi only when super pods are wanted."""
        tools = self.tools or DeviceTools(self.root)
        said = tools.ask_addresses(device_ids)
        conf = self.root / "etc/hccn.conf"
        answers = [said] if said else []
        answers += [_only(read_answers(conf), device_ids)] if conf.is_file() else []
        pod = tools.ask_super_pod(device_ids) if self.asks_super_pod else None
        joined = join_answers([*answers, *([pod] if pod else [])])
        notes = joined.notes
        if not joined.addresses:
            shown = next(iter(joined.failed.values()), None)
            why = f"hccn_tool says {shown.value!r}" if shown else "neither hccn_tool nor /etc/hccn.conf is there"
            notes += (f"no device_ip is known: {why}",)
            joined = HostAnswers({}, joined.super_device_ids, joined.super_pod_id)
        self._refuse_gaps(joined, device_ids)
        pod_id = joined.super_pod_id.value if joined.super_pod_id else None
        return found_devices(joined, device_ids, "this host"), pod_id, notes

    def _refuse_gaps(self, answers: HostAnswers, device_ids: Sequence[int]) -> None:
        missing = [device_id for device_id in device_ids if device_id not in answers.addresses]
        if answers.addresses and missing and missing[0] not in answers.failed:
            message = f"it has no address for device {missing[0]}, but for {len(answers.addresses)} others"
            raise SourceError(str(self.root / "etc/hccn.conf"), None, message, "complete it, or choose --devices")


def _only(answers: HostAnswers, device_ids: Sequence[int]) -> HostAnswers:
    """Return what concerns these devices: in a container hccn.conf lists all of the host's."""
    wanted = frozenset(device_ids)
    kept = {device_id: said for device_id, said in answers.addresses.items() if device_id in wanted}
    return HostAnswers(kept, notes=answers.notes)


def _plain(device_ids: Sequence[int]) -> tuple[FoundDevice, ...]:
    return tuple(FoundDevice(device_id) for device_id in device_ids)


def _count(devices: Sequence[FoundDevice]) -> str:
    return f"{len(devices)} device{'' if len(devices) == 1 else 's'}"
