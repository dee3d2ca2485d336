"""make mutants: put small faults into the launcher, the graph and the rank-table rules, and see whether a test fails.

Each fault is put alone into a copy of the tree, where the tests that reach its line run: those of tests/unit first,
then end-to-end ones, quick ones first, until one fails or is stuck. An end-to-end test that fails runs again without
the fault: where it fails too, it has noticed nothing, and the others go on. Exit status 1 below 85 % caught.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from msrun import contract
from mutants.mutations import Mutation, block_of, draw
from mutants.survey import REPOSITORY, Survey, digest_tests, file_of, run_survey

ROOMS = (
    "msrun/agent",
    "msrun/cluster",
    "msrun/launch",
    "msrun/runtime/sharding",
    "msrun/runtime/partition",
    "msrun/runtime/schedule",
    "msrun/runtime/execute",
    "ranktable/rules",
)
KEPT = REPOSITORY / "build" / "mutants"
WANTED_SHARE = 0.85
UNIT_S = 60.0
"""Of tests/unit, so many seconds of tests run for one fault at most; the quickest ones."""
END_TO_END_S = 60.0
MARK = "MUTANTS_MARK"
"""Set for every process of a run; found again in /proc/PID/environ."""
TEST_LIMIT_S = 60
DEADLINE_S = 30


@dataclass(frozen=True)
class Outcome:
    """What became of one fault."""

    mutation: Mutation
    caught_by: str
    """The test; empty when none noticed."""
    tests: int
    """How many reach the line."""


def tracked_files() -> list[str]:
    """Return the files of the tree, relative to the repository: those that git knows or would add."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(words, cwd=REPOSITORY, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{REPOSITORY}: make mutants copies what git lists ({done.stderr.strip()}); run it in a clone")
    return [name for name in done.stdout.split("\0") if name and (REPOSITORY / name).is_file()]


def copy_tree(folder: Path) -> Path:
    """Return a copy of the tree in a new folder below this one."""
    copy = folder / "tree"
    for name in tracked_files():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, target)
    return copy


def read_sources(rooms: Iterable[str]) -> dict[str, str]:
    """Return the modules of these folders, or these modules."""
    found = [path for room in rooms for path in [*(REPOSITORY / room).rglob("*.py"), REPOSITORY / room]]
    found = [path for path in found if path.is_file()]
    return {str(path.relative_to(REPOSITORY)): path.read_text() for path in sorted(found)}


def batches(module: str, tests: list[str], survey: Survey) -> list[list[str]]:
    """Return the tests that are to run together: the module's own, other unit tests, end-to-end ones."""
    name = f"_{Path(module).stem}.py"
    unit = [test for test in tests if test.startswith("tests/unit/")]
    own = [test for test in unit if file_of(test).endswith(name)]
    more = [test for test in unit if not file_of(test).endswith(name)]
    end_to_end = [test for test in tests if test.startswith("tests/e2e/")]
    return [survey.within(own, UNIT_S), survey.within(more, UNIT_S), survey.within(end_to_end, END_TO_END_S)]


