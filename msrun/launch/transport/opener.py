"""How each host of a job is reached, and what its interpreter then runs.

Over SSH, or as a child process where it is this host, or one of a rehearsal, which gets a bare login, devices and cores
of its own. What runs there is Python text: its environment, where msrun is, and what of it to start.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import ipaddress
import os
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from msrun.agent.host.host_facts import read_host_facts
from msrun.agent.processes.process_control import raise_open_files, set_open_files
from msrun.errors import ClusterError, UsageError
from msrun.launch.job_hosts import is_this_host
from msrun.launch.transport.pipe import AgentPipe, HostShare, LocalPipe, agent_argv, agent_command
from msrun.launch.transport.ssh import SshConnector
from msrun.planning.hosts import HostEntry
from msrun.planning.placement.host import (
    ASCEND_VARIABLE,
    CUDA_VARIABLE,
    DevicePlacement,
    HostFacts,
    bind_workers,
    place_devices,
)
from msrun.planning.record import Record
from msrun.planning.spec import CoreBinding, LaunchSpec

SHIPPED_PACKAGES = ("msrun", "ranktable")
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the same code is the same archive

_ENVIRONMENT = """\
import os,sys
os.environ.update({environment})
sys.path[:0]=[p for p in os.environ.get("PYTHONPATH","").split(os.pathsep) if p and p not in sys.path]
"""

# A file that is there already is trusted only if it is what was sent, in a folder of the user's own, which nobody else
# may write. Where the home folder cannot be written, the one in the temporary folder is used again.
_SHIPPED = """\
import base64,hashlib,stat,tempfile
z=base64.b64decode("{archive}")
def keep(folder):
    os.makedirs(folder,mode=0o700,exist_ok=True)
    path=os.path.join(folder,"msrun-{digest}.zip")
    try:
        with open(path,"rb") as f: good=f.read()==z
    except OSError: good=False
    if not good:
        number,new=tempfile.mkstemp(dir=folder)
        try:
            with open(number,"wb") as f: f.write(z)
            os.replace(new,path)
        except OSError:
            os.unlink(new)
            raise
    return path
def own(folder):
    try: os.mkdir(folder,0o700)
    except FileExistsError: pass
    found=os.lstat(folder)
    if stat.S_ISDIR(found.st_mode) and found.st_uid==os.geteuid() and not found.st_mode&0o022: return folder
    return tempfile.mkdtemp(prefix="msrun-code-")
