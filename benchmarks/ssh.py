"""Start-up of a job on many hosts over SSH, side by side with peers in the same run; then msrun alone on more hosts.

    python benchmarks/ssh.py                           16 hosts x 4 workers with peers, then 64 hosts x 1 in phases
    python benchmarks/ssh.py --quick                   4 hosts x 2 with peers, once each, then 8 hosts x 1 in phases
    python benchmarks/ssh.py --hosts 8 --workers 2 --repeats 5
    python benchmarks/ssh.py --peers msrun,mpirun      some of msrun, mpirun, torchrun-static, torchrun-c10d
    python benchmarks/ssh.py --parts phases --phase_hosts 32

Hosts are network namespaces of this machine, each with its own address and OpenSSH server: root, iproute2 and
openssh-server are needed. What is timed is the whole command: from its start to the moment when the last worker has
the result of its first all_reduce. The peers take turns, so that a change of the machine's load meets all of them;
medians are compared. All hosts share this machine's processors, of which a start takes as many as it gets: the
processor seconds of all processes on all hosts, to the end, are given beside the time.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from figures import add_json_option, kept, record
from launch import row
from ssh_hosts import Run, hosts_of
from ssh_peers import Peer, find_peers, msrun

PARTS = ("peers", "phases")
TARGET_RATIO = 3.0
PHASES = (
    ("connected", "last connection stands"),
    ("agent_up", "last agent is up"),
    ("checked", "last host is checked"),
    ("started", "last worker was started"),
)
"""Events of msrun's events.jsonl, and what their last one means."""
MOMENTS = (
    ("imported", "last worker has torch"),
    ("joined", "last worker has joined"),
    ("reduced", "last worker has reduced"),
)


def compare(peers: Mapping[str, Peer], count: int, workers: int, repeats: int) -> None:
    """Print how long each way takes to the first all_reduce, and the ratios."""
    print(f"\n{count} hosts x {workers} workers, seconds to the first all_reduce, {repeats} runs, peers taking turns")
    runs: dict[str, list[Run]] = {name: [] for name in peers}
    with hosts_of(count, workers) as hosts:
        for turn in range(repeats):
            for name, peer in peers.items():
                run = hosts.run(peer)
                runs[name].append(run)
                cpu = "" if run.cpu_s is None else f", {run.cpu_s:.1f} processor seconds"
                load = os.getloadavg()[0]
                print(f"  {turn + 1} {name}: {run.first_reduce_s:.2f} s, end {run.end_s:.2f} s{cpu} (load {load:.1f})")
    print(row("", *peers))
    firsts = {name: [run.first_reduce_s for run in values] for name, values in runs.items()}
    medians = {name: statistics.median(values) for name, values in firsts.items()}
    for name, values in runs.items():
        job = {"hosts": count, "workers_per_host": workers, "repeats": repeats, "launcher": name}
        end_s = statistics.median(run.end_s for run in values)
        record("first all_reduce", **job, median_s=medians[name], least_s=min(firsts[name]), end_s=end_s)
    print(row("first reduce", *(f"{value:.2f}" for value in medians.values())))
    print(row("least", *(f"{min(values):.2f}" for values in firsts.values())))
    print(row("end", *(f"{statistics.median(run.end_s for run in values):.2f}" for values in runs.values())))
    print(row("processor s", *(_median_cpu(values) for values in runs.values())))
    if "msrun" in medians and len(medians) > 1:
        ratios = {name: value / medians["msrun"] for name, value in medians.items()}
        print(row("ratio", *(f"{value:.2f}x" for value in ratios.values())))
        better = min((name for name in ratios if name != "msrun"), key=ratios.__getitem__)
        word = "met" if ratios[better] >= TARGET_RATIO else "missed"
        print(
            f"{better} is the better peer: msrun is {ratios[better]:.2f}x as fast; at least {TARGET_RATIO:g}x: {word}"
        )


def _median_cpu(runs: Sequence[Run]) -> str:
    seconds = [run.cpu_s for run in runs if run.cpu_s is not None]
    return f"{statistics.median(seconds):.1f}" if seconds else "-"


