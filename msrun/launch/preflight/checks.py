"""Checks on this host before anything starts: all of them for --check, those that stop a job for every run, and what an
agent reports of its host. A check returns a finding, or raises the error that a run would end with; none writes."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TypeVar

from msrun import __version__, contract
from msrun.agent.host.host_facts import group_folders, installed_version, read_host_facts
from msrun.agent.own_file import text_of
from msrun.cluster.host_report import Finding, HostAddress, HostReport, ReachResult
from msrun.cluster.rendezvous import UnresolvedName, listen, own_addresses, resolve_address
from msrun.errors import ClusterError, MsrunError, UsageError
from msrun.planning.hosts import count_workers
from msrun.planning.masking import mask_words
from msrun.planning.placement.host import DevicePlacement, place_devices
from msrun.planning.program import Program, own_modules
from msrun.planning.record import Record
from msrun.planning.spec import LOOPBACK, LaunchSpec, is_numeric

T = TypeVar("T")
MAX_COMMAND_CHARS = 80
MIB = 1 << 20
GIB = 1 << 30
LOW_DISK_BYTES = GIB
FULL_DISK_BYTES = MIB
LOW_MEMORY_BYTES = 200 * MIB  # a worker with torch imported and a small model
SMALL_SHARED_MEMORY_BYTES = 64 * MIB  # of a container by default; one DataLoader can fill it
FILES_OF_MSRUN = 32  # beside one for each worker
FILES_PER_HOST = 4  # of a launcher: a connection, or a socket and the stderr of an agent, and a ProxyCommand's
FILES_PER_WORKER = 8  # what a worker that talks to some others needs; the store alone has a connection to each
PROCESSES_OF_MSRUN = 3  # fork server, scheduler and its store
USUAL_THREADS = 4  # of a worker that uses torch, beside its compute threads


def describe_port_owner(port: int) -> str:
    """Return `pid 4711 (python serve.py)`, secrets hidden; empty when the owner is not visible, as another user's."""
    import psutil

    listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    pid = min((one.pid for one in listening if getattr(one.laddr, "port", 0) == port and one.pid), default=None)
    text = ""
    with contextlib.suppress(psutil.Error):
        text = " ".join(mask_words(psutil.Process(pid).cmdline())) if pid else ""
    text = text if len(text) <= MAX_COMMAND_CHARS else text[:MAX_COMMAND_CHARS] + "..."
    return f"pid {pid}{f' ({text})' if text else ''}" if pid else ""


