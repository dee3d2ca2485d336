"""A worker behaves as `python script.py` does: small habits of scripts, with `python` itself as the oracle.

Compared are what the program writes (a worker's log), its files and its exit status, for every way to start a worker.
What is different by design is asserted here and stands in docs/how-to/from_torchrun.md, "What is different".

`python` gets the two variables that msrun sets for every worker: lines are written at once, a crash shows its stack.
"""

import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from asked_cases import asked_keys, slow_but
from file_tree import grow
from job_runner import DEADLINE_S, REPOSITORY, WORKER_PATH, free_port, wait_until

from msrun.agent.processes.process_control import exit_code_of

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

    def __init__(self, runner, folder):
        self.runner = runner
        self.folder = folder

    def place(self, how, *names, **programs):
        """Return a folder with these programs, and the folder of a run's own beside them.

        Args:
            names: files of tests/workers/habits.
            programs: name -> text of others.
        """
        home = self.folder / how
        (home / "work").mkdir(parents=True)
        for name in names:
            shutil.copy(HABITS / name, home)
        for name, text in programs.items():
            (home / f"{name}.py").write_text(text)
        return home

    def python(self, home, *words, env=None, hand_on=None, interrupt_at=""):
        """Return what is left of a program.

        Args:
            interrupt_at: a Ctrl-C comes when this file is there.
        """
        log = home / "stdout"
        with log.open("wb") as stdout, open("/dev/null", "rb") as null:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=home / "work",
                env=self.runner.environ({**SET_BY_MSRUN, **(env or {})}),
                stdin=null,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=hand_on,
            )
            if interrupt_at:
                wait_until((home / "work" / interrupt_at).exists, f"{interrupt_at} is there")
                os.killpg(process.pid, signal.SIGINT)
            code = process.wait(DEADLINE_S)
        status = 128 - code if code < 0 else code
        return Outcome(status, readable(log.read_bytes(), home), files_of(home / "work"))

    def msrun(self, start, home, *words, world_size=1, env=None, hand_on=None, interrupt_at=(), keep_going=False):
        """Return what is left of each rank; the files are all ranks'.

        Args:
            interrupt_at: msrun itself gets SIGINT when these files are there.
            keep_going: all run to their end, and each has a status of its own.
        """
        options = ("--start_method", start) if start != "warm" else ()
        options += ("--keep_going",) if keep_going else ()
        running = self.runner.start(
            f"--worker_num={world_size}",
            "--quiet",
            f"--log_dir={home / 'logs'}",
            *options,
            *words,
            cwd=home / "work",
            env={"OMP_NUM_THREADS": "1", **(self.runner.warm() if start == "warm" else {}), **(env or {})},
            log_dir="../logs",
            hand_on=hand_on,
        )
        if interrupt_at:
            running.wait_for(*(home / "work" / name for name in interrupt_at))
            running.send(signal.SIGINT)
        job = running.finish()
        self.runner.prove_nothing_left(deadline_s=0.0)
        files = files_of(home / "work")
        logs = [home / "logs" / f"worker_{rank}.log" for rank in range(world_size)]
        assert all(log.exists() for log in logs), job.stderr
        ends = {end["global_rank"]: end["status"] for end in job.events if end["event"] == "exited"}
        codes = [exit_code_of(ends[rank]) if keep_going else job.code for rank in range(world_size)]
        return [Outcome(code, readable(log.read_bytes(), home), files) for code, log in zip(codes, logs, strict=True)]


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def readable(output, home):
    """Return an output without what differs from run to run: folders and addresses."""
    text = output.decode(errors="backslashreplace").replace(str(home), "HOME")
    return re.sub(r"0x[0-9a-f]{4,}", "0x", text)


@pytest.fixture(scope="module")
def scripts(msrun_of_module, tmp_path_factory):
    return Scripts(msrun_of_module, tmp_path_factory.mktemp("habits"))


# What a script finds when it starts


@pytest.fixture(scope="module")
def facts(scripts):
    """What tests/workers/habits/at_start.py has found, for each way to start it."""

    @functools.cache
    def of(how):
        home = scripts.place(f"at start, {how}", "at_start.py")
        words = (home / "at_start.py", "facts.json")
        outcome = scripts.python(home, *words) if how == "python" else scripts.msrun(how, home, *words)[0]
        assert outcome.status == 0, outcome.said
        return dict(json.loads(outcome.files["facts.json"].decode().replace(str(home), "HOME")))

    return of