def show_phases(count: int, repeats: int) -> None:
    """Print where the time goes when msrun starts one worker on each of many hosts."""
    print(f"\nmsrun, {count} hosts x 1 worker: seconds from the start of the command, {repeats} runs")
    with hosts_of(count, 1) as hosts:
        runs = [hosts.run(msrun) for _ in range(repeats)]
    table = [phases(run) for run in runs]
    for name in table[0]:
        values = [line[name] for line in table if name in line]
        every = "  ".join(f"{value:.2f}" for value in values)
        print(f"  {name:<28}{statistics.median(values):8.2f}   ({every})")
        record("phases", hosts=count, repeats=repeats, phase=name, median_s=statistics.median(values))
    print(f"  {'processor seconds':<28}{_median_cpu(runs):>8}")


def phases(run: Run) -> dict[str, float]:
    """Return name -> seconds of what a job's record and its workers tell; a phase without a record is left out."""
    found: dict[str, float] = {}
    connects = sorted(
        float(event["connect_s"]) for event in run.events if event["event"] == "connected" and "connect_s" in event
    )
    if connects:
        found["connect of one host, p50"] = connects[len(connects) // 2]
        found["connect of one host, p95"] = connects[min(len(connects) - 1, round(0.95 * (len(connects) - 1)))]
        found["connect of one host, max"] = connects[-1]
    for kind, name in PHASES:
        moments = [moment_of(event, run) for event in run.events if event["event"] == kind]
        if moments:
            found[name] = max(moments)
    for kind, name in MOMENTS:
        found[name] = max(rank[kind]["at"] for rank in run.ranks)
    found["end of the command"] = run.end_s
    return found


def moment_of(event: Mapping[str, Any], run: Run) -> float:
    """Return when an event was, in seconds from the start of the command."""
    return float(event["time"]) - run.begin_time


def print_machine() -> None:
    """Print what was measured on, and with."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    print(f"{len(os.sched_getaffinity(0))} processors ({model.partition(':')[2].strip()}), {memory:.0f} GiB, ", end="")
    print(f"Linux {platform.release()}, python {platform.python_version()}, torch {version('torch')}", end="")
    for argv in (["mpirun", "--version"], ["pdsh", "-V"], ["ssh", "-V"]):
        if shutil.which(argv[0]):
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            print(f", {(done.stdout or done.stderr).splitlines()[0]}", end="")
    print(f"; load {os.getloadavg()[0]:.1f}")


def stop(_signum: int, _frame: object) -> NoReturn:
    """End as on Ctrl-C: hosts and jobs are taken away."""
    raise KeyboardInterrupt


def choose_peers(text: str) -> dict[str, Peer]:
    """Return the peers of a list of names; all of this machine's when it is empty."""
    peers = find_peers()
    names = [name for name in text.split(",") if name] or list(peers)
    if unknown := [name for name in names if name not in peers]:
        raise SystemExit(f"--peers {text}: there is no {unknown[0]} here, only {', '.join(peers)}")
    return {name: peers[name] for name in names}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, help="16, or 4 with --quick")
    parser.add_argument("--workers", type=int, help="on each host; 4, or 2 with --quick")
    parser.add_argument("--repeats", type=int, help="3, or 1 with --quick")
    parser.add_argument("--peers", default="", help="names, with commas between")
    parser.add_argument("--parts", default=",".join(PARTS), help="peers, phases")
    parser.add_argument("--phase_hosts", type=int, help="hosts of the phases; 64, or 8 with --quick")
    parser.add_argument("--quick", action="store_true", help="few hosts, one run each")
    add_json_option(parser)
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: there is no part {unknown[0]!r}, only {', '.join(PARTS)}")
    count, workers, repeats, phase_hosts = (4, 2, 1, 8) if options.quick else (16, 4, 3, 64)
    signal.signal(signal.SIGTERM, stop)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print_machine()
    try:
        with kept(options.json):
            if "peers" in parts:
                peers = choose_peers(options.peers)
                compare(peers, options.hosts or count, options.workers or workers, options.repeats or repeats)
            if "phases" in parts:
                show_phases(options.phase_hosts or phase_hosts, options.repeats or repeats)
    except KeyboardInterrupt:
        raise SystemExit("interrupted: hosts and jobs have been taken away") from None


if __name__ == "__main__":
    main()
