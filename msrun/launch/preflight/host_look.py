"""What an agent looks at on its host before a job starts. Costs little and never fails: what cannot be seen is said."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from msrun import __version__, contract
from msrun.agent.host.installed import installed_version
from msrun.errors import ClusterError, MsrunError
from msrun.launch.preflight.checks import CHECKS, FULL_DISK_BYTES, LOW_DISK_BYTES, Check, place_own_devices
from msrun.launch.preflight.finding import Finding
from msrun.launch.preflight.host_report import MAX_ADDRESSES, HostAddress, HostReport, is_numeric
from msrun.launch.preflight.host_room import format_bytes, free_disk_bytes
from msrun.launch.preflight.log_share import sees_word
from msrun.launch.preflight.program_sources import read_sources
from msrun.planning.spec import LaunchSpec

T = TypeVar("T")

NOT_OF_ONE_HOST = frozenset({"master_port", "rank_table", "python", "tls"})
"""Checks that the launcher makes for all hosts together."""
OF_LOG_DIR = frozenset({"log_dir", "disk"})
"""Of a host that writes its logs where the launcher does; another keeps them until they are sent."""
ONLY_WHEN_DOUBTFUL = frozenset({"program", "torch"})
"""The launcher compares these between hosts, and says that they are well."""
NEEDED_PACKAGES = ("psutil",)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SSH_CONNECTION = "SSH_CONNECTION"
"""Set by sshd: address and port of the client, address and port of the server. Source: ssh(1)."""


def make_host_report(
    spec: LaunchSpec,
    caller: Mapping[str, str],
    *,
    asked_at: float,
    shown: Mapping[str, str] | None = None,
    master_name: str = "",
) -> HostReport:
    """Look at this host.

    Args:
        spec: this host's part of the job: its program, folders and number of workers.
        caller: the environment that workers inherit here.
        asked_at: this host's clock (`time.time`) when the launcher's question came.
        shown: what `log_share.shown_word` left in the launcher's log directory.
        master_name: a host name to resolve here; asked of the host that is to run the scheduler.
    """
    look = _Look()
    sources: tuple[tuple[str, str], ...] = look.at("program", lambda: _read_program(spec, look), ())
    look.at("working_dir", lambda: _check_folder(spec, look), None)
    sees_log_dir = sees_word(shown or {})
    for check in CHECKS:
        is_asked = check.name not in NOT_OF_ONE_HOST and (sees_log_dir or check.name not in OF_LOG_DIR)
        if is_asked and not look.has_failed(check.name):
            look.at(check.name, partial(look.judge, check, spec, caller), None)
    if not sees_log_dir:
        look.at("disk", lambda: look.findings.append(_look_at_spool_disk()), None)
    target = ""
    if not look.has_failed("devices"):
        target = look.at("devices", lambda: place_own_devices(spec, caller).target, "")
    look.at("packages", _check_packages, None)
    client, server = _ssh_ends(os.environ.get(SSH_CONNECTION, ""))
    return HostReport(
        host_name=spec.stands_for.name if spec.stands_for else socket.gethostname(),
        python_version=".".join(map(str, sys.version_info[:3])),
        python_path=sys.executable or "",
        msrun_version=__version__,
        torch_version=look.at("torch", lambda: installed_version("torch"), ""),
        numpy_version=look.at("numpy", lambda: installed_version("numpy"), ""),
        architecture=os.uname().machine,
        boot_id=look.at("boot_id", _boot_id, ""),
        device_target=target,
        ssh_client=client,
        ssh_server=server,
        master_address=look.at("master_addr", lambda: _resolve(master_name), ""),
        received_at=asked_at,
        sees_log_dir=sees_log_dir,
        sources=sources,
        addresses=() if look.has_failed("packages") else look.at("addresses", partial(_addresses_of, spec), ()),
        findings=tuple(look.findings),
        made_at=time.time(),
    )


class _Look:
    """Collects findings; whatever a look raises becomes one."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def at(self, name: str, look: Callable[[], T], otherwise: T) -> T:
        """Return what a look gives; `otherwise` when it cannot be had."""
        try:
            return look()
        except MsrunError as error:
            self.findings.append(Finding("fail", name, str(error), error.exit_code))
        except Exception as error:  # noqa: BLE001 - an odd host must be named, not break the start of all
            self.findings.append(Finding("warn", name, f"cannot be looked at ({type(error).__name__}: {error})"))
        return otherwise

    def judge(self, check: Check, spec: LaunchSpec, caller: Mapping[str, str]) -> None:
        """Make one of the checks that every host makes."""
        finding = check.look(spec, caller)
        if finding.status != "ok" or check.name not in ONLY_WHEN_DOUBTFUL:
            self.findings.append(finding)

    def has_failed(self, name: str) -> bool:
        """Return whether enough is known of this already."""
        return any(finding.name == name and finding.status == "fail" for finding in self.findings)