def format_bytes(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes // MIB} MiB"


def free_disk_bytes(folder: Path) -> int | None:
    """Return what a user may still write where `folder` is; 0 too when no file can be made; None when not known."""
    status = os.statvfs(folder)
    if not status.f_blocks:  # a file system that does not count
        return None
    return 0 if status.f_files and not status.f_favail else status.f_bavail * status.f_frsize


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that new processes can have: of the host and of the control groups above, whose unused page
    cache counts as free. Source: proc(5), cgroup-v2.rst, cgroup-v1/memory.rst."""
    candidates = []
    for folder in chain.from_iterable(group_folders("memory", root)):
        for limit, used, reclaimable in (
            ("memory.max", "memory.current", r"^inactive_file (\d+)$"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", r"^total_inactive_file (\d+)$"),
        ):
            with contextlib.suppress(OSError, ValueError):
                free = int((folder / limit).read_text()) - int((folder / used).read_text())
                match = re.search(reclaimable, (folder / "memory.stat").read_text(), re.MULTILINE)
                candidates.append(max(0, free + (int(match[1]) if match else 0)))
    with contextlib.suppress(OSError):
        if match := re.search(r"^MemAvailable:\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE):
            candidates.append(int(match[1]) * 1024)
    return min(candidates, default=None)


def open_file_limits() -> tuple[int, int]:
    """Return how many file descriptors a worker may have, and a process of msrun, which raises its limit."""
    soft, hard = (
        1 << 30 if one == resource.RLIM_INFINITY else one for one in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return soft, hard


def free_processes(root: Path = Path("/")) -> int | None:
    """Return how many threads and processes this user may still start; None = no limit."""
    free = []
    for folder in chain.from_iterable(group_folders("pids", root)):
        with contextlib.suppress(OSError, ValueError):
            free.append(int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text()))
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # root is not held to it
        import psutil

        found = (process.info for process in psutil.process_iter(["uids", "num_threads"]))
        threads = (one["num_threads"] or 1 for one in found if one["uids"] and one["uids"].real == os.getuid())
        free.append(soft - sum(threads))
    return max(0, min(free)) if free else None


def _look_at_tls(spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    """Read and try what this host needs for TLS: its client certificate, and the server's where the scheduler runs."""
    if not spec.is_several:
        return Finding("ok", "tls", "not needed: the job has one host")
    if spec.tls is None:
        return Finding("ok", "tls", "off: what hosts and scheduler say is not encrypted; --tls_config turns it on")
    from msrun.cluster.tls import open_identity
    from msrun.launch.rendezvous import has_scheduler

    try:
        is_server = has_scheduler(spec, resolve_address(spec.master_addr))
    except MsrunError:  # told by the check of master_port
        is_server = spec.node_rank == 0
    identities = [open_identity(spec.tls, kind) for kind in (("client", "server") if is_server else ("client",))]
    warnings = dict.fromkeys(line for identity in identities for line in identity.warnings)
    text = "; ".join(warnings) or ", ".join(identity.describe() for identity in identities)
    return Finding("warn" if warnings else "ok", "tls", text)


class Check(Record):
    """One thing to look at."""

    name: str
    look: Callable[[LaunchSpec, Mapping[str, str]], Finding]
    stops_run: bool = False  # asked by every run, so it has to be cheap
    stops_dry_run: bool = False
    is_launchers: bool = False  # about what this host needs even when all workers are on others


def check_host(spec: LaunchSpec, *, is_dry_run: bool = False) -> None:
    """Refuse what this host cannot do for workers with the environment of this process (UsageError, ClusterError)."""
    for check in CHECKS:
        if (check.stops_dry_run if is_dry_run else check.stops_run) and (check.is_launchers or not spec.is_remote):
            check.look(spec, os.environ)


class Inspection:
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

    def make(self, check: Check, spec: LaunchSpec, caller: Mapping[str, str]) -> None:
        self.at(check.name, lambda: self.findings.append(check.look(spec, caller)), None)

    def has_failed(self, name: str) -> bool:
        return any(finding.name == name and finding.status == "fail" for finding in self.findings)


def inspect_host(spec: LaunchSpec, caller: Mapping[str, str], names: Collection[str] = ()) -> list[Finding]:
    """Return the findings of all checks, or of those with these names, in order."""
    inspection = Inspection()
    for check in CHECKS:
        if not names or check.name in names:
            inspection.make(check, spec, caller)
    return inspection.findings


def check_port(port: int) -> None:
    """Refuse a port that is taken now, or not allowed, by a UsageError that names who has it where that can be seen."""
    try:
        listen(LOOPBACK, port).close()
    except UsageError as error:
        owner = describe_port_owner(port)
        if not owner:
            raise
        what, _, remedy = str(error).rpartition("; ")
        raise UsageError(f"{what}, taken by {owner}; {remedy}") from None


def _look_at_program(spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    """Look for a module's top-level package: finding more imports it. Scripts and executables were found before."""
    here, program = spec.working_directory, spec.program
    if program.kind == "module":
        top, is_there = program.target.partition(".")[0], None
        with contextlib.suppress(ValueError):  # a name that cannot be looked for
            is_there = PathFinder.find_spec(top, [str(here)]) or find_spec(top)  # which asks import hooks, too
        if is_there is None or top == "__main__":  # that is msrun itself
            where = f"no module {top} in {here} or on Python's path"
            raise UsageError(f"-m {program.target}: {where}; check the name or --chdir")
    return Finding("ok", "program", f"{program.kind} {program.target}")


def _look_at_log_dir(spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    existing = _existing(spec.log_dir)
    if not existing.is_dir():
        raise UsageError(f"--log_dir {spec.log_dir}: {existing} is a file; give a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        why = f"{existing} is on a read-only file system" if is_read_only else f"no permission to write {existing}"
        raise UsageError(f"--log_dir {spec.log_dir}: {why}; give a directory that you may write")
    return Finding("ok", "log_dir", f"{spec.log_dir} {'can be written' if existing == spec.log_dir else 'can be made'}")


def _look_at_disk(spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    full = UsageError(f"--log_dir {spec.log_dir}: the disk is full; make room or give a directory on another one")
    return look_at_room(_existing(spec.log_dir), "logs", full)


def look_at_room(folder: Path, what: str, full: MsrunError) -> Finding:
    """Return how much room is left in a folder, for `what`; raises `full` where there is none."""
    free = free_disk_bytes(folder)
    if free is None:
        return Finding("ok", "disk", f"{folder}: its file system does not count free space")
    if free < FULL_DISK_BYTES:
        raise full
    is_low = free < LOW_DISK_BYTES
    return Finding("warn" if is_low else "ok", "disk", f"{format_bytes(free)} free for {what} in {folder}")


def _existing(path: Path) -> Path:
    while not os.path.exists(path) and path != path.parent:  # noqa: PTH110 - Path.exists raises where it may not look
        path = path.parent
    return path


def _look_at_temporary(_spec: LaunchSpec, caller: Mapping[str, str]) -> Finding:
    preset = caller.get("TMPDIR", "")
    try:
        folder = tempfile.gettempdir()
    except OSError:
        raise ClusterError("no folder for temporary files can be written; set TMPDIR to one that can") from None
    if preset and Path(preset).absolute() != Path(folder):
        return Finding("warn", "temporary", f"TMPDIR={preset} cannot be written, {folder} is used; correct TMPDIR")
    return Finding("ok", "temporary", f"{folder} can be written")


def _look_at_shared_memory(_spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    folder = Path("/dev/shm")  # noqa: S108 - not a temporary file: where the kernel mounts shared memory
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return Finding("warn", "shared_memory", f"{folder} cannot be written; DataLoader workers of torch need it")
    free = free_disk_bytes(folder)
    if free is not None and free <= SMALL_SHARED_MEMORY_BYTES:
        return Finding(
            "warn", "shared_memory", f"{format_bytes(free)} free in {folder}; give containers more, e.g. 8 GiB"
        )
    return Finding("ok", "shared_memory", f"{format_bytes(free) if free is not None else 'space'} free in {folder}")


def _look_at_port(spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    """Of several hosts, the one with the scheduler needs the port."""
    if not spec.is_several:
        if spec.master_port == 0:
            return Finding("ok", "master_port", "a free one is taken")
        check_port(spec.master_port)
        return Finding("ok", "master_port", f"{spec.master_port} is free on {LOOPBACK}")
    from msrun.launch.rendezvous import has_scheduler, open_port

    try:
        address = resolve_address(spec.master_addr)
    except UnresolvedName as error:
        return Finding("warn", "master_port", f"{error}; a run waits for it as long as for a host")
    place = f"{address}:{spec.meeting_port}"
    if not has_scheduler(spec, address):
        return Finding("ok", "master_port", f"the scheduler is on another host, at {place}")
    if (listener := open_port(spec, (address, spec.meeting_port))) is None:
        return Finding("ok", "master_port", f"another program on this machine has {place}: the scheduler of the job")
    listener.close()
    return Finding("ok", "master_port", f"{place} is free for the scheduler")


def place_own_devices(spec: LaunchSpec, caller: Mapping[str, str]) -> DevicePlacement:
    """Return the devices of this host's workers, of its rank table if it has one; UsageError: they are not all here."""
    facts = read_host_facts({**caller, **dict(spec.env)})
    return place_devices(spec.device_target, spec.local_worker_num, facts, spec.own_device_ids)


def _look_at_devices(spec: LaunchSpec, caller: Mapping[str, str]) -> Finding:
    devices = place_own_devices(spec, caller)
    return Finding("ok", "devices", f"{count_workers(spec.local_worker_num)} on {devices.target} ({devices.reason})")


def _look_at_rank_table(spec: LaunchSpec, caller: Mapping[str, str]) -> Finding:
    if spec.rank_table_file is None:
        return Finding("ok", "rank_table", "generated at start")
    from msrun.launch.rank_table_file import check_rank_table

    check_rank_table(spec.rank_table_file, spec.worker_num, place_own_devices(spec, caller).target)
    return Finding("ok", "rank_table", f"{spec.rank_table_file} holds {spec.worker_num} ranks")


def _look_at_memory(spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    free = free_memory_bytes()
    if free is None:
        return Finding("warn", "memory", "free memory is not known: /proc/meminfo cannot be read")
    each = free // spec.local_worker_num
    text = f"{format_bytes(free)} free, {format_bytes(each)} for each of {count_workers(spec.local_worker_num)}"
    if each < LOW_MEMORY_BYTES:
        return Finding("warn", "memory", f"{text}: torch alone takes {format_bytes(LOW_MEMORY_BYTES)}")
    return Finding("ok", "memory", text)


def _look_at_open_files(spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    """Workers are connected to the store and each other; a launcher to each host, and it has the logs of all."""
    limit, hard_limit = open_file_limits()
    count = spec.local_worker_num
    least = FILES_OF_MSRUN + count
    usual = FILES_OF_MSRUN + FILES_PER_WORKER * count
    who = count_workers(count)
    if spec.is_remote:
        least = usual = FILES_OF_MSRUN + FILES_PER_HOST * len(spec.host_entries) + spec.worker_num
        who, limit = f"{len(spec.host_entries)} hosts with {count_workers(spec.worker_num)}", hard_limit
    if hard_limit < least:
        raise ClusterError(
            f"{hard_limit} open files allowed for each process, {who} need {least}; raise the hard limit: ulimit -Hn, "
            "LimitNOFILE of the service, or --ulimit nofile of the container"
        )
    text = f"{limit} open files allowed for each process"
    if limit < usual:
        return Finding("warn", "open_files", f"{text}; ulimit -n {usual} leaves the workers more room")
    return Finding("ok", "open_files", text)


def _look_at_processes(spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    free = free_processes()
    if free is None:
        return Finding("ok", "processes", "no limit")
    least = PROCESSES_OF_MSRUN + spec.local_worker_num
    text = f"{free} more processes and threads allowed"
    if free < least:
        raise ClusterError(
            f"{text}, {count_workers(spec.local_worker_num)} need {least} at least; "
            "raise ulimit -u or the container's limit"
        )
    if free < PROCESSES_OF_MSRUN + spec.local_worker_num * USUAL_THREADS:
        return Finding("warn", "processes", f"{text}; workers that start threads need more")
    return Finding("ok", "processes", text)


def _look_at_torch(_spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    found = installed_version("torch")
    if not found:
        return Finding("warn", "torch", "not installed for this Python; msrun.runtime needs it")
    oldest, newest = (tuple(map(int, text.split("."))) for text in contract.TORCH_VERSIONS)
    with contextlib.suppress(ValueError):
        if not oldest <= tuple(int(part) for part in found.split(".")[:2]) <= newest:
            return Finding("warn", "torch", f"{found}: not tested; tested are {' to '.join(contract.TORCH_VERSIONS)}")
    return Finding("ok", "torch", found)


CHECKS = (  # in the order of --check
    Check("program", _look_at_program, stops_run=True, stops_dry_run=True),
    Check("log_dir", _look_at_log_dir, stops_run=True, stops_dry_run=True, is_launchers=True),
    Check("disk", _look_at_disk, stops_run=True, stops_dry_run=True, is_launchers=True),
    Check("temporary", _look_at_temporary, stops_run=True),
    Check("shared_memory", _look_at_shared_memory),
    Check("master_port", _look_at_port, stops_run=True),
    Check("tls", _look_at_tls),
    Check("devices", _look_at_devices),
    Check("rank_table", _look_at_rank_table),
    Check("memory", _look_at_memory),
    Check("open_files", _look_at_open_files, stops_run=True, stops_dry_run=True, is_launchers=True),
    Check("processes", _look_at_processes, stops_run=True),
    Check("python", lambda *_: Finding("ok", "python", f"{'{}.{}.{}'.format(*sys.version_info)} {sys.executable}")),
    Check("torch", _look_at_torch),
)


def check_restart(spec: LaunchSpec, caller: Mapping[str, str], survivors: Collection[int]) -> None:
    """Look at the disks of the logs and for the devices (ClusterError, UsageError), with `survivors` of before."""
    if survivors:
        raise ClusterError(f"processes {sorted(survivors)} could not be ended")
    for folder in filter(None, (spec.log_dir, spec.worker_log_dir)):
        try:
            look_at_room(
                folder, "logs", ClusterError(f"the disk of {folder}, where logs are written, is full; make room")
            )
        except OSError as error:
            raise ClusterError(f"{folder}: {error.strerror}; logs are written there") from None
    place_own_devices(spec, caller)


_PREFIX = ".msrun-seen-"
MAX_WORD_BYTES = 128


@contextlib.contextmanager
def shown_word(log_dir: Path) -> Iterator[dict[str, str]]:
    """Keep a file with a random word in the log directory, or in the nearest folder above it that exists; yields {path,
    word} for `sees_word` of other hosts, nothing where it cannot be written."""
    word = os.urandom(32).hex()
    # New, so that no host has remembered that it is not there.
    path = _existing(log_dir) / f"{_PREFIX}{os.urandom(8).hex()}"
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
MAX_FILE_BYTES = 16 << 20  # of one file that is digested; of a larger one its beginning and its size count


def read_sources(program: Program, working_directory: Path) -> list[tuple[str, str]]:
    """Return name and SHA-256 of the program and its own modules; empty without a file (OSError: unreadable)."""
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
    import hashlib  # not for a job on one host: it loads OpenSSL

    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(MAX_FILE_BYTES))
        if file.read(1):
            digest.update(str(path.stat().st_size).encode())
    return digest.hexdigest()


NOT_OF_ONE_HOST = frozenset({"master_port", "rank_table", "python", "tls"})  # made for all hosts together
OF_LOG_DIR = tuple(check for check in CHECKS if check.name in ("log_dir", "disk"))
"""Of a host that writes its logs where the launcher does; another keeps them until they are sent."""
ONLY_WHEN_DOUBTFUL = frozenset({"program", "torch"})  # which the launcher compares between hosts
NEEDED_PACKAGES = ("msgspec", "psutil")
MAX_ADDRESSES = 64
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SSH_CONNECTION = "SSH_CONNECTION"  # set by sshd: address and port of client and server. Source: ssh(1)


def make_host_report(
    spec: LaunchSpec,
    caller: Mapping[str, str],
    *,
    asked_at: float,
    shown: Mapping[str, str] | None = None,
    master_name: str = "",
) -> HostReport:
    """Look at this host. `asked_at`: its clock then; `shown`: of `shown_word`; `master_name`: to be resolved."""
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
    # Not every container shows it; then two names of one machine are not told apart.
    boot_id = text_of(BOOT_ID).strip()
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
    if not (folder.is_dir() and os.access(folder, os.X_OK)):
        raise UsageError(f"{folder}: no such directory there, or no permission; make it, or give --chdir")


def _look_at_spool_disk(_spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    folder = Path(tempfile.gettempdir())
    full = f"the disk of {folder}, where logs wait to be sent, is full; make room, or set TMPDIR there"
    return look_at_room(folder, "logs on their way", ClusterError(full))


def _check_packages() -> None:
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
