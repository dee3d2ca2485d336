"""Collectives of one machine: the backend shm beside gloo in the same processes, in turns, and mpirun where it is.

    python benchmarks/collectives.py                     2, 4 and 8 ranks, all sizes
    python benchmarks/collectives.py --ranks 8 --rounds 5

Every figure is the median over the rounds; a round is some calls of one backend, then of the other. Beside them stands
what memory allows: every rank copies its message into shared memory and the result out of it, over the rate of a copy
in as many processes as there are cores.

mpirun's all_reduce takes part with numpy buffers where mpi4py and mpirun are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

from figures import add_json_option, kept, record

SIZES = {"64 B": 64, "16 KB": 16 << 10, "0.5 MB": 512 << 10, "2.8 MB": 2_800_000, "12 MB": 12_000_000}
TARGETS = {2: {"16 KB": 10.0, "0.5 MB": 6.0, "12 MB": 2.0}, 8: {"16 KB": 15.0, "0.5 MB": 8.0, "12 MB": 2.5}}
DEADLINE_S = 300
RESULT, ROLE = "COLLECTIVES_RESULT", "COLLECTIVES_ROLE"


def calls_for(size_bytes: int) -> int:
    """Return how many calls make a round."""
    return 20 if size_bytes < 1 << 20 else 6


def time_calls(call: Callable[[], object], count: int) -> float:
    """Return the milliseconds of one call."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count * 1e3


def run_rank(rounds: int) -> None:
    """Measure, as one rank that msrun has started."""
    import torch
    import torch.distributed as dist

    import msrun.shm  # noqa: F401  # registers the backend
    from msrun.runtime import get_rank, init, release

    torch.set_num_threads(1)
    init("gloo")
    groups = {name: dist.new_group(backend=name, timeout=timedelta(seconds=60)) for name in ("shm", "gloo")}
    found: dict[str, dict[str, float]] = {}
    for label, size_bytes in SIZES.items():
        value = torch.ones(size_bytes // 4)
        times: dict[str, list[float]] = {name: [] for name in groups}
        for number in range(rounds + 1):
            for name, group in groups.items():
                dist.barrier(group=group)
                took = time_calls(partial(dist.all_reduce, value, group=group), calls_for(size_bytes))
                if number:  # the first round warms up
                    times[name].append(took)
            value.fill_(1)
        found[label] = {name: statistics.median(of_name) for name, of_name in times.items()}
    if get_rank() == 0:
        Path(os.environ[RESULT]).write_text(json.dumps(found))
    release()


def run_mpi_rank(rounds: int) -> None:
    """Measure mpirun's all_reduce, as one rank that it has started."""
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    found = {}
    for label, size_bytes in SIZES.items():
        value, result = numpy.ones(size_bytes // 4, "f"), numpy.empty(size_bytes // 4, "f")
        times = []
        for number in range(rounds + 1):
            world.Barrier()
            took = time_calls(partial(world.Allreduce, value, result), calls_for(size_bytes))
            if number:
                times.append(took)
        found[label] = {"mpirun": statistics.median(times)}
    if world.rank == 0:
        Path(os.environ[RESULT]).write_text(json.dumps(found))


def measure(command: list[str], role: str, folder: Path) -> dict[str, dict[str, float]]:
    """Run a job and return what its first rank has written."""
    result = folder / f"{role}.json"
    environ = {**os.environ, RESULT: str(result), ROLE: role, "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    ran = subprocess.run(command, env=environ, capture_output=True, timeout=DEADLINE_S, check=False, cwd=folder)
    if ran.returncode:
        sys.exit(f"{' '.join(command)} ended with {ran.returncode}: {ran.stderr.decode()[-500:]}")
    found: dict[str, dict[str, float]] = json.loads(result.read_text())
    return found


def copy_rate() -> float:
    """Return the bytes per millisecond, read and written, of a copy in one process."""
    import torch

    torch.set_num_threads(1)
    source, target = torch.ones(8 << 20), torch.ones(8 << 20)
    rates = [2 * 4 * len(source) / time_calls(lambda: target.copy_(source), 3) for _ in range(5)]
    return statistics.median(rates)


def compare(ranks: int, rounds: int, rate: float, has_mpi: bool) -> None:
    """Print every size of message for one number of ranks.

    Args:
        rate: bytes per millisecond of a copy.
    """
    own = [__file__, f"--rounds={rounds}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "msrun", "--worker_num", str(ranks), "--tail_worker_log=0", *own]
        found = measure(command, "msrun", Path(folder))
        if has_mpi:
            mpi = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), sys.executable, *own]
            for label, figures in measure(mpi, "mpirun", Path(folder)).items():
                found[label] |= figures
    for label, figures in found.items():
        ratio, aim = figures["gloo"] / figures["shm"], TARGETS.get(ranks, {}).get(label)
        memory = SIZES[label] * ranks * 4 / rate / min(ranks, os.cpu_count() or 1)
        other = f"{figures['mpirun']:9.3f}" if "mpirun" in figures else f"{'-':>9}"
        text = f"{aim:.1f}" if aim else "-"
        print(
            f"{ranks:>5} {label:>7} {figures['gloo']:9.3f} {figures['shm']:9.3f} {ratio:6.1f} {text:>5} "
            f"{memory:9.3f} {other}"
        )
        record("all_reduce", ranks=ranks, size=label, bytes=SIZES[label], rounds=rounds, ms=figures, memory_ms=memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--rounds", type=int, default=9)
    add_json_option(parser)
    options = parser.parse_args()
    role = os.environ.get(ROLE)
    if role:
        (run_rank if role == "msrun" else run_mpi_rank)(options.rounds)
        return
    rate = copy_rate()
    has_mpi = shutil.which("mpirun") and importlib.util.find_spec("mpi4py")
    print(
        f"{os.cpu_count()} cores; a copy moves {rate / 1e6:.1f} GB/s"
        + ("" if has_mpi else "; mpirun or mpi4py missing")
    )
    print(f"{'ranks':>5} {'bytes':>7} {'gloo ms':>9} {'shm ms':>9} {'times':>6} {'aim':>5} {'memory':>9} {'mpirun':>9}")
    with kept(options.json):
        for ranks in map(int, options.ranks.split(",")):
            compare(ranks, options.rounds, rate, bool(has_mpi))


if __name__ == "__main__":
    main()
