"""What a job on very many hosts costs its launcher: simulated hosts, over socket pairs, with the real protocol.

    python benchmarks/scale.py [--hosts 1000] [--workers 8] [--minutes 10] [--ranks 65536] [--json result.json]

Three parts, each in a fresh process:
  plan    what every host is told, decided and encoded: processor seconds and peak memory, beside a tenth of the hosts
  hosts   a whole job: reach all, start it, the signs of life of so many minutes one after the other, one failure, end
  events  start and end of every rank of a large job, as its hosts tell of them
The simulated hosts are one process beside the launcher's. Printed are seconds, and bytes to and from one host.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from figures import ROOT, add_json_option, kept, record
from scale_peers import SocketOpener, name_of, serve_peers

from msrun import contract
from msrun.agent.observer import Observers, OwnFaults
from msrun.agent.signals import SignalPipe
from msrun.cluster.messages import encode_message, pack_hosts
from msrun.launch.directory.log_directory import EventLog
from msrun.launch.fleet.agents import Agents
from msrun.launch.fleet.fleet_job import FleetJob, FleetRecord, FleetRun
from msrun.launch.fleet.hosts import ListedHosts
from msrun.launch.preflight.checks import read_sources
from msrun.launch.remote.logs import LogCollector, own_logs
from msrun.planning.hosts import HostEntry, assign_hosts
from msrun.planning.masking import forwarded_environment
from msrun.planning.program import Program
from msrun.planning.spec import LaunchSpec

BEAT_S = 2.0
PHASES = {
    "reached": "reached, asked, and compared",
    "started": "started, to the last worker",
    "beats": "signs of life",
    "ended": "one failure, and the end",
}


def spec_of(hosts: int, workers: int, folder: Path) -> LaunchSpec:
    """Return a job on so many hosts, whose program is a file in the folder."""
    program = folder / "train.py"
    program.write_text("pass\n")
    entries = tuple(HostEntry(name_of(node), workers, tuple(range(workers))) for node in range(hosts))
    return LaunchSpec(
        program=Program("script", str(program)),
        worker_num=hosts * workers,
        local_worker_num=0,
        working_directory=folder,
        log_dir=folder,
        tail_ranks=(),
        heartbeat_time_out_s=600.0,
        host_entries=entries,
    )


# -- the parts --------------------------------------------------------------------------------------------------------


def plan(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Decide and encode what every host is told before the job and at its start; keep all of it."""
    begin, before_mb = time.process_time(), peak_mb()
    spec = spec_of(options.hosts, options.workers, folder)
    with SignalPipe() as signals:
        opener: Any = SocketOpener([])
        listed = ListedHosts(spec, dict(os.environ), "JOB", opener, signals, None, print)
        environment = forwarded_environment(os.environ, spec.forward_env)
        assigned = assign_hosts(spec.host_entries)
        links = [listed._link(spec, host, environment, will_run=True) for host in assigned]
        jobs = [link._kept[0][1] for link in links]
        hosts = pack_hosts(assigned)
        runs = [encode_message({"type": "run", "hosts": hosts, "rank_table": ""}) for _ in jobs]
    sizes = {"job_bytes": len(jobs[-1]), "run_bytes": len(runs[-1])}
    return {"cpu_s": time.process_time() - begin, "memory_mb": peak_mb() - before_mb, **sizes}


