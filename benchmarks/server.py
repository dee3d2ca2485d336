"""Parameter servers beside torch's RPC and beside gloo's all_to_all: pull rows of a table, push their gradients, step.

    python benchmarks/server.py                      1, 2 and 4 servers
    python benchmarks/server.py --servers 2 --rounds 1

Two workers name 20,000 of 200,000 rows of 64 float32 numbers each, all different, in every step: 5 MB come and 5 MB go
for each worker. The jobs take turns; every round gives one ratio of the medians of their steps, and the table has the
medians of the rounds. Like is compared with like: synchronous servers beside RPC whose workers wait for each other
after every step, and beside all_to_all, in which the workers hold the table themselves; servers with a staleness of 8
beside RPC whose workers wait for nobody. Servers average over the workers, RPC's calls add at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import add_json_option, kept, record
from launch import DEADLINE_S, HERE, environment

JOB = str(HERE / "server_job.py")
WORKERS = 2
ROWS, WIDTH, NAMED, STEPS = 200_000, 64, 20_000, 20
PEERS = {"servers": ("rpc_in_step", "all_to_all"), "stale": ("rpc",)}
"""Way -> those beside it."""
STEP_BYTES = 2 * NAMED * WIDTH * 4 * WORKERS


def run(way: str, servers: int, folder: Path) -> float:
    """Return the median seconds of a step of one job."""
    result = folder / "times.json"
    count = WORKERS + (servers if way.startswith("rpc") else 0)
    options = ["--worker_num", str(count), "--quiet", "--tail_worker_log=none", "--device_target=cpu"]
    options += ["--server_num", str(servers)] if way in ("servers", "stale") else []
    words = [JOB, way, result, STEPS, ROWS, WIDTH, NAMED, servers]
    argv = [sys.executable, "-m", "msrun", *options, *map(str, words)]
    done = subprocess.run(argv, cwd=folder, env=environment(), capture_output=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the job {way} ended with {done.returncode}:\n{done.stderr.decode()[-3000:]}")
    return statistics.median(json.loads(result.read_text()))


def measure(servers: int, rounds: int, folder: Path) -> None:
    """Run the ways in turns with one number of servers, and print a line for each peer."""
    times: dict[str, list[float]] = {way: [] for way in (*PEERS, *(peer for peers in PEERS.values() for peer in peers))}
    for _ in range(rounds):
        for way, found in times.items():
            found.append(run(way, servers, folder))
    for own, peers in PEERS.items():
        seconds = statistics.median(times[own])
        rate = STEP_BYTES / seconds / 1e6
        print(f"{servers} servers, {own}: {seconds * 1e3:7.1f} ms a step, {rate:6.0f} MB/s pulled and pushed")
        for peer in peers:
            ratio = statistics.median(a / b for a, b in zip(times[own], times[peer], strict=True))
            others = statistics.median(times[peer])
            print(f"    {ratio:5.2f}x the time of {peer}, {others * 1e3:.1f} ms")
            figures = {"seconds": seconds, "bytes": STEP_BYTES, "peer": peer, "peer_seconds": others, "ratio": ratio}
            record(own, servers=servers, **figures)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    add_json_option(parser)
    options = parser.parse_args()
    with kept(options.json), tempfile.TemporaryDirectory() as folder:
        for servers in options.servers:
            measure(servers, options.rounds, Path(folder))


if __name__ == "__main__":
    main()
