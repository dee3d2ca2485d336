"""Dry runs beside real runs of the same script on this machine: bytes, peak memory, time of a step.

    python benchmarks/simulate.py                        an MLP, a conv net and a transformer on 2 and 4 ranks
    python benchmarks/simulate.py --ranks 2 --networks mlp --rounds 1

Every real job trains, and in each of its rounds measures a device profile between two halves of the steps that it
times, so that other work of the machine concerns both; the dry run of the same script uses the mean of these profiles.
Peak memory is that of torch's allocator, as torch's profiler reports it, with parameters and optimizer state. Where the
machine has fewer cores than ranks, or other work, times are those of ranks that share them; the processor time of a
rank beside that of the operators alone does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import add_json_option, kept, record
from launch import DEADLINE_S, HERE, environment

JOB = str(HERE / "simulate_job.py")
MODES = {2: ("plain", "level3", "ddp", "fsdp"), 4: ("level1", "pipeline"), 8: ("level3",)}
"""Ranks -> modes."""


def run(options: list[str], words: list[str], folder: Path) -> None:
    """Run msrun to its end."""
    argv = [sys.executable, "-m", "msrun", "--quiet", *options, JOB, *words]
    done = subprocess.run(argv, cwd=folder, env=environment(), capture_output=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr.decode()[-3000:]}")


def mean(found: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of the numbers at equal places of equal structures."""
    first = found[0]
    if isinstance(first, dict):
        return {key: mean([each[key] for each in found]) for key in first}
    if isinstance(first, list):
        return [mean(each) for each in zip(*found, strict=True)]
    return statistics.mean(found) if isinstance(first, float) else first


def measure(network: str, mode: str, ranks: int, rounds: int, folder: Path) -> None:
    """Run a network for real and dry, and print a line for its fullest rank."""
    profile, result = folder / "profile", folder / "figures"
    words, count = [network, mode, str(profile), str(result), str(rounds)], ["--worker_num", str(ranks)]
    run([*count, "--tail_worker_log=none", "--device_target=cpu"], words, folder)
    real = json.loads(Path(f"{result}.0").read_text())
    device = folder / "mean.json"
    device.write_text(json.dumps(mean([json.loads(Path(f"{profile}.{n}.json").read_text()) for n in range(rounds)])))
    dry = ["--sim_level=2", "--local_worker_num", str(ranks), "--sim_device", str(device), "--log_dir=dry"]
    run([*count, *dry], words, folder)
    report = json.loads((folder / "dry" / "simulation.json").read_text())
    real_s, processor_s = mean(real["step_s"]), mean(real["processor_s"])
    noise = (max(real["step_s"]) - min(real["step_s"])) / real_s
    found: dict[str, Any] = report["classes"][0]
    memory = found["memory"]
    exact = (
        memory["parameter_bytes"] == real["parameter_bytes"]
        and memory["optimizer_state_bytes"] == real["optimizer_state_bytes"]
        and real["traffic"] in (None, found["traffic"])  # what torch's DDP and FSDP2 send is not counted
    )
    peak_error = memory["peak_bytes"] / real["peak_bytes"] - 1
    step_s = report["step"]["seconds"]
    time_error = step_s / real_s - 1
    print(
        f"{network:<12} {mode:<9} {ranks} ranks  bytes {'equal' if exact else 'DIFFER'}  peak "
        f"{memory['peak_bytes'] / 1e6:7.2f} MB, real {real['peak_bytes'] / 1e6:7.2f} MB: {100 * peak_error:+5.1f} %  "
        f"step {step_s * 1e3:6.1f} ms, real {real_s * 1e3:6.1f} ms: {100 * time_error:+4.0f} %  "
        f"operators {report['step']['compute_s'] * 1e3:6.1f} ms, processor {processor_s * 1e3:6.1f} ms  "
        f"rounds differ by {100 * noise:.0f} %",
        flush=True,
    )
    record(
        "dry run",
        network=network,
        mode=mode,
        ranks=ranks,
        bytes_equal=exact,
        peak_bytes=memory["peak_bytes"],
        real_peak_bytes=real["peak_bytes"],
        peak_error=peak_error,
        step_s=step_s,
        real_step_s=real_s,
        step_error=time_error,
        operators_s=report["step"]["compute_s"],
        real_processor_s=processor_s,
        rounds_differ_by=noise,
    )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=list(MODES))
    parser.add_argument("--networks", nargs="+", default=["mlp", "conv", "transformer"])
    parser.add_argument("--modes", nargs="+", help="of those of each number of ranks: by default all")
    parser.add_argument("--rounds", type=int, default=5, help="of each: a profile and ten steps; means count")
    add_json_option(parser)
    options = parser.parse_args()
    with kept(options.json), tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            for network in options.networks:
                for mode in [each for each in MODES[ranks] if each in (options.modes or MODES[ranks])]:
                    measure(network, mode, ranks, options.rounds, Path(folder))


if __name__ == "__main__":
    main()
