"""make mutants: put small faults into the launcher, the graph and the rank-table rules, and see whether a test fails.

Each fault is put alone into a copy of the tree, where fast tests run until one fails: first those of tests/unit that
are named after the module or import it, then others of its room, then the end-to-end ones of `ROOMS`, then all the
others of the launcher or of the runtime. An end-to-end test that fails runs again without the fault: where it fails
too, it has noticed nothing. Exit status 1 below 85 % caught.

--record FILE keeps what became of each fault. A run that finds the file tries the test that noticed a fault first: so
the same faults are judged again, after a change of the tests, in a fraction of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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
from dataclasses import asdict, dataclass
from pathlib import Path

from msrun import contract
from mutants.mutations import Mutation, draw

REPOSITORY = Path(__file__).resolve().parents[2]
_JOBS = ("launch_exit_status", "launch_signals", "launch_restart", "launch_teardown", "launch_own_faults", "lost_hosts")
_RUNTIME = ("runtime_parallelize", "runtime_laws", "runtime_habits", "runtime_modes")
ROOMS = {
    "msrun/agent": (*_JOBS, "launch_hang", "launch_log_size"),
    "msrun/cluster": (*_JOBS, "launch_several_hosts", "launch_discovery"),
    "msrun/launch": (
        *_JOBS,
        "launch_logs",
        "launch_stop",
        "launch_status_command",
        "launch_several_hosts",
        "fleet_run",
    ),
    **{f"msrun/runtime/{room}": _RUNTIME for room in ("sharding", "partition", "schedule", "execute")},
    "ranktable/rules": (),
}
"""Room -> the files of tests/e2e that judge its behaviour."""
WANTED_SHARE = 0.85
BATCH_S = 240.0
"""How long the tests of one kind run for one fault at most."""
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


def batches(module):
    """Return the test files that run together: the module's own, other unit tests of its room, end-to-end ones."""
    parts = module.split("/")
    room = "ranktable" if parts[0] == "ranktable" else parts[1]
    stem, folder = Path(module).stem, ".".join(parts[:-1])
    names = (f"_{stem}.py", f"_{parts[-2]}.py")
    imports = re.compile(rf"from {folder}\.{stem} import|from {folder} import .*\b{stem}\b")
    tests = {str(path.relative_to(REPOSITORY)): path for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))}
    unit = {name: path for name, path in tests.items() if name.startswith("tests/unit/")}
    own = [name for name, path in unit.items() if name.endswith(names) or imports.search(path.read_text())]
    others = [name for name in unit if name.startswith(f"tests/unit/{room}/") and name not in own]
    jobs = [f"tests/e2e/test_{name}.py" for room, names in ROOMS.items() if module.startswith(room) for name in names]
    is_runtime = module.startswith("msrun/runtime")
    side = [name for name in tests if name.startswith("tests/e2e/test_runtime") == is_runtime and "e2e" in name]
    return [one for one in (own, others, jobs, [name for name in side if jobs and name not in jobs]) if one]


class Slot:
    """One copy of the tree, for one fault at a time."""

    def __init__(self, folder):
        self._folder = folder
        folder.mkdir()
        self._copy = copy_tree(folder)
        self._mark = secrets.token_hex(16)
        self._writes = 0

    def judge(self, mutation, source, before):
        """Run the tests of a fault's module until one of them notices it; first the one that did `before`, if any."""
        last = [[before]] if (REPOSITORY / before.partition("::")[0]).is_file() else []
        for chosen in [*last, *batches(mutation.path)]:
            self._write(mutation.path, mutation.apply(source))
            failed = self._run(chosen)
            self._write(mutation.path, source)
            if chosen in last and failed != before:
                continue  # nor is it there any more where pytest ended with 4
            if failed and (not failed.startswith("tests/e2e/") or not self._run([failed])):
                return Outcome(mutation, failed)
        return Outcome(mutation, "")

    def _write(self, name, source):
        """Write a module so that no compiled form of it is taken for it."""
        path = self._copy / name
        path.write_text(source)
        self._writes += 1
        moment = time.time() + 2 * self._writes  # a compiled module is known by whole seconds and the size
        os.utime(path, (moment, moment))

    def _run(self, tests):
        """Return the test that failed, or what else ended the run; empty when all passed or the time was up."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self._copy), str(self._copy / "tests")]),
            "DEADLINE_S": str(DEADLINE_S),
            MARK: self._mark,
        }
        options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S}", "-m", "not slow"]
        command = [sys.executable, "-m", "pytest", *options, "--hypothesis-profile=fast", *tests]
        log = self._folder / "log"
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
            code = process.wait(BATCH_S + 2 * TEST_LIMIT_S)
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


class Record:
    """What became of faults in earlier runs, in a file of a line of JSON each; kept in memory where none is named."""

    def __init__(self, path):
        self._path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        self._caught_by = {self._key(Mutation(**one["mutation"])): one["caught_by"] for one in map(json.loads, lines)}

    def find(self, mutation):
        """Return the test that noticed this fault last; empty when none did, or nobody tried."""
        return str(self._caught_by.get(self._key(mutation), ""))

    def add(self, outcome):
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")

    @staticmethod
    def _key(mutation):
        return mutation.path, mutation.line, mutation.column, mutation.before, mutation.after


def judge_all(drawn, sources, jobs, record):
    """Judge all faults, some at a time, and say what became of each."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        Path(name).chmod(0o711)
        everyone = [Slot(Path(name, str(number))) for number in range(jobs)]
        slots = queue.SimpleQueue()
        for slot in everyone:
            slots.put(slot)

        def judge(mutation):
            slot = slots.get()
            try:
                return slot.judge(mutation, sources[mutation.path], record.find(mutation))
            finally:
                slots.put(slot)

        with ThreadPoolExecutor(jobs) as pool:
            try:
                for done in as_completed([pool.submit(judge, mutation) for mutation in drawn]):
                    outcomes.append(done.result())
                    record.add(done.result())
                    mutation, caught_by = done.result().mutation, done.result().caught_by
                    what = f"caught by {caught_by}" if caught_by else "SURVIVED"
                    place = f"{mutation.path}:{mutation.line} {mutation.kind}"
                    print(f"{len(outcomes):3}/{len(drawn)} {place}: {what}", flush=True)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for slot in everyone:
                    slot.end_all()
    return outcomes


def main():
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("--number", type=int, default=60, help="lines to change")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="+", default=list(ROOMS), help="folders or files to change")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--record", type=Path, help="a file of what became of each fault")
    parser.add_argument("--dry-run", action="store_true", help="only show the faults")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(contract.EXIT_SIGNAL_BASE + signal.SIGTERM))
    sources = read_sources(asked.modules)
    drawn = draw(sources, asked.number, asked.seed)
    if asked.dry_run:
        for mutation in drawn:
            print(f"{mutation.path}:{mutation.line} {mutation.kind}\n{mutation.describe(sources[mutation.path])}")
        return 0
    begin = time.monotonic()
    outcomes = judge_all(drawn, sources, asked.jobs, Record(asked.record))
    survived = [outcome.mutation for outcome in outcomes if not outcome.caught_by]
    for mutation in survived:
        print(f"\nsurvived: {mutation.path}:{mutation.line} {mutation.kind}")
        print(mutation.describe(sources[mutation.path]))
    share = 1 - len(survived) / len(outcomes)
    caught, took_s = len(outcomes) - len(survived), time.monotonic() - begin
    print(f"\nseed {asked.seed}: {caught} of {len(outcomes)} faults caught ({share:.0%}) in {took_s:.0f} s")
    return 0 if share >= WANTED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