FACTS = re.findall(
    r'^(?:def |FACTS\[")(\w+)', (HABITS / "at_start.py").read_text().split("FACTS = {}")[1], re.MULTILINE
)[1:]
FACTS_BY_DESIGN = {
    # killed with its parent, so that no worker stays behind
    "death_signal": lambda found, _: found == 9,
    # the job's number, by which daemons are found
    "limit_of_file_locks": lambda found, _: found > 1 << 60,
}
"""Fact -> what a worker of every start finds in its place."""
FORKED_FACTS_BY_DESIGN = {
    # msrun has been there before the script
    "modules_loaded_that_would_not_be": lambda found, _: {"json", "msrun"} <= set(found),
    "frozen_objects": lambda found, _: found > 0,
    "environment_is_that_of_the_kernel": lambda found, _: "RANK" in found,
    "title": lambda found, _: found == "msrun: worker 0",
    "command_line": lambda found, _: found[0].startswith("msrun: worker 0: HOME/at_start.py"),
    # it sees when torch.distributed is imported
    "meta_path": lambda found, _: found[0] == "_AfterImport",
    # one frame is below the script's
    "stack_depth": lambda found, _: found[-2:] == ["<module>", "<module>"],
    "stack_of_inspect": lambda found, _: found[-2:] == [["at_start.py", "<module>"], ["<string>", "<module>"]],
    "recursion": lambda found, pythons: 0 < pythons[1] - found[1] <= 2,
    # SIGRTMIN+8 writes the stacks of a worker that hangs
    "kernels_view_of_signals": lambda found, _: int(found[-1].split()[1], 16) >> 41 & 1 == 1,
    # lines are written whole
    "stream_buffering": lambda found, _: found[1:] == [[True, False], [True, False]],
    "stream_classes": lambda found, _: {row[1] for row in found[1:]} == {"BufferedWriter"},
    "closing_the_streams_closes_descriptors": lambda found, _: found == [False, False, False],
}
"""Fact -> what a forked worker finds in its place, beside what python has."""


def params(keys, is_fast, starts=STARTS):
    """Return one case for each start and key."""
    return [
        pytest.param(start, key, marks=[] if is_fast(start, key) else [pytest.mark.slow], id=f"{start}-{key}")
        for start in starts
        for key in keys
    ]


@pytest.mark.parametrize(("start", "name"), params(FACTS, lambda start, _: start == "fork"))
def test_a_script_finds_what_python_gives_it(facts, start, name):
    found, expected = facts(start)[name], facts("python")[name]
    if (start, name) == ("warm", "path"):  # what the jobs of tests that start warm have in PYTHONPATH
        found = [folder for folder in found if folder not in WORKER_PATH.split(":")[1:]]
    by_design = {**FACTS_BY_DESIGN, **(FORKED_FACTS_BY_DESIGN if start in FORKED else {})}
    if name in by_design:
        assert by_design[name](found, expected), found
        assert found != expected, "no difference"
    else:
        assert found == expected


# Programs that end well, or get a Ctrl-C: one job, each of whose ranks is another one


def programs_of(kind):
    """Return name -> text of the programs of a file of tests/workers/habits, each of which begins with `# %% name`."""
    cells = re.split(r"^# %% (\w+)\n", (HABITS / f"{kind}.py").read_text(), flags=re.MULTILINE)
    return {name: text.strip("\n") + "\n" for name, text in zip(cells[1::2], cells[2::2], strict=True)}


@pytest.fixture(scope="module")
def as_ranks(request, scripts):
    """The programs that chosen tests ask for, each as a rank of one job; interrupted ones by SIGINT to it."""
    names_asked = asked_keys(request, "name")

    @functools.cache
    def of(kind, how):
        programs = {name: text for name, text in programs_of(kind).items() if name in names_asked}
        home = scripts.place(f"{kind}, {how}", "each_rank_another.py", **programs)
        names = sorted(programs)
        words = (home / "each_rank_another.py", *(home / f"{name}.py" for name in names))
        ready = [f"{name}.py/ready" for name in names] if kind == "interrupted" else []
        if how == "python":
            outcomes = [
                scripts.python(home, *words, env={"RANK": str(rank)}, interrupt_at=ready[rank] if ready else "")
                for rank in range(len(names))
            ]
        else:
            more = {"interrupt_at": ready, "keep_going": kind == "fails"}
            outcomes = scripts.msrun(how, home, *words, world_size=len(names), **more)
        return {name: own_files(outcome, name) for name, outcome in zip(names, outcomes, strict=True)}

    return of


