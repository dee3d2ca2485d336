"""Checkpoints beside torch's own ways, in turns in one job, and a sliced checkpoint cut otherwise beside a copy of it.

    python benchmarks/checkpoint.py                      all parts
    python benchmarks/checkpoint.py --parts transform --gigabytes 1
    python benchmarks/checkpoint.py --folder /mnt/scratch

    save       a network of 200 MB, hsdp level1 on 2 ranks: save_checkpoint as a directory beside torch.distributed.
               checkpoint, as one file beside torch.save of the gathered state dict; and loading them
    beside     how long async_save holds the training up: the call, which copies what is to be written
    transform  transform_checkpoints of a sliced checkpoint of 2 GB for 4 ranks beside copying its files, in one process

All ways write through to the disk before their time is taken, torch.save and the copy too. Every round gives one ratio;
the table has medians and quartiles.
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

JOB = str(HERE / "checkpoint_job.py")
PARTS = ("save", "beside", "transform")
RANKS = 2
LAYERS, WIDTH, ROWS = 48, 1024, 64
PAIRS = (
    ("save directory", "save dcp", "torch.distributed.checkpoint", 1.0),
    ("load directory", "load dcp", "torch.distributed.checkpoint", 1.0),
    ("save file", "save torch", "torch.save", 1.1),
    ("load file", "load torch", "torch.load", 1.1),
)
"""Our way, the peer's, its name, and the most that ours may take of it."""
STALL = 0.2
TRANSFORM, MEMORY_MB = 1.5, 400
TENSOR_BYTES = 32 << 20


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, low, high


def tell(words: str, seconds: float, ratios: list[float], peer: str, aim: float) -> None:
    """Print and keep one line."""
    middle, low, high = quartiles(ratios)
    verdict = "met" if middle <= aim else "MISSED"
    print(
        f"{words:<22}{seconds * 1e3:9.0f} ms{middle:8.2f}x of {peer} [{low:.2f}..{high:.2f}]   at most {aim}: {verdict}"
    )
    record(words, seconds=seconds, peer=peer, ratio=middle, low=low, high=high, target=aim, is_met=middle <= aim)


def measure_job(parts: list[str], rounds: int, folder: Path) -> None:
    """Run the job of the parts `save` and `beside` and print its figures."""
    result = folder / "job.json"
    options = ["--worker_num", str(RANKS), "--quiet", "--tail_worker_log=none", "--device_target=cpu"]
    words = [JOB, result, folder / "scratch", rounds, LAYERS, WIDTH, ROWS]
    argv = [sys.executable, "-m", "msrun", *options, *map(str, words)]
    done = subprocess.run(argv, cwd=folder, env=environment(), capture_output=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the job ended with {done.returncode}:\n{done.stderr.decode()[-3000:]}")
    times: dict[str, list[float]] = json.loads(result.read_text())
    print(f"\n{LAYERS * WIDTH * WIDTH * 4 / 1e6:.0f} MB on {RANKS} ranks, {rounds} rounds")
    for own, peer, name, aim in PAIRS if "save" in parts else ():
        ratios = [a / b for a, b in zip(times[own], times[peer], strict=True)]
        tell(own, statistics.median(times[own]), ratios, name, aim)
    for form in ("directory", "file") if "beside" in parts else ():
        ratios = [a / b for a, b in zip(times[f"stall {form}"], times[f"save {form}"], strict=True)]
        tell(f"stall, {form}", statistics.median(times[f"stall {form}"]), ratios, "saving at once", STALL)


def measure_transform(gigabytes: float, rounds: int, folder: Path) -> None:
    """Cut a sliced checkpoint for 4 ranks, and copy it, in turns."""
    make = f"""
import sys, torch
from torch import nn
from msrun.runtime import *
from msrun.runtime.parallel.strategy_file import write_strategy
init()
width = {int((TENSOR_BYTES / 4) ** 0.5)}
layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range({int(gigabytes * 1e9 / TENSOR_BYTES)})))
step = AutoParallel(layers).hsdp(threshold=0)
step(torch.ones(2, width))
save_checkpoint(layers, {str(folder / "source")!r}, integrated_save=False)
whole = find_layouts(layers)
cut = {{name: ParameterLayout((4,), ((0,), ()), layout.tensor_shape) for name, layout in whole.items()}}
write_strategy({str(folder / "strategy.json")!r}, cut)
release()
"""
    (folder / "make.py").write_text(make)
    argv = [sys.executable, "-m", "msrun", "--worker_num", str(RANKS), "--quiet", "--device_target=cpu", "make.py"]
    subprocess.run(argv, cwd=folder, env=environment(), capture_output=True, timeout=DEADLINE_S, check=True)
    (folder / "cut.py").write_text(CUT)
    argv = [sys.executable, "cut.py", str(folder), str(rounds)]
    done = subprocess.run(argv, cwd=folder, env=environment(), capture_output=True, timeout=DEADLINE_S, check=True)
    found = json.loads(done.stdout)
    ratios = [a / b for a, b in zip(found["cut"], found["copied"], strict=True)]
    size = sum(path.stat().st_size for path in (folder / "source").iterdir())
    print(f"\n{size / 1e9:.1f} GB, from {RANKS} ranks to 4, {rounds} rounds")
    tell("transform", statistics.median(found["cut"]), ratios, "copying", TRANSFORM)
    verdict = "met" if found["megabytes"] < MEMORY_MB else "MISSED"
    print(f"peak memory {found['megabytes']:.0f} MB   below {MEMORY_MB}: {verdict}")
    record("transform memory", megabytes=found["megabytes"], target=MEMORY_MB, is_met=found["megabytes"] < MEMORY_MB)


CUT = """
import json, os, resource, shutil, sys, time
from pathlib import Path
from msrun.runtime import transform_checkpoints

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
times = {"cut": [], "copied": []}

def copy():
    shutil.copytree(folder / "source", folder / "copy")
    for path in (folder / "copy").iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

def cut():
    transform_checkpoints(folder / "source", folder / "cut", "", None, folder / "strategy.json")

for _ in range(rounds + 1):  # the first one warms up: a virtual machine's memory is slow when it is used first
    for name, work, made in (("copied", copy, "copy"), ("cut", cut, "cut")):
        os.sync()
        begin = time.perf_counter()
        work()
        times[name].append(time.perf_counter() - begin)
        shutil.rmtree(folder / made)
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
print(json.dumps({"megabytes": memory, **{name: found[1:] for name, found in times.items()}}))
"""
"""What is measured begins when torch is imported, which takes seconds."""


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the checkpoint of `transform`")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; it is emptied of what was written")
    add_json_option(parser)
    options = parser.parse_args()
    parts = options.parts.split(",")
    if not {*parts} <= {*PARTS}:
        parser.error(f"--parts {options.parts}: some of {', '.join(PARTS)}")
    with kept(options.json), tempfile.TemporaryDirectory(dir=options.folder) as name:
        if {"save", "beside"} & {*parts}:
            measure_job(parts, options.rounds, Path(name))
        if "transform" in parts:
            measure_transform(options.gigabytes, max(4, options.rounds // 2), Path(name))


main()
