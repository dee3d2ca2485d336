"""What an agent looks at on its host before a job starts. Costs little and never fails: what cannot be seen is said."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from msrun import __version__, contract
from msrun.agent.host.host_facts import installed_version
from msrun.cluster.protocol import Finding, HostAddress, HostReport, ReachResult
from msrun.cluster.rendezvous import own_addresses, resolve_address
from msrun.errors import ClusterError, UsageError
from msrun.launch.preflight.checks import CHECKS, Check, Inspection, look_at_room, place_own_devices
from msrun.launch.preflight.fleet_checks import is_numeric
from msrun.planning.imports import own_modules
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec

_PREFIX = ".msrun-seen-"
MAX_WORD_BYTES = 128


@contextlib.contextmanager
def shown_word(log_dir: Path) -> Iterator[dict[str, str]]:
    """Keep a file with a random word in the log directory, or in the nearest folder above it that exists; yields {path,
    word} for `sees_word` of other hosts, nothing where it cannot be written.
    """
    folder = log_dir
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    word = secrets.token_hex(32)
    path = folder / f"{_PREFIX}{secrets.token_hex(8)}"  # new, so that no host has remembered that it is not there
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, contract.FILE_MODE)
    except OSError:
        yield {}
        return
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(word)
        yield {"path": str(path), "word": word}
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def sees_word(shown: Mapping[str, str]) -> bool:
    with contextlib.suppress(OSError):
        if shown:
            with Path(shown["path"]).open("rb") as file:
                return file.read(MAX_WORD_BYTES) == shown["word"].encode()
    return False


REACH_S = 3.0


def try_reach(address: str, port: int, time_out_s: float = REACH_S) -> ReachResult:
    """Connect to a numeric address by TCP and close again; waits `time_out_s` at most, raises nothing."""
    if not is_numeric(address):
        return ReachResult(error=f"{address!r} is no address")
    reason, source, owned = "", "", own_addresses()
    with contextlib.suppress(OSError):  # the own address that the kernel's routes choose; nothing is sent
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = str(probe.getsockname()[0])
    try:
        socket.create_connection((address, port), time_out_s).close()
    except TimeoutError:
        reason = f"timed out after {time_out_s:g} s"
    except ConnectionRefusedError:
        reason = "refused"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.errno == errno.EINVAL:  # what Linux says of a route of type blackhole
            reason = "the route there is a blackhole"
    return ReachResult(reason, source, owned.get(source, ""), address in owned)


MAX_FILES = 256
MAX_FILE_BYTES = 16 << 20
"""Of one file that is digested; of a larger one its beginning and its size count."""


def read_sources(program: Program, working_directory: Path) -> list[tuple[str, str]]:
    """Return name, relative to its folder, and SHA-256 of the program and of its own modules; empty for a module that
    is not found, built in, or in an archive (OSError: the program cannot be read).
    """
    main = folder = working_directory
    if program.kind != "module":
        main = working_directory / program.target
        folder = main.resolve().parent  # which it imports from first
    elif (found_module := _find_module(program.target, working_directory)) is None:
        return []
    else:
        main = found_module
    found = {_name(main, folder): _digest(main)}
    if program.is_python and main.resolve().is_relative_to(folder):
        for path, _ in own_modules(main.resolve(), folder, MAX_FILES):
            with contextlib.suppress(OSError):  # the worker says so if it matters
                found.setdefault(_name(path, folder), _digest(path))
    return list(found.items())


def _find_module(name: str, working_directory: Path) -> Path | None:
    places: list[str] | None = [str(working_directory), *sys.path]
    parts = name.split(".")
    for index, _ in enumerate(parts):
        spec = PathFinder.find_spec(".".join(parts[: index + 1]), places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
        if places is None:
            return Path(spec.origin) if index == len(parts) - 1 and spec.origin and spec.has_location else None
    return next((path for place in places or () if (path := Path(place, "__main__.py")).is_file()), None)


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(MAX_FILE_BYTES))
        if file.read(1):
            digest.update(str(path.stat().st_size).encode())
    return digest.hexdigest()


NOT_OF_ONE_HOST = frozenset({"master_port", "rank_table", "python", "tls"})
"""Checks that the launcher makes for all hosts together."""
OF_LOG_DIR = tuple(check for check in CHECKS if check.name in ("log_dir", "disk"))
"""Of a host that writes its logs where the launcher does; another keeps them until they are sent."""
ONLY_WHEN_DOUBTFUL = frozenset({"program", "torch"})
"""The launcher compares these between hosts, and says that they are well."""
NEEDED_PACKAGES = ("msgspec", "psutil")
MAX_ADDRESSES = 64
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
    """Look at this host for its part of a job. `asked_at`: its clock when the question came; `shown`: of `shown_word`
    in the launcher's log directory; `master_name`: to be resolved on the scheduler's host.
    """
    look = Inspection()
    sources: tuple[tuple[str, str], ...] = look.at("program", lambda: _read_program(spec), ())
    look.at("working_dir", lambda: _check_folder(spec.working_directory), None)
    sees_log_dir = sees_word(shown or {})
    for check in (*CHECKS, *(() if sees_log_dir else (Check("disk", _look_at_spool_disk),))):
        is_asked = check.name not in NOT_OF_ONE_HOST and (sees_log_dir or check not in OF_LOG_DIR)
        if is_asked and not look.has_failed(check.name):
            look.make(check, spec, caller)
    look.findings = [one for one in look.findings if one.status != "ok" or one.name not in ONLY_WHEN_DOUBTFUL]
    target = ""
    if not look.has_failed("devices"):
        target = look.at("devices", lambda: place_own_devices(spec, caller).target, "")
    look.at("packages", _check_packages, None)
    master_address = master_name
    if master_name and not is_numeric(master_name):
        master_address = look.at("master_addr", lambda: resolve_address(master_name), "")
    boot_id = ""
    with contextlib.suppress(OSError):  # not every container shows it; then two names of one machine are not told apart
        boot_id = BOOT_ID.read_text(encoding="ascii").strip()
    words = os.environ.get(SSH_CONNECTION, "").split()
    ends = [word.partition("%")[0].removeprefix("::ffff:") for word in words[::2]]
    client, server = ends if len(words) == 4 and all(map(is_numeric, ends)) else ("", "")
    return HostReport(
        host_name=spec.stands_for.name if spec.stands_for else socket.gethostname(),
        python_version=".".join(map(str, sys.version_info[:3])),
        msrun_version=__version__,
        torch_version=look.at("torch", lambda: installed_version("torch"), ""),
        numpy_version=look.at("numpy", lambda: installed_version("numpy"), ""),
        architecture=os.uname().machine,
        boot_id=boot_id,
        device_target=target,
        ssh_client=client,
        ssh_server=server,
        master_address=master_address,
        received_at=asked_at,
        sees_log_dir=sees_log_dir,
        sources=sources,
        addresses=() if spec.stands_for or look.has_failed("packages") else look.at("addresses", read_addresses, ()),
        findings=tuple(look.findings),
        made_at=time.time(),
    )


def _read_program(spec: LaunchSpec) -> tuple[tuple[str, str], ...]:
    program = spec.program
    try:
        sources = tuple(read_sources(program, spec.working_directory))
    except OSError as error:
        text = f"{program.target}: {error.strerror}; copy it there, or use a disk that all hosts share"
        raise UsageError(text) from None
    if program.kind == "executable" and not os.access(program.target, os.X_OK):
        raise UsageError(f"{program.target}: is not executable there; run chmod +x {program.target}")
    return sources


def _check_folder(folder: Path) -> None:
    if not os.access(folder, os.X_OK):
        raise UsageError(f"{folder}: no such directory there, or no permission; make it, or give --chdir")
    if not folder.is_dir():
        raise UsageError(f"{folder}: is no directory there; give --chdir")


def _look_at_spool_disk(_spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    folder = Path(tempfile.gettempdir())
    full = f"the disk of {folder}, where logs wait to be sent, is full; make room, or set TMPDIR there"
    return look_at_room(folder, "logs on their way", ClusterError(full))


def _check_packages() -> None:
    """Look for what an agent needs: with --ship, or on a shared disk, msrun is there and these may not be."""
    missing = [name for name in NEEDED_PACKAGES if find_spec(name) is None]
    if missing:
        raise ClusterError(
            f"{', '.join(missing)} not installed for {sys.executable}, and msrun needs it there; install it, or name "
            "another Python by --python, or by python= in the hostfile"
        )


def read_addresses() -> tuple[HostAddress, ...]:
    """Return the addresses of this host by which another could reach it, in the order of its interfaces."""
    import psutil

    found = []
    for interface, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                mask = int.from_bytes(socket.inet_pton(entry.family, entry.netmask)) if entry.netmask else 0
                address = HostAddress(entry.address.partition("%")[0], interface, mask.bit_count())
                found += [address] if address.is_routable else []
    return tuple(found[:MAX_ADDRESSES])
