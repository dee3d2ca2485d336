"""make mutants: put small faults into the launcher, the graph and the rank-table rules, and see whether a test fails.

First all fast tests run once on a copy of the tree in which the lines that get a fault are marked, which shows what
tests reach each of them, in whatever process. Then each fault is put alone into a copy, where the tests that reach it
run until one fails: first those of the module, then other unit tests, then end-to-end ones. An end-to-end test that
fails runs again without the fault: where it fails too, it has noticed nothing. Exit status 1 below 85 % caught.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from msrun import contract
from mutants.mutations import Mutation, draw, mark

REPOSITORY = Path(__file__).resolve().parents[2]
ROOMS = (
    "msrun/agent",
    "msrun/cluster",
    "msrun/launch",
    *(f"msrun/runtime/{room}" for room in ("sharding", "partition", "schedule", "execute")),
    "ranktable/rules",
)
WANTED_SHARE = 0.85
LIMIT_S = 600.0
"""How long the tests of one fault run at most."""
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


def copy_tree(folder):
    """Return a copy of the tree in a new folder below this one: the files that git knows or would add."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(words, cwd=REPOSITORY, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{REPOSITORY}: make mutants copies what git lists ({done.stderr.strip()}); run it in a clone")
    copy = folder / "tree"
    for name in filter(None, done.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    return copy


def read_sources(rooms):
    """Return the modules of these folders, or these modules."""
    found = [path for room in rooms for path in [*(REPOSITORY / room).rglob("*.py"), REPOSITORY / room]]
    return {str(path.relative_to(REPOSITORY)): path.read_text() for path in sorted(found) if path.is_file()}


def name_tests(module):
    """Return the expression that finds the unit tests of a module in their text, and the ends of their names."""
    path = Path(module)
    folder = ".".join(path.parts[:-1])
    imports = rf"from {folder}\.{path.stem} import|from {folder} import .*\b{path.stem}\b"
    return re.compile(imports), (f"_{path.stem}.py", f"_{path.parent.name}.py")


@functools.cache
def shared_file(test):
    """Return the file of a test, which has fixtures that several of its tests share; empty when it has none."""
    file, _, name = test.partition("::")
    return file if name and re.search(r'scope="(module|session)"', (REPOSITORY / file).read_text()) else ""


def order_tests(mutation, reached):
    """Return the tests that a fault is judged by: the module's own, other unit tests, others.

    What runs while a module is imported is reached by all of its own tests; what a fixture of a file does for its first
    test, by all of that file.
    """
    imports, ends = name_tests(mutation.path)
    unit = [*(REPOSITORY / "tests" / "unit").rglob("test_*.py")]
    own = [path for path in unit if path.name.endswith(ends) or imports.search(path.read_text())]
    files = {str(path.relative_to(REPOSITORY)) for path in own}
    tests = {shared_file(test) or test for test in reached if test} | (set() if all(reached) else files)

    def place(test):
        file = test.partition("::")[0]
        return file not in files, not file.startswith("tests/unit/"), test

    return sorted(tests, key=place)


REACH = """import os, time

FOLDER = {folder!r}
seen, running = set(), [0.0, [], ""]

def reach(number):
    try:
        note(number)
    except OSError:
        pass

def note(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if time.monotonic() > running[0] or test not in (*running[1], running[2]):
        running[:] = time.monotonic() + 0.02, [*that_run()], test
    for each in [test] if test in running[1] else running[1] or [""]:
        if (number, each) not in seen:
            seen.add((number, each))
            with open(os.open(FOLDER + "/" + str(number), os.O_WRONLY | os.O_APPEND), "w") as file:
                file.write(each + "\\n")

def that_run():
    for one in os.scandir(FOLDER + "/running"):
        try:
            yield os.readlink(one.path)
        except OSError:  # it has just ended
            pass

def pytest_runtest_logstart(nodeid):
    pytest_runtest_logfinish()
    os.symlink(nodeid, FOLDER + "/running/" + str(os.getpid()))

def pytest_runtest_logfinish():
    if os.path.lexists(name := FOLDER + "/running/" + str(os.getpid())):
        os.unlink(name)
"""
"""The module of a marked tree that notes which test comes to a mark; none: while all are collected.

A process whose environment names no test that runs now, as one of a warm server has, may be of any of those that do.
"""


class Slot:
    """One copy of the tree, for one fault at a time."""

    def __init__(self, folder):
        self._folder = folder
        folder.mkdir()
        self._copy = copy_tree(folder)
        self._mark = secrets.token_hex(16)
        self._writes = 0

    def find_reached(self, drawn, sources):
        """Run all fast tests on marked modules; return the tests that come to each fault, "" for no test."""
        folder = self._folder / "reached"
        (folder / "running").mkdir(parents=True)
        for number in range(len(drawn)):
            (folder / str(number)).touch()
            (folder / str(number)).chmod(0o666)
        for path in {mutation.path for mutation in drawn}:
            numbers = {number: mutation.begin for number, mutation in enumerate(drawn) if mutation.path == path}
            self._write(path, mark(sources[path], numbers))
        self._write("msrun/reached.py", REACH.format(folder=str(folder)))
        workers = str(2 * (os.cpu_count() or 1))
        self._run(["--workers", workers, "tests"], 10 * LIMIT_S, ["-p", "msrun.reached"])
        if not any((folder / str(number)).stat().st_size for number in range(len(drawn))):
            sys.exit(f"no test comes to any fault; pytest says\n{(self._folder / 'log').read_text()[-2000:]}")
        (self._copy / "msrun/reached.py").unlink()
        for path in {mutation.path for mutation in drawn}:
            self._write(path, sources[path])
        return [set((folder / str(number)).read_text().splitlines()) for number in range(len(drawn))]

    def judge(self, mutation, source, tests):
        """Run the tests of a fault until one of them notices it."""
        while tests:
            self._write(mutation.path, mutation.apply(source))
            failed = self._run(["-x", *tests], LIMIT_S)
            self._write(mutation.path, source)
            if failed and failed.startswith("tests/e2e/") and self._run([failed], LIMIT_S):
                places = [place for place, test in enumerate(tests) if failed.startswith(test)]
                tests = tests[places[0] + 1 :] if places else []
            else:
                return Outcome(mutation, failed)
        return Outcome(mutation, "")

    def _write(self, name, source):
        """Write a module so that no compiled form of it is taken for it."""
        path = self._copy / name
        path.write_text(source)
        self._writes += 1
        moment = time.time() + 2 * self._writes  # a compiled module is known by whole seconds and the size
        os.utime(path, (moment, moment))

    def _run(self, words, limit_s, plugin=()):
        """Return the first test that failed, or what else ended the run; empty when all passed or the time was up."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self._copy), str(self._copy / "tests")]),
            "DEADLINE_S": str(DEADLINE_S),
            MARK: self._mark,
        }
        options = ["-q", "-rfE", f"--timeout={TEST_LIMIT_S}", "-m", "not slow"]
        words_file, log = self._folder / "words", self._folder / "log"
        words_file.write_text("\n".join([*options, "--hypothesis-profile=fast", *words]))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, f"@{words_file}"]
        code = None
        with log.open("wb") as out, contextlib.suppress(subprocess.TimeoutExpired):
            process = subprocess.Popen(
                command,
                cwd=self._copy,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            code = process.wait(limit_s)
        self.end_all()
        process.wait()
        if code in (0, None, 5):  # 5: none of them is a fast one
            return ""
        failed = re.search(
            r"^(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - |$)", log.read_text(errors="replace"), re.MULTILINE
        )
        return failed[1] if failed else f"pytest, which ended with {code}"

    def end_all(self):
        """End what a test has left, or would run for ever."""
        text = f"{MARK}={self._mark}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if text in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


def judge_all(drawn, sources, jobs):
    """Judge all faults, some at a time, and say what became of each."""
    outcomes = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
        folder.chmod(0o711)
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        slots = queue.SimpleQueue()
        for number in range(jobs):
            slots.put(slot := Slot(folder / str(number)))
            stack.callback(slot.end_all)
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        first = slots.get()
        reached = first.find_reached(drawn, sources)
        slots.put(first)

        def judge(mutation, reached):
            slot = slots.get()
            try:
                tests = order_tests(mutation, reached)
                return slot.judge(mutation, sources[mutation.path], tests), len(tests)
            finally:
                slots.put(slot)

        for done in as_completed([pool.submit(judge, *one) for one in zip(drawn, reached, strict=True)]):
            outcome, number = done.result()
            outcomes.append(outcome)
            mutation, caught_by = outcome.mutation, outcome.caught_by
            what = f"caught by {caught_by}" if caught_by else f"SURVIVED {number} tests"
            print(f"{len(outcomes):3}/{len(drawn)} {mutation.path}:{mutation.line} {mutation.kind}: {what}", flush=True)
    return outcomes


def main():
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("--number", type=int, default=60, help="lines to change")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="draw as many for each of them")
    parser.add_argument("--modules", nargs="+", default=list(ROOMS), help="folders or files to change")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--dry-run", action="store_true", help="only show the faults")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(contract.EXIT_SIGNAL_BASE + signal.SIGTERM))
    sources = read_sources(asked.modules)
    drawn = {seed: draw(sources, asked.number, seed) for seed in asked.seeds}
    together = list(dict.fromkeys(itertools.chain(*drawn.values())))
    if not together:
        parser.error(f"--modules {' '.join(asked.modules)}, --number {asked.number}: no line there can have a fault")
    if asked.dry_run:
        for mutation in together:
            print(f"{mutation.path}:{mutation.line} {mutation.kind}\n{mutation.describe(sources[mutation.path])}")
        return 0
    begin = time.monotonic()
    outcomes = judge_all(together, sources, asked.jobs)
    survived = [outcome.mutation for outcome in outcomes if not outcome.caught_by]
    for mutation in survived:
        print(f"\nsurvived: {mutation.path}:{mutation.line} {mutation.kind}")
        print(mutation.describe(sources[mutation.path]))
    print(f"\n{len(together)} faults in {time.monotonic() - begin:.0f} s")
    shares = []
    for seed, mutations in drawn.items():
        caught = sum(mutation not in survived for mutation in mutations)
        shares.append(caught / len(mutations))
        print(f"seed {seed}: {caught} of {len(mutations)} faults caught ({shares[-1]:.0%})")
    return 0 if min(shares) >= WANTED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
