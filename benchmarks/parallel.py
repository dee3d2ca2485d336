"""Training steps of the runtime beside torch's, on the same network, data and ranks, taking turns in one job.

    python benchmarks/parallel.py                        all parts
    python benchmarks/parallel.py --parts dp,tp          some of them
    python benchmarks/parallel.py --quick                fewer rounds

    dp        data parallel (semi_auto)            beside DistributedDataParallel
    zero1     hsdp level1                          beside DistributedDataParallel + ZeroRedundancyOptimizer
    fsdp      hsdp level3, time and peak memory    beside fully_shard(reshard_after_forward=True)
    steps     AdamW in the backward pass           beside AdamW after it, time and peak memory
    tp        Megatron's strategies, transformer   beside parallelize_module (DTensor)
    copies    MicroBatchInterleaved(net, 2)        beside one copy, over a link limited to 500 Mbit/s (root, Linux)
    pipeline  idle share of the ranks              beside the schedule's formula

msrun runs on its own backend; torch runs twice, on gloo and on the same shared memory. Over the link all use gloo.

The ways of a part live in the same processes and take turns round by round, so that a change of the machine's load
meets all; every round gives one ratio, and the table has the median ratio with its quartiles, also of the processor
time of all threads, which says more on a machine with other work. Two ranks (or --ranks) of one thread each. All must
come to the same loss, or the part is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from figures import add_json_option, kept, record
from launch import DEADLINE_S, HERE, environment
from parallel_link import limited_link, run_ranks, why_no_link

JOB = str(HERE / "parallel_job.py")
PARTS = ("dp", "zero1", "fsdp", "steps", "tp", "copies", "pipeline")
RANKS = 2
PEERS = {"torch_gloo": "gloo", "torch_shm": "shared memory"}
LINK_MBIT_PER_S = 500
LOSS_TOLERANCE = 1e-3
"""Relative; fp32 sums in another order drift apart over hundreds of steps."""
MEMORY_TARGET = 1.05
COPIES_TARGET = 1.4
COPIES_BOUND = 1.2
"""Two copies over the larger of computing and communicating alone."""
BUBBLE_TARGET = 0.1


@dataclass(frozen=True)
class Case:
    """One network of a part."""

    words: str
    sizes: tuple[int, ...]
    rounds: int
    steps: int
    """In each turn."""


@dataclass(frozen=True)
class Comparison:
    """A part that is a step of ours beside one of torch's."""

    words: str
    peer: str
    target: float
    """The most that our step may take of the peer's; or, where `is_faster`, the least that the peer's takes of ours."""
    cases: tuple[Case, ...]
    is_faster: bool = False


COMPARISONS = {
    "dp": Comparison(
        "data parallel, SGD with momentum",
        "DDP",
        1.05,
        (
            Case("8 layers of 1024, batch 64", (1024, 8, 64), 30, 4),
            Case("4 layers of 1024, batch 64", (1024, 4, 64), 30, 8),
            Case("24 layers of 128, batch 32", (128, 24, 32), 30, 30),
        ),
    ),
    "zero1": Comparison(
        "optimizer parallel level1, Adam",
        "DDP + ZeRO",
        1.0,
        (
            Case("8 layers of 1024, batch 64", (1024, 8, 64), 30, 3),
            Case("4 layers of 1024, batch 64", (1024, 4, 64), 30, 5),
        ),
    ),
    "fsdp": Comparison(
        "optimizer parallel level3, AdamW",
        "FSDP2",
        1.05,
        (Case("6 blocks of 512, batch 64", (512, 6, 64), 20, 2),),
    ),
    "tp": Comparison(
        "Megatron's transformer, forward and backward",
        "DTensor",
        1.2,
        (
            Case("4 blocks of 128, 4 x 32 tokens", (128, 4, 4, 4, 32), 30, 10),
            Case("4 blocks of 256, 4 x 64 tokens", (256, 4, 4, 4, 64), 30, 5),
            Case("4 blocks of 512, 4 x 128 tokens", (512, 4, 8, 4, 128), 20, 2),
        ),
        is_faster=True,
    ),
}
STEPS_CASES = (
    Case("8 layers of 1024, batch 64", (1024, 8, 64), 30, 3),
    Case("24 layers of 128, batch 32", (128, 24, 32), 30, 30),
)
COPIES_CASES = (
    Case("4 blocks of 768, 8 x 32 tokens", (768, 4, 12, 8, 32), 16, 2),
    Case("6 blocks of 896, 8 x 96 tokens", (896, 6, 14, 8, 96), 10, 1),
    Case("6 blocks of 1024, 8 x 96 tokens", (1024, 6, 16, 8, 96), 10, 1),
)
PIPELINE_CASES = tuple(
    Case(f"8 blocks of {width}, {m} micro batches of {rows}", (width, 8, rows * m, m), 12, 2)
    for width, rows in ((512, 32), (1024, 64))
    for m in (4, 8)
)
PIPELINE_WAYS = ("1f1b", "eager_1f1b")
"""The last one is held against the target."""
MEMORY_SMALL = (64, 2, 8)


