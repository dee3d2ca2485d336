"""A worker behaves as `python script.py` does: small habits of scripts, with `python` itself as the oracle.

Compared are what the program writes (a worker's log), its files and its exit status, for every way to start a worker.
What is different by design is asserted here and stands in docs/how-to/from_torchrun.md, "What is different".

`python` gets the two variables that msrun sets for every worker: lines are written at once, a crash shows its stack.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from job_runner import JobRunner

HABITS = Path(__file__).parents[1] / "workers" / "habits"
SET_BY_MSRUN = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
FORKED = ("fork", "warm")
STARTS = (*FORKED, "exec")


@dataclass(frozen=True)
class Outcome:
    """What is left of a program that has ended."""

    status: int
    """128 + N for one that signal N has ended, as a shell and msrun have it."""
    said: str
    files: dict[str, bytes] = field(default_factory=dict)


class Scripts:
    """Runs programs of tests/workers/habits in a folder of their own, by `python` or by msrun."""

    def __init__(self, runner: JobRunner, folder: Path) -> None:
        self.runner = runner
        self.folder = folder

    def place(self, how: str, *programs: Path) -> Path:
        """Return a folder with these programs, and the folder of a run's own beside them."""
        home = self.folder / how
        (home / "work").mkdir(parents=True)
        for program in programs:
            shutil.copy(program, home)
        return home

    def python(self, home: Path, *words: str | Path, env: dict[str, str] | None = None) -> Outcome:
        log = home / "log"
        with log.open("wb") as output, open("/dev/null", "rb") as null:
            ended = subprocess.run(
                [sys.executable, *words],
                cwd=home / "work",
                env=self.runner.environ({**SET_BY_MSRUN, **(env or {})}),
                stdin=null,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        status = 128 - ended.returncode if ended.returncode < 0 else ended.returncode
        return Outcome(status, readable(log.read_bytes(), home), files_of(home / "work"))

    def msrun(
        self, start: str, home: Path, *words: str | Path, world_size: int = 1, env: dict[str, str] | None = None
    ) -> list[Outcome]:
        """Return what is left of each rank; the files are all ranks'."""
        options = ("--start_method", start) if start != "warm" else ()
        job = self.runner.run(
            f"--worker_num={world_size}",
            "--quiet",
            f"--log_dir={home / 'logs'}",
            *options,
            *words,
            cwd=home / "work",
            env={"OMP_NUM_THREADS": "1", **(self.runner.warm() if start == "warm" else {}), **(env or {})},
            log_dir="../logs",
        )
        files = files_of(home / "work")
        logs = [home / "logs" / f"worker_{rank}.log" for rank in range(world_size)]
        assert all(log.exists() for log in logs), job.stderr
        return [Outcome(job.code, readable(log.read_bytes(), home), files) for log in logs]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def readable(output: bytes, home: Path) -> str:
    """Return an output without what differs from run to run: folders and addresses."""
    text = output.decode(errors="backslashreplace").replace(str(home), "HOME")
    return re.sub(r"0x[0-9a-f]{4,}", "0x", text)


@pytest.fixture(scope="module")
def scripts(msrun_of_module: JobRunner, tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    return Scripts(msrun_of_module, tmp_path_factory.mktemp("habits"))


def once(function: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Keep what a method has found for each of its keys: one run serves many tests."""

    def get(self: Any, key: str) -> Any:
        if key not in self.found:
            self.found[key] = function(self, key)
        return self.found[key]

    return get


# What a script finds when it starts


class Facts:
    """What tests/workers/habits/at_start.py has found, for each way to start it."""

    def __init__(self, scripts: Scripts) -> None:
        self.scripts = scripts
        self.found: dict[str, Any] = {}

    @once
    def of(self, how: str) -> dict[str, Any]:
        home = self.scripts.place(f"at start, {how}", HABITS / "at_start.py")
        words = (home / "at_start.py", "facts.json")
        outcome = self.scripts.python(home, *words) if how == "python" else self.scripts.msrun(how, home, *words)[0]
        assert outcome.status == 0, outcome.said
        return dict(json.loads(outcome.files["facts.json"].decode().replace(str(home), "HOME")))


@pytest.fixture(scope="module")
def facts(scripts: Scripts) -> Facts:
    return Facts(scripts)


FACTS = re.findall(r"@fact\ndef (\w+)", (HABITS / "at_start.py").read_text())
FACTS_BY_DESIGN: dict[str, Callable[[Any], bool]] = {
    # killed with its parent, so that no worker stays behind
    "death_signal": lambda found: found == 9,
}
"""Fact -> what a worker of every start finds in its place."""
FORKED_FACTS_BY_DESIGN: dict[str, Callable[[Any], bool]] = {
    # msrun has been there before the script
    "modules_loaded_that_would_not_be": lambda found: {"json", "msrun"} <= set(found),
    "frozen_objects": lambda found: found > 0,
    "environment_is_that_of_the_kernel": lambda found: "RANK" in found,
    "title": lambda found: found == "msrun: worker 0",
    "command_line": lambda found: found[0].startswith("msrun: worker 0: HOME/at_start.py"),
    # SIGRTMIN+8 writes the stacks of a worker that hangs
    "kernels_view_of_signals": lambda found: int(found[-1].split()[1], 16) >> 41 & 1 == 1,
    # lines are written whole
    "stream_buffering": lambda found: found[1:] == [[True, False], [True, False]],
    "stream_classes": lambda found: {row[1] for row in found[1:]} == {"BufferedWriter"},
    "closing_the_streams_closes_descriptors": lambda found: found == [False, False, False],
}
"""Fact -> what a forked worker finds in its place."""
FACTS_THAT_FORKED_WORKERS_MISS = {
    "loader_of_main": "__loader__ is None",
    "meta_path": "a finder of msrun is the first of sys.meta_path",
    "stream_names": "the streams are named 0, 1 and 2",
    "stream_encodings": "stdin is strict where python takes surrogateescape",
    "stack_depth": "frames of msrun are below the script's",
    "stack_of_inspect": "frames of msrun are below the script's",
    "recursion": "frames of msrun take from the limit",
    "thread_identities": "the main thread has the native id of its parent",
    "loggers": "setproctitle has made a logger",
}
"""Fact -> what is wrong there."""


def params(keys: Any, is_fast: Callable[[str, str], bool], faults: dict[str, str], starts: Any = STARTS) -> list[Any]:
    """Return one case for each start and key; strict xfail where a forked worker is known to differ."""
    found = []
    for start in starts:
        for key in keys:
            marks = [] if is_fast(start, key) else [pytest.mark.slow]
            if start in FORKED and key in faults:
                marks.append(pytest.mark.xfail(strict=True, reason=faults[key]))
            found.append(pytest.param(start, key, marks=marks, id=f"{start}-{key}"))
    return found


@pytest.mark.parametrize(
    ("start", "name"), params(FACTS, lambda start, _: start != "warm", FACTS_THAT_FORKED_WORKERS_MISS)
)
def test_a_script_finds_what_python_gives_it(facts: Facts, start: str, name: str) -> None:
    found, expected = facts.of(start)[name], facts.of("python")[name]
    by_design = {**FACTS_BY_DESIGN, **(FORKED_FACTS_BY_DESIGN if start in FORKED else {})}
    if name in by_design:
        assert by_design[name](found), found
        assert not by_design[name](expected), "python has it, too: no difference"
    else:
        assert found == expected


# Programs that end well: one job, each of whose ranks is another one


class GoodEnds:
    """The programs of tests/workers/habits/ends, each as a rank of one job."""

    def __init__(self, scripts: Scripts) -> None:
        self.scripts = scripts
        self.found: dict[str, Any] = {}

    @once
    def of(self, how: str) -> dict[str, Outcome]:
        names = [name for name in GOOD_ENDS if name not in ENDS_THAT_FAIL_WHEN_FORKED]
        home = self.scripts.place(f"ends, {how}", HABITS / "each_rank_another.py", *(ENDS / f"{n}.py" for n in names))
        words = (home / "each_rank_another.py", *(home / f"{name}.py" for name in names))
        if how == "python":
            outcomes = [self.scripts.python(home, *words, env={"RANK": str(rank)}) for rank in range(len(names))]
        else:
            outcomes = self.scripts.msrun(how, home, *words, world_size=len(names))
        return {name: own_files(outcome, name) for name, outcome in zip(names, outcomes, strict=True)}


def own_files(outcome: Outcome, name: str) -> Outcome:
    own = {path: data for path, data in outcome.files.items() if path.startswith(f"{name}.py/")}
    return Outcome(outcome.status, outcome.said.replace(f"/work/{name}.py", "/work"), own)


ENDS = HABITS / "ends"
GOOD_ENDS = sorted(path.stem for path in ENDS.glob("*.py"))
ENDS_THAT_FAIL_WHEN_FORKED = {
    "loader_reads_the_source": "__loader__ is None",
    "stdout_is_closed_by_the_script": "exit code 120",
    "stdout_is_none": "exit code 1 with a traceback of msrun's",
    "stderr_is_none": "exit code 1",
}
ENDS_THAT_DIFFER = {
    **ENDS_THAT_FAIL_WHEN_FORKED,
    "atexit_exits": "a line of msrun's is in the report of the ignored error",
    "atexit_sees_the_threads": "a thread of msrun's, msrun-end, is there",
    "faulthandler_dump": "frames of msrun are below the script's",
    "file_held_by_a_module_is_written": "the file stays empty",
    "logging_last_resort": "frames of msrun are below the script's",
    "print_mixed_with_write": "what has no newline yet is written late",
    "print_without_newline": "what has no newline yet is written late",
    "standard_module_is_shadowed": "the standard library's module wins over the one beside the script",
    "traceback_is_printed": "frames of msrun are below the script's; warnings of stacklevel 2 are given to msrun",
}
"""Program -> what is wrong with it in a forked worker."""


@pytest.fixture(scope="module")
def good_ends(scripts: Scripts) -> GoodEnds:
    return GoodEnds(scripts)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=ENDS_THAT_DIFFER[name])])
        if name in ENDS_THAT_DIFFER
        else name
        for name in GOOD_ENDS
        if name not in ENDS_THAT_FAIL_WHEN_FORKED
    ],
)
def test_a_program_that_ends_well_leaves_what_it_leaves_under_python(good_ends: GoodEnds, name: str) -> None:
    assert good_ends.of("fork")[name] == good_ends.of("python")[name]


# Programs alone, as they are

FAST_ALONE = ("exit_3", "excepthook_exits", "dies_by_sigsegv", "keyboard_interrupt", "uncaught_error", "exit_text")
FAILS = HABITS / "fails"
BAD_ENDS = sorted(path.stem for path in FAILS.glob("*.py"))
CRASHES = {
    name: "frames of msrun are below the script's"
    for name in ("abort", "null_pointer_is_read", *(f"dies_by_sig{n}" for n in ("abrt", "bus", "fpe", "ill", "segv")))
}
BAD_ENDS_THAT_DIFFER = {
    **CRASHES,
    "excepthook_is_gone": "a traceback of msrun's in place of the script's",
    "excepthook_raises": "nothing is said",
    "exit_huge": "exit code 0 in place of 255",
    "keyboard_interrupt_in_atexit": "a line of msrun's is in the report of the ignored error",
    "keyboard_interrupt_while_threads_are_joined": "what is registered at exit does not run",
    "stdout_cannot_be_flushed": "nothing is said",
}


@pytest.mark.parametrize(
    ("start", "name"),
    params(
        (*GOOD_ENDS, *BAD_ENDS),
        lambda start, name: start == "fork" and name in FAST_ALONE,
        {**ENDS_THAT_DIFFER, **BAD_ENDS_THAT_DIFFER},
    ),
)
def test_a_program_says_writes_and_returns_what_it_does_under_python(scripts: Scripts, start: str, name: str) -> None:
    program = next(folder / f"{name}.py" for folder in (ENDS, FAILS) if (folder / f"{name}.py").exists())
    homes = [scripts.place(f"alone, {how}, {name}", program) for how in ("python", start)]
    expected = scripts.python(homes[0], homes[0] / program.name)
    assert scripts.msrun(start, homes[1], homes[1] / program.name) == [expected]