def own_files(outcome, name):
    own = {path: data for path, data in outcome.files.items() if path.startswith(f"{name}.py/")}
    return Outcome(outcome.status, outcome.said.replace(f"/work/{name}.py", "/work"), own)


FRAME = (r' +File "<string>", line \d+,? in <module>\n|\nExtension modules: .*setproctitle\S* \(total: [12]\)\n', "")
"""One frame is below the script's."""
EXIT_FRAME = (r'Traceback .*:\n  File ".*/main_module\.py", .*\n    step\(\)\n', "")
"""What runs at exit is called by msrun."""
SAID_BY_DESIGN = {
    **{f"dies_by_SIG{name}": (FRAME,) for name in ("ABRT", "SEGV")},
    "traceback_is_printed": (FRAME, (r"<string>:\d+: (?=UserWarning: of main's caller)", "sys:1: ")),
    **dict.fromkeys(("atexit_exits", "keyboard_interrupt_in_atexit"), (EXIT_FRAME,)),
    # what has no newline yet is written with the rest of the line
    "print_mixed_with_write": (
        ("^two\nfour\nfive\nsix\n eight\nseventhree\none $", "one two\nthree\nfour\nfive\nsix\nseven eight\n"),
    ),
    "descriptor_1_is_closed": ((r"Exception ignored in: .*'<stdout>'.*\nOSError: .*\n\Z", ""),),
    # such a module, which the script writes after it has begun, has been imported by msrun
    "standard_module_is_shadowed": (("^True False$", "True True"),),
}
"""Program -> what stands in a forked worker's output (a regular expression), and what in its place in python's."""


def assert_equal(start, name, found, expected):
    if start in FORKED and name in SAID_BY_DESIGN:
        assert found.said != expected.said, "no difference"
        said = found.said
        for pattern, pythons in SAID_BY_DESIGN[name]:
            said = re.sub(pattern, pythons, said)
        found = replace(found, said=said)
    assert found == expected


FAST_ENDS = ("atexit_exits", "atexit_sees_globals", "file_held_by_a_module_is_written", "file_left_open_is_written")
FAST_ENDS += ("finalizer_in_a_cycle", "finalizer_of_an_imported_module_writes", "finalizer_order", "pickle_of_main")
FAST_ENDS += ("print_lines_mixed_with_write", "stdout_is_closed_by_the_script", "thread_goes_on_after_main")
FAST_ENDS += ("traceback_is_printed",)


@pytest.mark.parametrize("name", slow_but(FAST_ENDS, sorted(programs_of("ends"))))
def test_a_program_that_ends_well_leaves_what_it_leaves_under_python(as_ranks, name):
    assert_equal("fork", name, as_ranks("ends", "fork")[name], as_ranks("ends", "python")[name])


FAST_FAILS = ("error_then_atexit_and_finalizer", "excepthook_exits", "excepthook_is_gone", "excepthook_raises")
FAST_FAILS += (
    "keyboard_interrupt",
    "last_error_at_exit",
    "stdout_cannot_be_flushed",
    "text_is_the_status",
    "uncaught_error",
)


@pytest.mark.parametrize("name", slow_but(FAST_FAILS, sorted(programs_of("fails").keys() - {"dies_by"})))
def test_a_program_that_fails_says_and_returns_what_it_does_under_python(as_ranks, name):
    assert_equal("fork", name, as_ranks("fails", "fork")[name], as_ranks("fails", "python")[name])


@pytest.mark.parametrize(
    ("start", "name"), params(sorted(programs_of("interrupted")), lambda start, _: start == "fork")
)
def test_a_program_takes_the_interrupt_of_msrun_as_its_own(as_ranks, start, name):
    """But for the exit status, which is that of msrun itself, and where in its line a program was."""
    found, expected = (
        replace(outcome, said=re.sub(r"^ +[~^]+\n", "", outcome.said, flags=re.MULTILINE))
        for outcome in (as_ranks("interrupted", start)[name], as_ranks("interrupted", "python")[name])
    )
    assert found == replace(expected, status=130)


# Programs alone, as they are

