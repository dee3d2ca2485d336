"""Runs habits of training scripts in one mode on two forked ranks, and alone; RESULT.json holds the verdicts.

usage: habits.py MODE [RESULT.json] [--only NAME ...] [--trace]

A world runs one habit after the other. After one that is refused or fails, a new world goes on with the next.
"""

import argparse
import json
import pickle
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from only_cases import is_asked
from random_networks.worlds import (
    Report,
    fork_process,
    fork_ranks,
    paths_of_ranks,
    prepare_process,
    report_of,
    wait_for,
    write_report,
)
from training_habits import HABITS, MODES
from training_habits.trial import ALONE, IN_HALVES, OWN_ROWS, WORLD_SIZE
from training_habits.verdict import judge, short

from msrun.runtime import get_rank


def run_habit(name, mode, *, broadcasts=False):
    def work():
        trial = HABITS[name].trial(mode, broadcasts=broadcasts)
        HABITS[name].run(trial)
        return trial.notes

    return report_of(work)


def run_alone(names, mode):
    """Return what every habit sees in one process, and in one that takes half of the rows at a time."""
    warnings.simplefilter("ignore")
    ways = (ALONE, IN_HALVES) if mode in (*OWN_ROWS, "pipeline") else (ALONE,)
    return {name: [run_habit(name, way, broadcasts=mode == "data_parallel") for way in ways] for name in names}


def run_on_rank(names, mode, folder):
    """Run habits until one does not end well."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for number, name in enumerate(names):
        report = run_habit(name, mode)
        write_report(folder / f"{number}-{get_rank()}", report)
        if report.kind != "done":
            return
        dist.barrier()


def run_world(names, mode):
    """Return the reports of the ranks on each habit, as far as one world came."""
    folder = Path(tempfile.mkdtemp(prefix="habits-"))
    try:
        pids = fork_ranks(folder, WORLD_SIZE, lambda: run_on_rank(names, mode, folder))
        ends = wait_for(pids, paths_of_ranks(folder, WORLD_SIZE))
        found = []
        for number in range(len(names)):
            files = [folder / f"{number}-{rank}.out" for rank in range(WORLD_SIZE)]
            reports = [
                pickle.loads(file.read_bytes()) if file.exists() else end_of(end)
                for file, end in zip(files, ends, strict=True)
            ]
            found.append(reports)
            if any(report.kind != "done" for report in reports):
                break
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end_of(end):
    """Return how a process ended that has no report on a habit."""
    return end if end.kind != "done" else Report("error", error="left", message="Connection closed by peer")


def run_all(names, mode):
    """Return name -> verdict."""
    folder = Path(tempfile.mkdtemp(prefix="habits-"))
    try:
        (ended,) = wait_for([fork_process(folder / "alone", {}, lambda: run_alone(names, mode))], [folder / "alone"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert ended.kind == "done", ended.trace or ended.error
    if mode == ALONE:
        return {name: judge(reports[0], reports[0], reports) for name, reports in ended.trained.items()}
    left, verdicts = list(names), {}
    while left:
        for reports in run_world(left, mode):
            name = left.pop(0)
            alone = ended.trained[name]
            verdicts[name] = judge(alone[0], alone[-1], reports)
    return verdicts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=(*MODES, ALONE))
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    prepare_process()
    names = [name for name, habit in HABITS.items() if options.mode in (*habit.modes, ALONE)]
    names = [name for name in names if name in options.only] if options.only else list(filter(is_asked, names))
    begin = time.monotonic()
    verdicts = run_all(names, options.mode)
    if options.result:
        found = {name: {"kind": v.kind, "message": v.message, "trace": v.trace} for name, v in verdicts.items()}
        options.result.write_text(json.dumps(found))
    for name, verdict in verdicts.items():
        print(f"{name} | {options.mode} | {short(verdict)[:300]}")
        if options.trace and verdict.trace:
            print(verdict.trace)
    print(f"{len(names)} habits, {time.monotonic() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