def ask(part: str, ways: Sequence[str], case: Case, parent: Path, **more: Any) -> dict[str, Any]:
    """Run a job of msrun's and return what every way needed."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    ranks = more.pop("ranks", RANKS)
    bound = ["--bind_core"] if ranks <= len(os.sched_getaffinity(0)) else []
    options = ["--worker_num", str(ranks), *bound, "--quiet", "--tail_worker_log=none", "--device_target=cpu"]
    argv = [sys.executable, "-m", "msrun", *options, *job(part, ways, case, folder, **more)]
    env = environment()
    if (
        "small" in more
    ):  # memory: a freed tensor goes back to the system at once, so that the resident set is what is held
        env |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{part}, {case.words}: ended with {done.returncode}:\n{done.stderr.decode()[-3000:]}")
    return dict(json.loads((folder / "out.json").read_text()))


def job(part: str, ways: Sequence[str], case: Case, folder: Path, **more: Any) -> list[str]:
    """Return the script of a job and its arguments."""
    asked = {"sizes": case.sizes, "ways": list(ways), "rounds": case.rounds, "steps": case.steps, **more}
    return [JOB, str(folder / "out.json"), part, json.dumps(asked)]


@dataclass(frozen=True)
class Ratio:
    """The ratios of all rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}..{self.high:.2f}]"