def events(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Take the start and the end of every rank, and write them down."""
    hosts = options.ranks // options.workers
    ranks = {node: tuple(range(node * options.workers, (node + 1) * options.workers)) for node in range(hosts)}
    log = EventLog(folder / "events.jsonl")
    begin = time.process_time()
    told = FleetRecord(ranks, Observers([log], OwnFaults(folder, print, found_in="")))
    for node, own in ranks.items():
        for rank in own:
            told.note(node, "started", {"global_rank": rank, "pid": rank})
    for node, own in ranks.items():
        for rank in own:
            told.note(node, "exited", {"global_rank": rank, "how": "exit code 0", "status": 0, "state": "done"})
    seconds = time.process_time() - begin
    log.close()
    return {"events": 2.0 * options.ranks, "cpu_s": seconds}


def hosts(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run a job on simulated hosts to the failure of one of them."""
    spec = spec_of(options.hosts, options.workers, folder)
    pairs = [socket.socketpair() for _ in range(options.hosts)]
    ours, theirs = socket.socketpair()
    sources = [list(pair) for pair in read_sources(spec.program, spec.working_directory)]
    if (pid := os.fork()) == 0:
        for mine, _ in pairs:
            mine.close()
        ours.close()
        serve_peers([peer for _, peer in pairs], theirs, options.workers, sources)
        os._exit(0)
    for _, peer in pairs:
        peer.close()
    theirs.close()
    opener = SocketOpener([mine for mine, _ in pairs])
    try:
        return Launch(spec, opener, folder, ours, round(options.minutes * 60 / BEAT_S)).run()
    finally:
        ours.close()
        os.waitpid(pid, 0)


class Launch:
    """One job on simulated hosts, and how long each part of its life takes."""

    def __init__(
        self, spec: LaunchSpec, opener: SocketOpener, folder: Path, failing: socket.socket, rounds: int
    ) -> None:
        """
        Args:
            failing: a byte into it has a host fail.
            rounds: of signs of life.
        """
        self._spec = spec
        self._opener = opener
        self._events = folder / contract.EVENTS_JSONL
        self._failing = failing
        self._rounds = rounds
        self._agents: Agents
        self._seconds: dict[str, float] = {}
        self._begin = 0.0
        self._bytes = 0.0

    def run(self) -> dict[str, float]:
        """Return seconds and bytes by what they were spent on, and how many threads the launcher has once all run."""
        spec, entries = self._spec, self._spec.host_entries
        own = own_logs(
            spec.worker_log_name, {assignment.node_rank: assignment.ranks for assignment in assign_hosts(entries)}
        )
        logs, events = LogCollector(spec.log_dir, None, own), EventLog(self._events)
        self._begin, cpu = time.monotonic(), time.process_time()
        with SignalPipe() as signals:
            faults = OwnFaults(spec.log_dir, print, found_in="")
            opener: Any = self._opener
            with ListedHosts(spec, {}, "JOB", opener, signals, events, lambda _: None) as listed:
                ready = listed.run(spec, logs)
                self._lap("reached")
                self._agents = listed.agents
                job = FleetJob(spec, {}, "JOB", listed, events, faults, quiet=True)
                run = FleetRun(job, spec, ready, logs, threading.Thread(target=self._live, daemon=True).start)
                run.start()
                result = run.finish()
                self._lap("ended")
        assert result is not None, "it goes on nowhere"
        assert result.exit_code == 7, result.failure
        logs.close()
        events.close()
        return {**self._seconds, "cpu_s": time.process_time() - cpu, "memory_mb": peak_mb()}

    def _lap(self, what: str) -> None:
        """Keep how long the part of the job's life took that ends now, and what went to and from one host in it."""
        now, sent = time.monotonic(), self._opener.bytes_of_one()
        self._seconds[f"{what}_s"], self._seconds[f"{what}_bytes"] = now - self._begin, sent - self._bytes
        self._begin, self._bytes = now, sent

    def _live(self) -> None:
        """Wait until all workers run; then pass the time, and have a host fail."""
        while '"running"' not in self._events.read_text():
            time.sleep(0.05)
        self._lap("started")
        self._seconds["threads"] = threading.active_count() - 1  # without this one
        links = self._agents.links
        for _ in range(self._rounds):
            have_begun = threading.Event()
            for link in links:
                link.loop.call(partial(link.beat, BEAT_S))
            links[-1].loop.call(have_begun.set)
            have_begun.wait()
            while any(link.silent_s for link in links):
                time.sleep(0.001)
        self._lap("beats")
        self._failing.send(b"!")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(part: str, options: argparse.Namespace, **changed: int) -> dict[str, float]:
    """Return the figures of a part, from a process of its own."""
    given = {**vars(options), **changed}
    words = [f"--{name}={given[name]}" for name in ("hosts", "workers", "minutes", "ranks")]
    command = [sys.executable, __file__, "--part", part, *words]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(options: argparse.Namespace) -> None:
    """Print all parts."""
    few = max(1, options.hosts // 10)
    for count in (few, options.hosts):
        found = measure("plan", options, hosts=count)
        record("plan", hosts=count, workers=options.workers, **found)
        print(
            f"plan    {count} hosts x {options.workers}: {found['cpu_s']:.2f} processor seconds, "
            f"{found['memory_mb']:.0f} MB; {found['job_bytes']:.0f} and {found['run_bytes']:.0f} bytes for one host"
        )
    found = measure("events", options)
    record("events", ranks=options.ranks, **found)
    print(f"events  {options.ranks} ranks, {found['events']:.0f} events: {found['cpu_s']:.2f} processor seconds")
    for count in (few, options.hosts):
        found = measure("hosts", options, hosts=count)
        record("hosts", hosts=count, workers=options.workers, minutes=options.minutes, **found)
        costs = f"{found['cpu_s']:.1f} processor seconds, {found['memory_mb']:.0f} MB, {found['threads']:.0f} threads"
        print(f"hosts   {count} hosts x {options.workers}: {costs} of the launcher")
        for name, what in PHASES.items():
            print(f"  {what:<34} {found[f'{name}_s']:6.2f} s, {found[f'{name}_bytes']:8.0f} bytes to and from one host")


def main() -> None:
    """Measure everything, or one part for the process that prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8, help="of one host")
    parser.add_argument("--minutes", type=float, default=10.0, help="of signs of life")
    parser.add_argument("--ranks", type=int, default=65536)
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args()
    if options.part is None:
        with kept(options.json):
            compare(options)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="msrun-scale-") as folder:
        print(json.dumps(PARTS[options.part](options, Path(folder))))


PARTS = {"plan": plan, "events": events, "hosts": hosts}

if __name__ == "__main__":
    main()