def _read_program(spec: LaunchSpec, look: _Look) -> tuple[tuple[str, str], ...]:
    program = spec.program
    try:
        sources = tuple(read_sources(program, spec.working_directory))
    except OSError as error:
        _refuse(
            look, "program", f"{program.target}: {error.strerror}; copy it there, or use a disk that all hosts share"
        )
        return ()
    if program.kind == "executable" and not os.access(program.target, os.X_OK):
        _refuse(look, "program", f"{program.target}: is not executable there; run chmod +x {program.target}")
    return sources


def _check_folder(spec: LaunchSpec, look: _Look) -> None:
    folder = spec.working_directory
    if not os.access(folder, os.X_OK):
        _refuse(look, "working_dir", f"{folder}: no such directory there, or no permission; make it, or give --chdir")
    elif not folder.is_dir():
        _refuse(look, "working_dir", f"{folder}: is no directory there; give --chdir")


def _look_at_spool_disk() -> Finding:
    """Look at where logs wait until the launcher has them: behind a slow link that may be all of them."""
    folder = Path(tempfile.gettempdir())
    free = free_disk_bytes(folder)
    if free is None:
        return Finding("ok", "disk", f"{folder}: its file system does not count free space")
    if free < FULL_DISK_BYTES:
        raise ClusterError(f"the disk of {folder}, where logs wait to be sent, is full; make room, or set TMPDIR there")
    is_low = free < LOW_DISK_BYTES
    return Finding("warn" if is_low else "ok", "disk", f"{format_bytes(free)} free for logs on their way in {folder}")


def _refuse(look: _Look, name: str, text: str) -> None:
    look.findings.append(Finding("fail", name, text, contract.EXIT_USAGE))


def _check_packages() -> None:
    """Look for what an agent cannot do without: with --ship, or on a shared disk, msrun is there and these may not be.

    Raises:
        ClusterError: this Python lacks some.
    """
    missing = [name for name in NEEDED_PACKAGES if find_spec(name) is None]
    if missing:
        raise ClusterError(
            f"{', '.join(missing)} not installed for {sys.executable}, and msrun needs it there; install it, or name "
            "another Python by --python, or by python= in the hostfile"
        )


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # not every container shows it; then two names of one machine are told apart by nothing
        return ""


def _resolve(name: str) -> str:
    if not name:
        return ""
    if is_numeric(name):
        return name
    from msrun.cluster.addresses import resolve_address

    return resolve_address(name)


def _ssh_ends(connection: str) -> tuple[str, str]:
    words = connection.split()
    if len(words) != 4:
        return "", ""
    client, server = (word.partition("%")[0].removeprefix("::ffff:") for word in (words[0], words[2]))
    return (client, server) if is_numeric(client) and is_numeric(server) else ("", "")


def _addresses_of(spec: LaunchSpec) -> tuple[HostAddress, ...]:
    return () if spec.stands_for else read_addresses()


def read_addresses() -> tuple[HostAddress, ...]:
    """Return the addresses of this host by which another could reach it, in the order of its interfaces."""
    import psutil

    found = []
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                address = HostAddress(entry.address.partition("%")[0], interface, _prefix_bits(entry.netmask))
                found += [address] if address.is_routable else []
    return tuple(found[:MAX_ADDRESSES])


def _prefix_bits(netmask: str | None) -> int:
    """Return the number of ones in 255.255.255.0 or ffff:ffff::."""
    if not netmask:
        return 0
    family = socket.AF_INET6 if ":" in netmask else socket.AF_INET
    return int.from_bytes(socket.inet_pton(family, netmask)).bit_count()
