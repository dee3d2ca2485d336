"""The first step of a network, and steps with sequences of a length not seen before, beside torch's parallelize_module.

    python benchmarks/start.py                    2, 16 and 32 layers on 2 ranks
    python benchmarks/start.py --layers 2,8

Both train the same transformer, tensor parallel, in the same processes; a line has the seconds of the processor that
a rank spent on a step: the first, that of a second start of the job, which finds what the first one has kept, the
second of another length, later ones of new lengths (median), and one that is known. The losses of all steps must be
equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import add_json_option, kept, record
from launch import DEADLINE_S, environment

LENGTHS = (16, 18, 20, 22, 24, 26, 28)
WIDTH, ROWS = 32, 4


def measure(layers: int) -> dict[str, dict[str, float]]:
    """Return what a rank has measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "msrun", "--worker_num=2", "--quiet", "--tail_worker_log=none"]
        job = [__file__, "--layers", str(layers), "--result", f"{folder}/result.json"]
        env = environment() | {"MSRUN_CAPTURE_CACHE": f"{folder}/kept"}
        starts: list[dict[str, dict[str, float]]] = []
        for _ in range(2):
            subprocess.run([*command, *job], cwd=folder, env=env, check=True, timeout=DEADLINE_S)
            starts.append(json.loads(Path(folder, "result.json").read_text()))
    first, second = starts
    return {
        way: {"first_s": row["first_s"], "second_start_s": second[way]["first_s"]} | row for way, row in first.items()
    }


def run_job(layers: int, result: str) -> None:
    """Be a rank."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from msrun.runtime import AutoParallel, WithLoss, get_rank, init, parallelize

    init()
    torch.set_num_threads(1)

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True) for _ in range(layers))
        )

    def train(call: Any, parameters: Any) -> tuple[list[float], list[float]]:
        seconds, losses = [], []
        optimizer = torch.optim.SGD(parameters, 0.01)
        for length in (*LENGTHS, LENGTHS[-1]):
            x = torch.randn(ROWS, length, WIDTH, generator=torch.Generator().manual_seed(length))
            begin = time.process_time()
            loss = call(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.process_time() - begin)
            losses.append(loss.item())
        return seconds, losses

    theirs = parallelize_module(
        network(),
        init_device_mesh("cpu", (2,)),
        {"*.linear1": ColwiseParallel(), "*.linear2": RowwiseParallel()},
    )
    ours = WithLoss(network(), nn.MSELoss())
    parallelize(ours, {"network.*.linear1": "colwise", "network.*.linear2": "rowwise"})
    step = AutoParallel(ours).dataset_strategy("full_batch")
    found = {
        "torch": train(lambda x: nn.functional.mse_loss(theirs(x), x), theirs.parameters()),
        "msrun": train(lambda x: step(x, x), ours.parameters()),
    }
    torch.testing.assert_close(found["msrun"][1], found["torch"][1], rtol=1e-4, atol=0)
    if get_rank() == 0:
        table = {
            name: {
                "first_s": seconds[0],
                "second_length_s": seconds[1],
                "new_length_s": statistics.median(seconds[2:-1]),
                "known_length_s": seconds[-1],
            }
            for name, (seconds, _) in found.items()
        }
        Path(result).write_text(json.dumps(table), encoding="utf-8")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", default="2,16,32", help="depths")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args()
    depths = [int(depth) for depth in options.layers.split(",")]
    if options.result:
        run_job(depths[0], options.result)
        return
    with kept(options.json):
        print(
            f"{'layers':>6} {'':6} {'first':>8} {'second start':>13} {'second length':>14} {'new length':>11} "
            f"{'known':>8}   CPU s of a rank"
        )
        for layers in depths:
            for name, row in measure(layers).items():
                record("start", layers=layers, way=name, **row)
                print(
                    f"{layers:>6} {name:6} "
                    + " ".join(f"{row[k]:>{w}.3f}" for k, w in zip(row, (8, 13, 14, 11, 8), strict=True))
                )


if __name__ == "__main__":
    main()