METHODS = ("fork", "spawn", "forkserver")
SIGNALS = ("ABRT", "SEGV", "TERM")
ARGUMENTS = {"pool": METHODS, "dies_by": [f"SIG{name}" for name in SIGNALS]}
"""Programs that are run once with each of these words."""
PROGRAMS = {
    name: text for kind in ("ends", "fails", "processes", "with_torch") for name, text in programs_of(kind).items()
}
ALONE = {
    "_".join([name, *words]): (name, words)
    for name in PROGRAMS
    for words in [(word,) for word in ARGUMENTS.get(name, ())] or [()]
}
OF_A_JOB = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALONE))
@pytest.mark.parametrize("start", STARTS)
def test_a_program_says_writes_and_returns_what_it_does_under_python(scripts, start, name):
    program, words = ALONE[name]
    homes = [
        scripts.place(f"alone, {how}, {name}", **{program: PROGRAMS[program]}) for how in (f"python for {start}", start)
    ]
    for home in homes:
        (home / "settings.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'\n")
    env = {**OF_A_JOB, "MASTER_PORT": str(free_port())}
    expected = scripts.python(homes[0], homes[0] / f"{program}.py", *words, env=env)
    [found] = scripts.msrun(start, homes[1], homes[1] / f"{program}.py", *words)
    assert_equal(start, name, found, expected)


# Forms of a script, what is set for the interpreter, and what a process hands on to its children


@dataclass(frozen=True)
class Form:
    words: Sequence[str]
    """After `msrun`; `python` as the first word is left out for the oracle."""
    env: dict[str, str] = field(default_factory=dict)
    hand_on: Callable[[], object] | None = None
    """Called in the process that becomes python or msrun."""
    by_design: dict[str, object] = field(default_factory=dict)
    """What every worker tells that is different."""


def ignore(*signals):
    return lambda: [signal.signal(signum, signal.SIG_IGN) for signum in signals] and None


TELL = (HABITS / "tell.py").read_text()
SHADOW = "import queue, numpy\nprint(hasattr(queue, 'MINE'), hasattr(numpy, 'MINE'))\n"
FILES = {
    "x.py": TELL,
    "sub/x.py": TELL,
    'it\'s a "script".py': TELL,
    "no_suffix": TELL,
    "bom.py": "\ufeff" + TELL,
    "crlf.py": TELL.replace("\n", "\r\n"),
    "syntax.py": "x = 1\nif x\n  pass\n",
    "latin.py": b"# -*- coding: latin-1 -*-\n" + TELL.encode() + b"assert '\xe9' == chr(233)\n",
    "not_utf8.py": b"x = '\xe9'\n",
    "nul.py": b"x = 1\0\n",
    "shebang.py": "#!/usr/bin/env python3 -O\n" + TELL,
    "pkg/__init__.py": "",
    "pkg/near.py": "A = 1\n",
    "pkg/__main__.py": "from .near import A\n" + TELL,
    "pkg/module.py": "from . import near\n" + TELL,
    "pkg/inner/__init__.py": "",
    "pkg/inner/module.py": "from ..near import A\n" + TELL,
    "folder/__main__.py": "import beside\n" + TELL,
    "folder/beside.py": "",
    "shadow/x.py": SHADOW,
    "shadow/queue.py": "MINE = 1\n",
    "shadow/numpy.py": "MINE = 1\n",
    "site/sitecustomize.py": "import os\nos.environ['SET_SITE'] = '1'\n",
    "site/usercustomize.py": "import os\nos.environ['SET_USER'] = '1'\n",
    "startup.py": "import os\nos.environ['SET_STARTUP'] = '1'\n",
    "rel/beside.py": "",
}
FORMS = {
    "plain": Form(["x.py", "a", "-b", ""]),
    "in a folder": Form(["sub/x.py"]),
    "symlink": Form(["link.py"]),
    "quotes and blanks": Form(['it\'s a "script".py']),
    "no suffix": Form(["python", "no_suffix"]),
    "byte order mark": Form(["bom.py"]),
    "CRLF": Form(["crlf.py"]),
    "latin-1": Form(["latin.py"]),
    "shebang with an option": Form(["shebang.py"]),
    "syntax error": Form(["syntax.py"]),
    "not UTF-8": Form(["not_utf8.py"]),
    "NUL byte": Form(["nul.py"]),
    "module": Form(["-m", "pkg.module", "a"]),
    "package": Form(["-m", "pkg", "a"]),
    "inner module": Form(["-m", "pkg.inner.module"]),
    "package without a main": Form(["-m", "pkg.inner"]),
    "cProfile": Form(["-m", "cProfile", "-o", "/dev/null", "x.py", "a"]),
    "folder": Form(["python", "folder"]),
    "zip": Form(["python", "app.pyz", "a"]),
    "modules of a known name beside it": Form(["shadow/x.py"]),
    # words that msrun takes itself: its workers' streams are unbuffered as they are
    "double dash": Form(["--", "x.py", "--", "a"], by_design={"orig_argv": ["x.py", "--", "a"]}),
    "-u": Form(["python", "-u", "x.py"], by_design={"orig_argv": ["x.py"]}),
    "-X dev": Form(["python", "-X", "dev", "x.py"]),
    "-W error": Form(["python", "-W", "error", "x.py"]),
    "-O": Form(["python", "-O", "x.py"]),
    "-I": Form(["python", "-I", "x.py"]),
    "-E": Form(["python", "-E", "x.py"]),
    "-P": Form(["python", "-P", "x.py"]),
    "-B": Form(["python", "-B", "x.py"]),
    "-c": Form(["python", "-c", "import sys; print(sys.argv, sys.path[0], __name__)", "a"]),
    **{
        text: Form(["x.py"], dict([text.split("=", 1)]))
        for text in (
            *("PYTHONUTF8=0", "PYTHONUTF8=1", "LC_ALL=C", "LC_ALL=C.UTF-8", "LC_ALL=POSIX", "PYTHONCOERCECLOCALE=0"),
            *("PYTHONIOENCODING=latin-1:replace", "PYTHONOPTIMIZE=2", "PYTHONWARNINGS=error::DeprecationWarning"),
            *("PYTHONDEVMODE=1", "PYTHONDONTWRITEBYTECODE=1", "PYTHONPYCACHEPREFIX=cache", "PYTHONHASHSEED=0"),
            *("PYTHONNOUSERSITE=1", "PYTHONSAFEPATH=1", "PYTHONSTARTUP=startup.py", "PYTHONTRACEMALLOC=5"),
            *("PYTHONINTMAXSTRDIGITS=1000", "PYTHONBREAKPOINT=0", "PYTHONMALLOC=malloc", "PYTHONNODEBUGRANGES=1"),
            *("PYTHONASYNCIODEBUG=1", "TZ=Asia/Tokyo", "SET_EMPTY=", "SET_BYTES=\udcff"),
        )
    },
    "PYTHONPATH of a relative folder": Form(["x.py"], {"PYTHONPATH": f"rel:{REPOSITORY}"}),
    "sitecustomize": Form(["x.py"], {"PYTHONPATH": f"site:{REPOSITORY}"}),
    "umask": Form(["x.py"], hand_on=lambda: os.umask(0o077)),
    "nice": Form(["x.py"], hand_on=lambda: os.nice(5)),
    "core limit": Form(["x.py"], hand_on=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))),
    "stack limit": Form(["x.py"], hand_on=lambda: resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, 1 << 23))),
    "ignored signals": Form(
        ["x.py"],
        hand_on=ignore(signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1),
        by_design={"ignored": ["SIGHUP", "SIGPIPE", "SIGXFSZ"]},  # by the others msrun ends its job
    ),
    "blocked signals": Form(
        ["x.py"], hand_on=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]), by_design={"blocked": []}
    ),
}
FAST_FORMS = ("symlink",)


