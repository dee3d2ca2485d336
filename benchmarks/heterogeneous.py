"""Optimizers on the host beside the ways that there are without them, in turns in one job.

    python benchmarks/heterogeneous.py                      all parts
    python benchmarks/heterogeneous.py --parts sparse --rounds 5

    step       AdamW on the host of bfloat16 weights: optim.offload beside a loop that copies all gradients to the host,
               steps as torch does by default, and copies all weights back
    train      a whole training step with the weights cut over the ranks: hsdp level3 and offload_gradients beside
               torch's FSDP2 with CPUOffloadPolicy and a fused AdamW
    sparse     LazyAdam of a hundredth of the rows of a table beside Adam of all, both on the host

The parts `step` and `train` run on 1 and 2 ranks. Device and host are one processor here, so that copies between them
are copies in its memory and nothing overlaps. Every round gives one ratio; the table has medians and quartiles.
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

JOB = str(HERE / "heterogeneous_job.py")
PARTS = ("step", "train", "sparse")
LAYERS, WIDTH, ROWS = 16, 1024, 64
TABLE_ROWS, TABLE_WIDTH = 10_000_000, 8
PAIRS = {
    "step": ("step", "naive", "a loop of copies around torch's default AdamW", 3.0),
    "train": ("train", "fsdp", "FSDP2 with CPUOffloadPolicy", 1.0),
    "sparse": ("lazy", "dense", "torch's default Adam of all rows", 20.0),
    "sparse, fused": ("lazy", "fused", "a fused Adam of all rows", None),
}
"""Line -> our way, the peer's, its name, and how many times faster ours is to be; None: as it is."""


def run_job(ranks: int, rounds: int, words: list[int | str], folder: Path) -> dict[str, list[float]]:
    """Run the job and return the seconds of every way in every round."""
    result = folder / "job.json"
    options = ["--worker_num", str(ranks), "--quiet", "--tail_worker_log=none", "--device_target=cpu"]
    argv = [sys.executable, "-m", "msrun", *options, *map(str, [JOB, result, rounds, *words])]
    done = subprocess.run(argv, cwd=folder, env=environment(), capture_output=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the job ended with {done.returncode}:\n{done.stderr.decode()[-3000:]}")
    found: dict[str, list[float]] = json.loads(result.read_text())
    return found


def tell(part: str, ranks: int, times: dict[str, list[float]]) -> None:
    """Print and keep one line."""
    own, peer, name, aim = PAIRS[part]
    ratios = [b / a for a, b in zip(times[own], times[peer], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    seconds = statistics.median(times[own])
    values = {"seconds": seconds, "peer": name, "ratio": middle, "low": low, "high": high}
    verdict = ""
    if aim is not None:
        verdict = f"   at least {aim:g}: {'met' if middle >= aim else 'MISSED'}"
        values |= {"target": aim, "is_met": middle >= aim}
    print(
        f"{part:<14}{ranks} rank{'s' if ranks > 1 else ' '}{seconds * 1e3:9.1f} ms{middle:8.2f}x as fast as {name} "
        f"[{low:.2f}..{high:.2f}]{verdict}"
    )
    record(part, ranks=ranks, **values)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas")
    parser.add_argument("--rounds", type=int, default=9)
    add_json_option(parser)
    options = parser.parse_args()
    parts = options.parts.split(",")
    if not {*parts} <= {*PARTS}:
        parser.error(f"--parts {options.parts}: some of {', '.join(PARTS)}")
    with kept(options.json), tempfile.TemporaryDirectory() as name:
        for ranks in (1, 2) if {"step", "train"} & {*parts} else ():
            times = run_job(ranks, options.rounds, [LAYERS, WIDTH, ROWS], Path(name))
            for part in ("step", "train"):
                if part in parts:
                    tell(part, ranks, times)
        if "sparse" in parts:
            times = run_job(1, options.rounds, ["sparse", TABLE_ROWS, TABLE_WIDTH], Path(name))
            for part in ("sparse", "sparse, fused"):
                tell(part, 1, times)


main()
