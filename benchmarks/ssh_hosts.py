"""Hosts for `ssh.py`: network namespaces with an OpenSSH server each, and what one job costs on them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import DEADLINE_S, HERE
from ssh_peers import Job, Peer

sys.path.insert(0, str(HERE.parent / "tests" / "support"))
from host_net import HostNetError
from ssh_net import SshNet

STOP_S = 15.0
"""What a launcher gets to end a job that it is told to end."""
POLL_S = 0.02


@dataclass(frozen=True)
class Run:
    """One successful job. Seconds from the start of its command."""

    first_reduce_s: float
    """Until the last worker had the result of its first all_reduce."""
    end_s: float
    cpu_s: float | None
    """Processor seconds of all processes on all hosts, to the end; None where they cannot be counted."""
    begin_time: float
    """Wall-clock time of the start."""
    ranks: list[dict[str, Any]]
    """What every rank wrote, see `ssh_job`; moments are seconds from the start, too."""
    events: list[dict[str, Any]]
    """Lines of msrun's events.jsonl."""


class CpuMeter:
    """Counts the processor time of this process and all that it will start, by a control group of their own."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._old: Path | None = None

    def __enter__(self) -> CpuMeter:
        root = Path("/sys/fs/cgroup")
        base = root if (root / "cgroup.controllers").exists() else root / "cpuacct"
        folder = base / f"msrun-benchmark-{os.getpid()}"
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers == "" if base == root else "cpuacct" in controllers.split(","):
                self._old = base / place.lstrip("/")
        with contextlib.suppress(OSError):  # not root, or a container that may not
            folder.mkdir()
            self._folder = folder
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._old / "cgroup.procs").write_text(str(os.getpid())) if self._old else None
                self._folder.rmdir()

    def read_s(self) -> float | None:
        """Return the seconds so far; None when they cannot be counted here."""
        if self._folder is None:
            return None
        with contextlib.suppress(OSError, ValueError, IndexError):
            nanoseconds = self._folder / "cpuacct.usage"
            if nanoseconds.exists():
                return int(nanoseconds.read_text()) / 1e9
            return int((self._folder / "cpu.stat").read_text().split()[1]) / 1e6
        return None


class Hosts:
    """`count` hosts for jobs of `workers` each, and one more that the commands are typed on. A context."""

    def __init__(self, count: int, workers: int, meter: CpuMeter) -> None:
        # Every way finds this msrun, and torch, on the hosts, and nobody's ~/.bashrc, which may take longer than all
        # the rest, is part of what is measured.
        self._home = tempfile.TemporaryDirectory(prefix="msrun-benchmark-home-")
        self._net = SshNet(count, options={"SetEnv": f"PYTHONPATH={HERE.parent} HOME={self._home.name}"})
        self.count = count
        self.workers = workers
        self._meter = meter

    def __enter__(self) -> Hosts:
        try:
            self._net.__enter__()
        except HostNetError as error:
            raise SystemExit(f"no hosts can be made here: {error}") from None
        return self

    def __exit__(self, *error: Any) -> None:
        self._net.__exit__(*error)
        self._home.cleanup()

    def run(self, peer: Peer) -> Run:
        """Run one job and prove that it was right.

        Raises:
            SystemExit: it failed, or not every rank has the right result.
        """
        with tempfile.TemporaryDirectory(prefix="msrun-benchmark-") as folder:
            job = self._job(Path(folder))
            before = self._meter.read_s()
            begin, begin_time = time.monotonic(), time.time()
            status, said = self._call(peer, job, Path(folder))
            end_s = time.monotonic() - begin
            after = self._meter.read_s()
            left = self._end_leftovers()
            found = sorted(job.results.glob("*.json"), key=lambda path: int(path.stem))
            if status or len(found) != job.world_size:
                raise SystemExit(
                    f"{peer.__name__} ended with {status}, {len(found)} of {job.world_size} ranks have a result, "
                    f"{left} processes were left:\n{said[-3000:]}"
                )
            ranks = [from_begin(json.loads(path.read_text()), begin) for path in found]
            cpu_s = None if before is None or after is None else after - before
            reduced_s = max(rank["reduced"]["at"] for rank in ranks)
            return Run(reduced_s, end_s, cpu_s, begin_time, ranks, read_events(job.logs))

    def _job(self, folder: Path) -> Job:
        results = folder / "results"
        results.mkdir()
        names = [self._net.name(host) for host in range(self.count)]
        config = self._net.client / "config"
        return Job(names, self.workers, self._net.address(0), config, results, folder / "logs")

    def _call(self, peer: Peer, job: Job, folder: Path) -> tuple[int, str]:
        start = peer(job)
        env = {**os.environ, "HOME": str(self._net.home), "PYTHONPATH": str(HERE.parent), **start.environ}
        with (folder / "said").open("w+b") as said:
            process = subprocess.Popen(
                [*self._net.prefix(self._net.control), *start.argv],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,  # Ctrl-C is for this program, which then ends the job
            )
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                print(f"{peer.__name__} has not ended within {DEADLINE_S:g} s")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(STOP_S)
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
            said.seek(0)
            return status, said.read().decode(errors="replace")

    def _end_leftovers(self) -> int:
        """End what a job left on the hosts; its SSH sessions may take a moment to end by themselves."""
        end = time.monotonic() + STOP_S
        while (left := self._leftovers()) and time.monotonic() < end:
            time.sleep(POLL_S)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)

    def _leftovers(self) -> list[int]:
        everywhere = range(self.count + 1)
        own = {self._net.server(host) for host in everywhere}
        return [pid for pid in self._net.processes(*everywhere) if pid not in own]


def from_begin(record: dict[str, Any], begin: float) -> dict[str, Any]:
    """Return a rank's record with its moments as seconds from the start of the command."""
    return {name: {**moment, "at": moment["at"] - begin} for name, moment in record.items()}


def read_events(logs: Path) -> list[dict[str, Any]]:
    """Return the job's moments; none when the launcher keeps no such record."""
    path = logs / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@contextlib.contextmanager
def hosts_of(count: int, workers: int) -> Iterator[Hosts]:
    """Make hosts and count their processor time."""
    with CpuMeter() as meter, Hosts(count, workers, meter) as hosts:
        yield hosts