def write_forms(work):
    grow(work, FILES)
    (work / "link.py").symlink_to("sub/x.py")
    with zipfile.ZipFile(work / "app.pyz", "w") as packed:
        packed.writestr("__main__.py", "import beside\n" + TELL)
        packed.writestr("beside.py", "")


@pytest.mark.parametrize(
    ("start", "name"), params(FORMS, lambda start, name: start == "fork" and name in FAST_FORMS, ("fork", "exec"))
)
def test_every_form_of_a_script_is_started_as_python_starts_it(scripts, start, name):
    form = FORMS[name]
    homes = [scripts.place(f"form, {how}, {list(FORMS).index(name)}") for how in (f"python for {start}", start)]
    for home in homes:
        write_forms(home / "work")
    words = form.words[1:] if form.words[0] == "python" else form.words
    expected = scripts.python(homes[0], *words, env=form.env, hand_on=form.hand_on)
    found = scripts.msrun(start, homes[1], *form.words, env=form.env, hand_on=form.hand_on)[0]
    assert (found.status, found.said) == (expected.status, expected.said)
    pythons = told(expected, homes[0])
    assert all(pythons[key] != value for key, value in form.by_design.items()), "no difference"
    assert told(found, homes[1]) == {**pythons, **form.by_design}


def told(outcome, home):
    """Return what tell.py has said, without what the facts of the start look at: the names of streams and argv[0]."""
    said = json.loads(outcome.files.get("told.json", b"{}").decode().replace(f"{home}/work", "WORK"))
    for name in ("argv", "orig_argv"):
        said[name] = [word.removeprefix("WORK/") for word in said.get(name, [])]
    said["streams"] = said.get("streams", [])[1:]
    return said