def ratio_of(above: dict[str, Any], below: dict[str, Any], what: str = "seconds") -> Ratio:
    """Return the times of one way divided by those of another, round by round: median and quartiles."""
    ratios = [a / b for a, b in zip(above[what], below[what], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(median, low, high)


def median_ms(way: dict[str, Any]) -> float:
    """Return the milliseconds of a step."""
    return 1000 * statistics.median(way["seconds"])


def check_losses(part: str, found: dict[str, Any]) -> None:
    """Refuse to compare ways that do not compute the same."""
    losses = [way["loss"] for way in found.values()]
    if max(losses) - min(losses) > LOSS_TOLERANCE * max(map(abs, losses)):
        raise SystemExit(f"{part}: the ways came to different losses: { {n: w['loss'] for n, w in found.items()} }")


def row(first: str, *cells: str) -> str:
    """Return one line of a table."""
    return f"{first:<38}" + "".join(f"{cell:>22}" for cell in cells)


def tell_target(text: str, is_met: bool) -> None:
    """Say whether msrun does what it promises."""
    print(f"    target, {text}: {'met' if is_met else 'MISSED'}", flush=True)


# -- beside torch ---------------------------------------------------------------------------------------------------


def compare(part: str, shorten: int, parent: Path, ranks: int) -> None:
    """Print ours beside torch's for every network of a part, torch's on each backend."""
    what = COMPARISONS[part]
    print(f"\n{part}: {what.words}, {ranks} ranks, beside {what.peer}")
    ratio_words = "peer / msrun" if what.is_faster else "msrun / peer"
    print(row("network", "msrun ms", f"{what.peer} on", "ms", ratio_words, "processor time"))
    for case in what.cases:
        found = ask(part, ("msrun", *PEERS), shortened(case, shorten), parent, ranks=ranks)
        check_losses(part, found)
        for peer, backend in PEERS.items():
            above, below = (peer, "msrun") if what.is_faster else ("msrun", peer)
            ratio = ratio_of(found[above], found[below])
            cells = [f"{median_ms(found['msrun']):.1f}", backend, f"{median_ms(found[peer]):.1f}", str(ratio)]
            print(row(case.words, *cells, str(ratio_of(found[above], found[below], "processor"))), flush=True)
            times = {"msrun": median_ms(found["msrun"]), what.peer: median_ms(found[peer])}
            more = {"ranks": ranks, "peer_backend": backend, "ratio_is": ratio_words}
            record(part, network=case.words, step_ms=times, ratio=vars(ratio), **more)
            if what.is_faster:
                tell_target(f"at least {what.target:g}x faster than {what.peer}", ratio.median >= what.target)
            else:
                tell_target(f"at most {what.target:g}x of {what.peer}", ratio.median <= what.target)


def shortened(case: Case, by: int) -> Case:
    """Return a case of fewer rounds."""
    return replace(case, rounds=max(4, case.rounds // by))


def compare_memory(case: Case, parent: Path) -> None:
    """Print the peak memory of sharded training; every way has processes of its own."""
    peaks = {
        way: ask("fsdp", (way,), case, parent, small=MEMORY_SMALL)[way]["peak_bytes"] / 2**20
        for way in ("msrun", "torch")
    }
    ratio = peaks["msrun"] / peaks["torch"]
    print(row(f"{case.words}: peak", f"{peaks['msrun']:.0f} MiB", f"{peaks['torch']:.0f} MiB", f"{ratio:.2f}x"))
    record("fsdp memory", network=case.words, peak_mib=peaks)
    tell_target(f"at most {MEMORY_TARGET:g}x the memory", ratio <= MEMORY_TARGET)


# -- optimizer steps ------------------------------------------------------------------------------------------------


def compare_steps(shorten: int, parent: Path) -> None:
    """Print time and peak memory of steps in the backward pass beside steps after it."""
    ways = ("after", "in backward")
    print("\nsteps: AdamW in the backward pass, 2 ranks, beside AdamW after it")
    print(row("network", "after ms", "in backward ms", "after / in backward", "processor time"))
    for case in STEPS_CASES:
        found = ask("steps", ways, shortened(case, shorten), parent)
        check_losses("steps", found)
        ratio, processor = (ratio_of(found[ways[0]], found[ways[1]], what) for what in ("seconds", "processor"))
        times = {way: median_ms(found[way]) for way in ways}
        print(row(case.words, *(f"{value:.1f}" for value in times.values()), str(ratio), str(processor)), flush=True)
        peaks = {way: ask("steps", (way,), case, parent, small=MEMORY_SMALL)[way]["peak_bytes"] / 2**20 for way in ways}
        print(row(f"{case.words}: peak", *(f"{value:.0f} MiB" for value in peaks.values())), flush=True)
        record("steps", network=case.words, step_ms=times, ratio=vars(ratio), peak_mib=peaks)


# -- copies ---------------------------------------------------------------------------------------------------------


def compare_copies(shorten: int, parent: Path) -> None:
    """Print one and two copies over a slow link, and what computing and communicating alone take."""
    print(f"\ncopies: one and two copies of a tensor-parallel transformer, {LINK_MBIT_PER_S} Mbit/s between two ranks")
    if why := why_no_link():
        print(f"    left out: {why}")
        return
    print(row("network", "1 copy ms", "2 copies ms", "compute | comm. ms", "1 copy / 2 copies"))
    with limited_link(LINK_MBIT_PER_S) as names:
        for case in COPIES_CASES:
            folder = Path(tempfile.mkdtemp(dir=parent))
            argv = [
                sys.executable,
                *job("copies", ("1", "2", "1+", "2+", "communicate"), shortened(case, shorten), folder),
            ]
            # Both ranks are on one machine and would share memory: over the link goes what gloo sends.
            run_ranks(names, argv, {**environment(), "MSRUN_CPU_BACKEND": "gloo"}, folder)
            found = json.loads((folder / "out.json").read_text())
            check_losses("copies", {way: found[way] for way in ("1", "2", "1+", "2+")})
            tell_copies(case, found)


def tell_copies(case: Case, found: dict[str, Any]) -> None:
    """Print one network's line."""
    one, two, one_more, two_more, communicate = (median_ms(found[way]) for way in ("1", "2", "1+", "2+", "communicate"))
    compute = 1000 * statistics.median(found["1"]["computing"])
    ratio, bound = ratio_of(found["1"], found["2"]), max(compute, communicate)
    alone = f"{compute:.0f} | {communicate:.0f}"
    print(row(case.words, f"{one:.0f}", f"{two:.0f}", alone, str(ratio)), flush=True)
    times = {way: median_ms(found[way]) for way in ("1", "2", "1+", "2+", "communicate")} | {"compute": compute}
    record("copies", network=case.words, link_mbit_per_s=LINK_MBIT_PER_S, step_ms=times, ratio=vars(ratio))
    tell_target(f"two copies at least {COPIES_TARGET:g}x faster than one", ratio.median >= COPIES_TARGET)
    words = f"two copies within {COPIES_BOUND:g}x of the larger of computing and communicating"
    tell_target(f"{words} ({two / bound:.2f}x)", two <= COPIES_BOUND * bound)
    print(
        f"    with grad_matmul_communication_overlap: 1 copy {one_more:.0f} ms, 2 copies {two_more:.0f} ms "
        f"({ratio_of(found['1+'], found['2+'])}), {two_more / bound:.2f}x of the larger"
    )


# -- pipeline -------------------------------------------------------------------------------------------------------


def compare_pipeline(shorten: int, parent: Path) -> None:
    """Print the share of a step in which a rank's main thread has nothing to compute, beside the formula's bubble.

    The formula is for equal stages, so the rank with most to do is held against it; the first stage has less, since
    nobody asks for the gradient of its input. 1f1b, whose messages are read at the moment they are sent, is shown
    beside eager_1f1b.
    """
    print("\npipeline: idle share of a rank with 2 stages; formula (P - 1) / (m + P - 1)")
    print(row("network", "schedule", "step ms", "idle: busiest | mean", "formula", "difference"))
    for case in PIPELINE_CASES:
        found = ask("pipeline", PIPELINE_WAYS, shortened(case, shorten), parent)
        check_losses("pipeline", found)
        micro_size = case.sizes[-1]
        formula = (RANKS - 1) / (micro_size + RANKS - 1)
        for way in PIPELINE_WAYS:
            idle, mean_idle = idle_share(found[way], "busiest"), idle_share(found[way], "computing")
            difference = idle / formula - 1
            shares = f"{idle:.3f} | {mean_idle:.3f}"
            cells = (way, f"{median_ms(found[way]):.1f}", shares, f"{formula:.3f}", f"{100 * difference:+.0f} %")
            print(row(case.words, *cells), flush=True)
            shares_of = {"idle_busiest": idle, "idle_mean": mean_idle, "formula": formula}
            record("pipeline", network=case.words, schedule=way, step_ms=median_ms(found[way]), **shares_of)
        words = f"idle share of {way} at most {100 * BUBBLE_TARGET:g} % above the formula"
        tell_target(words, difference <= BUBBLE_TARGET)


def idle_share(way: dict[str, Any], what: str) -> float:
    """Return the median share of a step without computing, of the rank or ranks meant."""
    return 1 - statistics.median(used / took for used, took in zip(way[what], way["seconds"], strict=True))


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a third of the rounds")
    parser.add_argument("--ranks", type=int, default=RANKS, help="of dp, zero1, fsdp and tp")
    add_json_option(parser)
    options = parser.parse_args()
    parts = options.parts.split(",")
    if wrong := set(parts) - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(wrong))}: give some of {', '.join(PARTS)}")
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # jobs, links and folders are cleared away then, too
    print(f"python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} processors, ranks of one thread")
    with kept(options.json), tempfile.TemporaryDirectory(prefix="msrun-benchmark-") as name:
        folder, shorten = Path(name), 3 if options.quick else 1
        for part in parts:
            if part in COMPARISONS:
                compare(part, shorten, folder, options.ranks)
            if part == "fsdp":
                compare_memory(COMPARISONS[part].cases[0], folder)
        if "copies" in parts:
            compare_copies(shorten, folder)
        if "steps" in parts:
            compare_steps(shorten, folder)
        if "pipeline" in parts:
            compare_pipeline(shorten, folder)


if __name__ == "__main__":
    main()
