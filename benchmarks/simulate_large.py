"""A dry run of a transformer of 100e9 parameters on 65,536 ranks: processor time and memory of the process.

    python benchmarks/simulate_large.py
    python benchmarks/simulate_large.py --network llama
    python benchmarks/simulate_large.py --layers 12 --ranks 1024

8-way tensor parallel inside hosts, data parallel with optimizer parallel in groups of 8 over the others.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import add_json_option, kept, record
from launch import DEADLINE_S, HERE, environment

JOB = str(HERE / "simulate_large_job.py")
LAYERS = {"transformer": 54, "llama": 64}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=list(LAYERS), default="transformer")
    parser.add_argument("--layers", type=int, help="as many as 100e9 parameters take, by default")
    parser.add_argument("--ranks", type=int, default=65536)
    add_json_option(parser)
    options = parser.parse_args()
    layers = options.layers or LAYERS[options.network]
    with kept(options.json), tempfile.TemporaryDirectory() as folder:
        words = ["--sim_level=2", "--sim_device=h100", "--worker_num", str(options.ranks)]
        argv = [sys.executable, "-m", "msrun", *words, JOB, options.network, str(layers)]
        begin = time.monotonic()
        done = subprocess.run(argv, cwd=Path(folder), env=environment(), timeout=DEADLINE_S, check=False)
        seconds = time.monotonic() - begin
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"the dry run ended with {done.returncode}")
        processor_s, peak_mb = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
        print(
            f"{options.network}, {layers} layers, {options.ranks} ranks: "
            f"{processor_s:.1f} s of processor time, {seconds:.1f} s, {peak_mb:.0f} MB, load {os.getloadavg()[0]:.1f}"
        )
        record(
            "large",
            network=options.network,
            layers=layers,
            ranks=options.ranks,
            processor_s=processor_s,
            seconds=seconds,
            peak_mb=peak_mb,
        )


if __name__ == "__main__":
    main()