try: p=keep(os.path.join(os.path.expanduser("~"),".cache","msrun"))
except OSError: p=keep(own(os.path.join(tempfile.gettempdir(),"msrun-code-%d"%os.geteuid())))
sys.path.insert(0,p)
os.environ["PYTHONPATH"]=os.pathsep.join([p]+[q for q in os.environ.get("PYTHONPATH","").split(os.pathsep) if q])
import msrun
"""

# The name msrun is that of our package, whatever PYTHONPATH holds of that name; what was sent has taken it already.
_OWN = """\
own=[p for p in sys.path if os.path.isfile(os.path.join(p,"msrun","launch","remote","agent.py"))][:1]
sys.path[:0]=own
import msrun
del sys.path[:len(own)]
"""

_START = "from msrun.launch.remote.agent import main\nmain()\n"
_SALVAGE = "from msrun.launch.remote.logs import salvage\nsalvage({job_id!r},{number},{offsets})\n"
_ATTACH = "from msrun.launch.remote.logs import attach\nattach({job_id!r},{number})\n"


class Way(Record):
    """The way to one host: a new process there, and what its interpreter has to run."""

    open: Callable[[float | None], AgentPipe]  # returns a pipe before a moment, as `HostOpener.open`
    start: bytes = b""  # starts an agent; empty where one runs already
    attach: bytes = b""  # connects to the agent of a broken connection; empty where that cannot be
    salvage: Callable[[Mapping[str, int]], bytes] = lambda _: b""  # is given how much of each log is here


def agent_codes(
    environment: Mapping[str, str], job_id: str, number: int, shipped: str = ""
) -> tuple[bytes, bytes, Callable[[Mapping[str, int]], bytes]]:
    """Return what starts an agent, attaches to it and salvages what it has left: see `Way`. `environment`: variables
    that the agent's process gets beside those that it has. `number`: of the agent among all of the job. `shipped`: from
    `pack_msrun`, for a host without msrun."""
    prelude = _ENVIRONMENT.format(environment=ascii(dict(environment))) + shipped + _OWN

    def salvage(sizes: Mapping[str, int]) -> bytes:
        text = _SALVAGE.format(job_id=job_id, number=number, offsets=ascii(dict(sizes)))
        return (prelude + text).encode("ascii")

    attach = prelude + _ATTACH.format(job_id=job_id, number=number)
    return (prelude + _START).encode("ascii"), attach.encode("ascii"), salvage


def pack_msrun() -> str:
    """Return the text that makes this launcher's own code importable: as an archive that is kept by its hash."""
    root = Path(__file__).resolve().parents[3]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for package in SHIPPED_PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                name = path.relative_to(root).as_posix().replace(os.sep, "/")
                file.writestr(zipfile.ZipInfo(name, _ZIP_TIME), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = archive.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    return _SHIPPED.format(archive=base64.b64encode(data).decode("ascii"), digest=digest[:32])


class HostOpener:
    """Opens pipes to agents, from any thread. `close` it in the end."""

    def __init__(self, spec: LaunchSpec, job_id: str, warn: Callable[[str], None]) -> None:
        """`warn`: told what is not refused but should be known. Raises UsageError: ssh_config cannot be read, or says
        what cannot be done; or a rehearsal has too few devices. Raises ClusterError: an address of a rehearsal does not
        answer."""
        self._spec, self._job_id = spec, job_id
        self._shares = share_machine(spec, os.environ) if spec.is_rehearsal else {}
        check_addresses(tuple(self._shares))
        entries = (*spec.host_entries, *spec.spares)
        self._local = {entry for entry in entries if entry.is_rehearsed or entry.has_come or is_this_host(entry)}
        self._shipped = pack_msrun() if spec.ship else ""
        self._connector = None
        if far := [entry for entry in entries if entry not in self._local]:
            self._connector = SshConnector(spec.ssh, warn=warn)
            self._connector.prepare(far[0])
        self._open_files = raise_open_files()

    def can_resume(self, entry: HostEntry) -> bool:
        """Return whether a broken connection may be replaced; the pipe of this host breaks with its agent alone."""
        return entry.is_rehearsed or entry not in self._local

    def open(self, entry: HostEntry, deadline: float | None) -> AgentPipe:
        """Return a pipe to a new process on a host before a `deadline`; None = the usual (ClusterError)."""
        interpreter = entry.python or sys.executable
        if self._connector is None or entry in self._local:
            return LocalPipe(agent_argv(interpreter), "", self._shares.get(entry), self._open_files)
        end = time.monotonic() + self._spec.ssh.connect_time_out_s if deadline is None else deadline
        return self._connector.open(entry, agent_command(interpreter), deadline=end)

    def way(self, entry: HostEntry, environment: Mapping[str, str], number: int) -> Way:
        """Return the way to a host; arguments as `agent_codes`."""
        shipped = "" if entry in self._local else self._shipped
        start, attach, salvage = agent_codes(environment, self._job_id, number, shipped)
        return Way(partial(self.open, entry), start, attach if self.can_resume(entry) else b"", salvage)

    def close(self) -> None:
        set_open_files(self._open_files)
        if self._connector is not None:
            self._connector.close()


# -- a rehearsal -----------------------------------------------------------------------------------------------------

VISIBLE = {"gpu": CUDA_VARIABLE, "ascend": ASCEND_VARIABLE}
LOGIN = ("HOME", "LOGNAME", "PATH", "SHELL", "TMPDIR", "USER", *VISIBLE.values())
"""What an agent has before the launcher's variables come, as after a login over SSH; and which devices may be used."""
REACH_S = 2.0


def share_machine(spec: LaunchSpec, environ: Mapping[str, str]) -> dict[HostEntry, HostShare]:
    """Divide this machine among the hosts of a rehearsal. No device is given to two hosts. Cores are divided when there
    is one for each device; else all hosts use all. `environ`: of the launcher. Raises UsageError: there are more
    workers than devices, or --env would give all hosts the same ones."""
    for name in VISIBLE.values():
        if name in dict(spec.env):
            raise UsageError(
                f"--env {name}: a rehearsal gives each host devices of its own; set {name} for msrun itself"
            )
    hosts = sorted((*spec.host_entries, *spec.spares), key=lambda entry: ipaddress.ip_address(entry.address))
    sizes = [1 + max(entry.device_ids) for entry in hosts]  # a device that no worker has counts, too
    facts = read_host_facts(environ)
    devices = place_devices(spec.device_target, sum(sizes), facts)
    cpus = _divide_cores(spec, facts, devices)
    login = {name: environ[name] for name in LOGIN if name in environ}
    shares, first = {}, 0
    for entry, size in zip(hosts, sizes, strict=True):
        own = slice(first, first + size)
        visible = {VISIBLE[devices.target]: ",".join(devices.physical[own])} if devices.target in VISIBLE else {}
        shares[entry] = HostShare({**login, **visible}, tuple(sorted({cpu for each in cpus[own] for cpu in each})))
        first += size
    return shares


def _divide_cores(spec: LaunchSpec, facts: HostFacts, devices: DevicePlacement) -> list[tuple[int, ...]]:
    """Return the processors that go with each device; empty where hosts share them, as with a dict of --bind_core."""
    topology = facts.known_topology()
    is_named = spec.bind_core is not None and not spec.bind_core.is_auto
    if is_named or len(topology.cores()) < len(devices.physical):
        return [()] * len(devices.physical)
    bound = bind_workers(topology, devices.physical, target=devices.target, core=CoreBinding(), numa=False)
    return [worker.cpus for worker in bound.workers]


def check_addresses(entries: tuple[HostEntry, ...]) -> None:
    """Listen at the address of each host, and connect (ClusterError: only 127.0.0.1 answers, as on macOS)."""
    for entry in entries:
        try:
            with contextlib.closing(socket.create_server((entry.address, 0))) as listener:
                socket.create_connection(listener.getsockname(), REACH_S).close()
        except OSError as error:
            reason = error.strerror or str(error) or os.strerror(error.errno or 0)
            raise ClusterError(
                f"{entry.source}: {entry.name} is to be at {entry.address}, which does not answer here ({reason}); add "
                "it to the loopback interface (Linux has all of 127.0.0.0/8 there)"
            ) from None
