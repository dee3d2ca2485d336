"""How long rank tables of large jobs take: generate, write, read and validate, beside plain JSON of the same text.

    python benchmarks/rank_tables.py [--rounds 3] [--servers 2048 4096 8192 12288 16384] [--json result.json]

Every round of every size runs in a fresh process, whose peak memory is the kernel's figure for it. A server has eight
devices. The peer is what no reader in Python can beat: `json.dump` and `json.load` of the same object. Printed are the
medians in seconds of processor time, which other work on the machine lengthens least, the wall time of all phases
together, and how the time grows with the number of devices: the exponent of a least-squares fit in logarithms (1 is
linear). Exit status 1 when 16,384 devices take 1.0 s or 300 MB, or 131,072 devices 10 s, or more.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from figures import add_json_option, kept, record

ROOT = Path(__file__).resolve().parent.parent
DEVICES_PER_SERVER = 8
SIZES = (2048, 4096, 8192, 12288, 16384)
LIMITS = {16384: (1.0, 300.0), 131072: (10.0, math.inf)}
"""Seconds and MB by number of devices."""
PHASES = ("import", "generate", "write", "read", "validate")
PEER_PHASES = ("json.dump", "json.load")


@contextmanager
def timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Add to `seconds` how long the block takes."""
    start = time.process_time()
    yield
    seconds[name] = time.process_time() - start


def run_once(num_servers: int, folder: Path) -> dict[str, float]:
    """Return the seconds of each phase for one size, and the peak memory of this process in MB before the peer's."""
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    with timed("import", seconds):
        sys.path.insert(0, str(ROOT))
        from ranktable import build_table, read_table, validate_file, write_table

    servers = [(address(10 << 24, server), DEVICES_PER_SERVER) for server in range(num_servers)]
    ips = {
        server_id: [address(29 << 24, index * DEVICES_PER_SERVER + device) for device in range(DEVICES_PER_SERVER)]
        for index, (server_id, _) in enumerate(servers)
    }
    path = folder / "table.json"
    with timed("generate", seconds):
        table = build_table(servers, device_ips=ips)
    with timed("write", seconds):
        write_table(path, table)
    with timed("read", seconds):
        assert read_table(path) == table
    with timed("validate", seconds):
        report = validate_file(path, chip="a2")
    seconds["wall"] = time.perf_counter() - start
    assert report.problems == (), report.problems[:3]
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    value = json.loads(path.read_bytes())
    with timed("json.dump", seconds), path.open("w") as stream:
        json.dump(value, stream)
    with timed("json.load", seconds), path.open() as stream:
        json.load(stream)
    return {**seconds, "peak_mb": peak_mb}


def address(base: int, number: int) -> str:
    """Return the IPv4 address `number` places after `base`."""
    value = base + number
    return ".".join(str(value >> shift & 255) for shift in (24, 16, 8, 0))


def measure(num_servers: int, rounds: int) -> dict[str, float]:
    """Return the median of every figure over fresh processes."""
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--once", str(num_servers), "--folder", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            found.append(json.loads(done.stdout))
    return {name: statistics.median(figures[name] for figures in found) for name in found[0]}


def fit_exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return b of seconds = a * size ** b by least squares over the logarithms."""
    xs, ys = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def total(figures: dict[str, float]) -> float:
    """Return the seconds of all phases but the peer's."""
    return sum(figures[phase] for phase in PHASES)


def print_results(results: dict[int, dict[str, float]]) -> None:
    """Print one line per size, the growth, and the ratio to the peer."""
    columns = [*PHASES, *PEER_PHASES]
    heads = [*columns, "total", "wall", "peak MB", "x peer"]
    print(f"{'devices':>8} " + " ".join(f"{head:>9}" for head in heads))
    for size, figures in results.items():
        ratio = total(figures) / sum(figures[phase] for phase in PEER_PHASES)
        cells = [*(figures[name] for name in columns), total(figures), figures["wall"], figures["peak_mb"], ratio]
        print(f"{size:>8} " + " ".join(f"{cell:9.3f}" for cell in cells))
    if len(results) > 2:
        sizes = list(results)
        for phase in ("generate", "write", "read", "validate"):
            exponent = fit_exponent(sizes, [figures[phase] for figures in results.values()])
            print(f"{phase:>9}: time ~ devices ** {exponent:.2f}")


def find_misses(results: dict[int, dict[str, float]]) -> list[str]:
    """Return the limits that were not kept."""
    return [
        f"{size} devices: {total(results[size]):.2f} s ({limit_s} s), {results[size]['peak_mb']:.0f} MB ({limit_mb} MB)"
        for size, (limit_s, limit_mb) in LIMITS.items()
        if size in results and (total(results[size]) >= limit_s or results[size]["peak_mb"] >= limit_mb)
    ]


def main() -> int:
    """Measure, print, and tell whether the limits were kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", type=int, nargs="+", default=list(SIZES))
    add_json_option(parser)
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(run_once(options.once, options.folder)))
        return 0
    results = {}
    with kept(options.json):
        for size in options.servers:
            results[size * DEVICES_PER_SERVER] = found = measure(size, options.rounds)
            record("rank tables", devices=size * DEVICES_PER_SERVER, rounds=options.rounds, median_s=found)
    print_results(results)
    misses = find_misses(results)
    print("\n".join(f"MISSED: {miss}" for miss in misses) or "all limits kept")
    return 1 if misses else 0


if __name__ == "__main__":
    raise SystemExit(main())