class Slot:
    """One copy of the tree, for one fault at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._copy = copy_tree(folder)
        self._mark = secrets.token_hex(16)
        self._writes = 0

    def judge(self, mutation: Mutation, survey: Survey, source: str) -> Outcome:
        """Run the tests that reach a fault, until one of them notices it."""
        block = block_of(ast.parse(source), mutation.line, mutation.column)
        tests = survey.tests_of(mutation.path, block)
        for chosen in batches(mutation.path, tests, survey):
            while chosen:
                sum_s = survey.cost_s(chosen)
                self._write(mutation.path, mutation.apply(source))
                failed = self._run(chosen, sum_s)
                self._write(mutation.path, source)
                if failed is None:
                    break
                is_sure = failed not in chosen or failed.startswith("tests/unit/")
                if is_sure or self._run([failed], survey.cost_s([failed])) is None:
                    return Outcome(mutation, failed, len(tests))
                chosen.remove(failed)
        return Outcome(mutation, "", len(tests))

    def _write(self, name: str, source: str) -> None:
        """Write a module so that no compiled form of it is taken for it."""
        path = self._copy / name
        path.write_text(source)
        self._writes += 1
        moment = time.time() + 2 * self._writes  # a compiled module is known by whole seconds and the size
        os.utime(path, (moment, moment))

    def _run(self, tests: list[str], expected_s: float) -> str | None:
        """Return the test that failed, or what else ended the run; None when all passed."""
        reached = self._folder / "reached"
        shutil.rmtree(reached, ignore_errors=True)
        reached.mkdir()
        (self._folder / "tests.json").write_text(json.dumps(tests))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self._copy), str(self._copy / "tests")]),
            "REACH_FOLDER": str(reached),
            "REACH_TESTS": str(self._folder / "tests.json"),
            "DEADLINE_S": str(DEADLINE_S),
            MARK: self._mark,
        }
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "mutants.reach_plugin", f"--timeout={TEST_LIMIT_S}"]
        command = [sys.executable, "-m", "pytest", *options, *dict.fromkeys(map(file_of, tests))]
        code: int | None = None
        with (self._folder / "log").open("wb") as log, contextlib.suppress(subprocess.TimeoutExpired):
            process = subprocess.Popen(
                command,
                cwd=self._copy,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            code = process.wait(3 * expected_s + 3 * TEST_LIMIT_S)
        self.end_all()
        process.wait()
        done = [json.loads(line) for written in reached.glob("tests-*") for line in written.read_text().splitlines()]
        failed = [test for test, _, has_passed in done if not has_passed]
        if code == 0:
            return None
        if failed:
            return str(failed[0])
        return "time limit" if code is None else f"pytest, which ended with {code}"

    def end_all(self) -> None:
        """End what a test has left, or would run for ever."""
        text = f"{MARK}={self._mark}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if text in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def up_to_date(modules: list[str], jobs: int) -> Survey:
    """Return what the tests reach, which run for it where they have changed since."""
    kept = KEPT / "survey.pickle"
    survey = Survey.read(kept)
    if survey.tests == digest_tests(REPOSITORY):
        return survey
    print("which tests reach what: running them once", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        survey = run_survey(copy_tree(folder), modules, jobs)
        KEPT.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "survey.log", KEPT)
    if not survey.seconds:
        sys.exit(f"no test passed; see {KEPT / 'survey.log'}")
    survey.write(kept)
    return survey


def judge_all(drawn: list[Mutation], survey: Survey, sources: dict[str, str], jobs: int) -> list[Outcome]:
    """Judge all faults, some at a time, and say what became of each."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        Path(name).chmod(0o711)
        everyone = [Slot(Path(name, str(number))) for number in range(jobs)]
        slots: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in everyone:
            slots.put(slot)

        def judge(mutation: Mutation) -> Outcome:
            slot = slots.get()
            try:
                return slot.judge(mutation, survey, sources[mutation.path])
            finally:
                slots.put(slot)

        with ThreadPoolExecutor(jobs) as pool:
            try:
                for done in as_completed([pool.submit(judge, mutation) for mutation in drawn]):
                    outcomes.append(done.result())
                    print(_line(outcomes[-1], len(outcomes), len(drawn)), flush=True)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for slot in everyone:
                    slot.end_all()
    return outcomes


def _line(outcome: Outcome, number: int, total: int) -> str:
    mutation = outcome.mutation
    what = f"caught by {outcome.caught_by}" if outcome.caught_by else f"SURVIVED {outcome.tests} tests"
    return f"{number:3}/{total} {mutation.path}:{mutation.line} {mutation.kind}: {what}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("--number", type=int, default=60, help="lines to change")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="+", default=ROOMS, help="folders or files to change")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--dry-run", action="store_true", help="only show the faults")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(contract.EXIT_SIGNAL_BASE + signal.SIGTERM))
    sources = read_sources(asked.modules)
    drawn = draw(sources, asked.number, asked.seed)
    if asked.dry_run:
        for mutation in drawn:
            print(f"{mutation.path}:{mutation.line} {mutation.kind}\n{mutation.describe(sources[mutation.path])}")
        return 0
    survey = up_to_date(sorted(read_sources(ROOMS)), asked.jobs)
    begin = time.monotonic()
    outcomes = judge_all(drawn, survey, sources, asked.jobs)
    caught = sum(bool(outcome.caught_by) for outcome in outcomes)
    for outcome in outcomes:
        if not outcome.caught_by:
            mutation = outcome.mutation
            print(f"\nsurvived: {mutation.path}:{mutation.line} {mutation.kind}; {outcome.tests} tests reach it")
            print(mutation.describe(sources[mutation.path]))
    share = caught / len(outcomes)
    took_s = time.monotonic() - begin
    print(f"\nseed {asked.seed}: {caught} of {len(outcomes)} faults caught ({share:.0%}) in {took_s:.0f} s")
    return 0 if share >= WANTED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
