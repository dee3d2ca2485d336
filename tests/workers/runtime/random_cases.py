"""Runs random networks on forked ranks and compares each with one process.

usage: random_cases.py --seed S [--cases N] [--first I] [--world W ...] [--jobs J] [--result FILE.jsonl]
                       [--having TEXT ...]
       random_cases.py --seed S --case I [--world W ...]
       random_cases.py --json CASE, which may be shortened by hand
"""

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from random_networks.case import parse_case
from random_networks.grammar import draw_case
from random_networks.verdict import judge
from random_networks.worlds import prepare_process, run_case


def run(case):
    """Return the verdict on one case."""
    return judge(case, *run_case(case))


def show(case, verdict):
    print(case.to_json())
    print(f"-> {verdict.kind}: {verdict.message}")
    if verdict.trace:
        print(verdict.trace)


def run_one(case):
    verdict = run(case)
    show(case, verdict)
    return 0 if verdict.is_good else 1


def run_many(options, numbers, result):
    for number in numbers:
        case = draw_case(options.seed, number, options.world)
        if options.having and not all(text in case.to_json() for text in options.having):
            continue
        begin = time.monotonic()
        verdict = run(case)
        worlds = f" --world {' '.join(map(str, options.world))}" if options.world != [2, 2, 4] else ""
        found = {
            "number": number,
            "kind": verdict.kind,
            "reason": verdict.reason,
            "message": verdict.message,
            "trace": verdict.trace,
            "case": case.to_json(),
            "command": f"random_cases.py --seed {options.seed} --case {number}{worlds}",
            "seconds": round(time.monotonic() - begin, 2),
        }
        with result.open("a") as file:
            file.write(json.dumps(found) + "\n")
        if not verdict.is_good:
            print(f"{number}: {verdict.kind}: {verdict.message[:300]}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=15)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--json")
    parser.add_argument("--world", type=int, nargs="+", default=[2, 2, 4])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--result", type=Path, default=Path("random_cases.jsonl"))
    parser.add_argument("--having", nargs="+", help="run only cases that contain all these texts")
    options = parser.parse_args()
    prepare_process()
    if options.json or options.case is not None:
        case = parse_case(options.json) if options.json else draw_case(options.seed, options.case, options.world)
        sys.exit(run_one(case))
    options.result.unlink(missing_ok=True)
    numbers = range(options.first, options.first + options.cases)
    children = []
    for job in range(options.jobs):
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            run_many(options, numbers[job :: options.jobs], options.result)
            sys.stdout.flush()
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    found = [json.loads(line) for line in options.result.read_text().splitlines()]
    print(f"{len(found)} cases of seed {options.seed}:", dict(Counter(entry["kind"] for entry in found)))
    for reason, count in Counter(entry["reason"] for entry in found if entry["kind"] == "refused").most_common():
        print(f"  refused {count} x {reason}")


main()
