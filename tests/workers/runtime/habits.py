"""Runs habits of training scripts in one mode, or all, on two forked ranks and alone; RESULT.json holds the verdicts.

usage: habits.py MODE|all [RESULT.json] [--only NAME ...]

A world runs one habit after the other. After one that is refused or fails, a new world goes on with the next.
"""

import argparse
import json
import pickle
import shutil
import tempfile
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
    return {name: [run_habit(name, way, broadcasts=mode in OWN_ROWS) for way in ways] for name in names}


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
    """Yield names and verdicts."""
    folder = Path(tempfile.mkdtemp(prefix="habits-"))
    try:
        (ended,) = wait_for([fork_process(folder / "alone", {}, lambda: run_alone(names, mode))], [folder / "alone"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert ended.kind == "done", ended.trace or ended.error
    left = list(names)
    while left:
        if mode == ALONE:
            worlds = [[ended.trained[name][0]] for name in left]
        else:
            worlds = run_world(left, mode)
        for reports in worlds:
            name = left.pop(0)
            alone = ended.trained[name]
            yield name, judge(alone[0], alone[-1], reports, HABITS[name].limit)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=(*MODES, ALONE, "all"))
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    prepare_process()
    found = {}
    for mode in MODES if options.mode == "all" else [options.mode]:
        names = [name for name, habit in HABITS.items() if mode in (*habit.modes, ALONE)]
        names = [name for name in names if (name in options.only if options.only else is_asked(f"{mode}/{name}"))]
        for name, verdict in run_all(names, mode) if names else ():
            found[f"{mode}/{name}"] = vars(verdict)
            print(f"{name} | {mode} | {short(verdict)[:300]}", verdict.trace if options.only else "", flush=True)
    if options.result:
        options.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
