"""Search of strategies: how long it takes, how that grows with the operators, and how good its plans are in real steps.

    python benchmarks/search.py                    all parts
    python benchmarks/search.py --parts time --layers 6,12,24

    time   a transformer of elementary operators, over 1,000 of them at 24 layers, on 8, 64 and 1,024 devices: seconds
           of one core, a line through the times of several depths, and the most memory that the process held
    real   networks on ranks of this machine: steps with the strategies that are found for its measured profile beside
           every uniform plan that is legal (data parallel, tensor parallel of every degree, both, and each with
           optimizer parallel), in turns in one job
    degrees  the same for the division of a step that `search_degrees` finds: beside the fastest of other kinds

Graphs are captured on the meta device: only shapes count.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from figures import add_json_option, kept, record
from launch import DEADLINE_S, HERE, environment
from search_networks import Transformer

from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, find_target
from msrun.runtime.cost.devices import find_profile
from msrun.runtime.partition.decide import Constraints
from msrun.runtime.partition.price import StepSpec
from msrun.runtime.partition.program import Decisions
from msrun.runtime.search.search import Search, SearchSpec
from msrun.runtime.sharding.layout import TensorLayout, build_mesh

JOB = str(HERE / "search_job.py")
PARTS = ("time", "real", "degrees")
DEVICES = (8, 64, 1024)
MODES = ("dynamic_programming",)
MOST_S, SLOWER = 10.0, 1.05
"""Aims: seconds of a search at 24 layers, and the most that the searched plan may take of the fastest one."""
NETWORKS = ("mlp", "transformer", "resnet", "mixtral")


@functools.cache
def graph_of(layers: int, batch: int = 1024) -> CapturedGraph:
    """Return the graph of a transformer."""
    with torch.device("meta"):
        network = Transformer(layers, width=1024, heads=16, vocabulary=32768)
        text = torch.zeros(batch, 512, dtype=torch.int64)
    shape = tuple(text.shape)
    return capture(find_target(network), [text, text], {}, input_shapes=[shape, shape], parameter_shapes={})


def _step_of(_decisions: Decisions, *, shards_all: bool) -> StepSpec:  # noqa: ARG001
    return StepSpec()


def measure_time(layers: list[int], modes: list[str], device: str) -> None:
    """Print and keep the seconds of searches."""
    for devices in DEVICES:
        for mode in modes:
            times, counts = [], []
            for depth in layers:
                graph = graph_of(depth)
                mesh = build_mesh(devices)
                given = Constraints([TensorLayout((mesh.axes, ()))] * 2)
                operators = sum(node.op == "call_function" for node in graph.graph.nodes)
                begin = time.process_time()
                found = Search(graph, mesh, given, SearchSpec(mode, find_profile(device)), _step_of).run()
                seconds = time.process_time() - begin
                times.append(seconds)
                counts.append(operators)
                gain = found.data_parallel.seconds / found.plan.price.seconds
                fits = found.data_parallel.memory_bytes <= found.limit_bytes
                beside = f"{gain:.2f}x faster than data parallel{'' if fits else ', which does not fit'}"
                is_met = seconds <= MOST_S
                print(
                    f"{mode:<22}{devices:>6} devices {depth:>3} layers {operators:>6} operators {seconds:7.2f} s of "
                    f"one core; {beside}{'' if is_met else '   MISSED'}",
                    flush=True,
                )
                record(
                    mode, devices=devices, layers=depth, operators=operators, cpu_s=seconds, gain=gain, is_met=is_met
                )
            if len(times) > 2:
                slope, start = np.polyfit(counts, times, 1)
                off = float(np.abs(np.polyval((slope, start), counts) / times - 1).max())
                held_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                print(
                    f"{'':<22}a line: {start:.2f} s + {slope * 1e3:.2f} ms an operator, at most {off:.0%} off; "
                    f"{held_mib:.0f} MiB held"
                )
                record(f"{mode} line", devices=devices, start_s=start, s_per_operator=slope, off=off, held_mib=held_mib)


def measure_real(what: str, networks: list[str], ranks: int, rounds: int) -> None:
    """Print and keep the step times of what is found, and of the others.

    Args:
        what: "strategies" of operators, or "degrees".
    """
    for network in networks:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "result.json")
            command = [sys.executable, "-m", "msrun", "--worker_num", str(ranks), "--log_dir", folder]
            command += [JOB, what, network, str(rounds), str(result)]
            done = subprocess.run(
                command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S * 4
            )
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                raise SystemExit(done.returncode)
            found = json.loads(result.read_text())
        best = min(found, key=lambda name: found[name]["median_s"])
        for name, each in found.items():
            priced = "" if each["priced_s"] is None else f", priced {each['priced_s'] * 1e3:.2f}"
            print(f"{network:<12}{ranks} ranks {name:<18}{each['median_s'] * 1e3:9.2f} ms a step{priced}")
        chosen = next(iter(found))
        ratio = found[chosen]["median_s"] / found[best]["median_s"]
        is_met = ratio <= SLOWER
        words = f"{chosen} takes {ratio:.2f} times the fastest ({best}): {'met' if is_met else 'MISSED'}"
        print(f"{network:<12}{ranks} ranks {words}; load {os.getloadavg()[0]:.1f}", flush=True)
        record(f"{what} {network}", plans=found, fastest=best, ratio=ratio, is_met=is_met, ranks=ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--layers", default="6,12,24", help="depths of the transformer")
    parser.add_argument("--modes", default=",".join(MODES), help="some of %(default)s")
    parser.add_argument("--device", default="h100", help="profile of a device")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each plan")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="some of %(default)s")
    parser.add_argument("--ranks", default="4,8", help="of the real steps")
    add_json_option(parser)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # figures so far are kept
    with kept(options.json):
        if "time" in options.parts.split(","):
            layers = [int(depth) for depth in options.layers.split(",")]
            measure_time(layers, options.modes.split(","), options.device)
        for part, what in (("real", "strategies"), ("degrees", "degrees")):
            for ranks in options.ranks.split(",") if part in options.parts.split(",") else ():
                measure_real(what, options.networks.split(","), int(ranks), options.rounds)


if __name__ == "__main__":
    main()
