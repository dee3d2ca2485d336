"""Which tests reach which lines: all tests run once in a copy of the tree whose blocks say that they were reached.

The result is kept in `build/mutants` for as long as no test file changes; blocks that have appeared since are taken for
those of their function, or of their module.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mutants.mutations import find_blocks

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = ("tests/unit", "tests/e2e")
LEFT_OUT = (
    "tests/unit/docs",
    "tests/unit/launch_templates",
    "tests/unit/test_",
    "tests/e2e/test_docs_blocks.py",
    "tests/e2e/test_examples.py",
    "tests/e2e/test_package.py",
    "tests/e2e/test_fleet_chaos.py",
    "tests/e2e/test_launch_chaos.py",
    "tests/e2e/test_launch_fuzz.py",
    "tests/e2e/test_runtime_random_networks.py",
    "tests/e2e/test_runtime_random_training.py",
    "tests/e2e/test_runtime_shm.py",
)
"""They judge no behaviour of the rooms, or judge by chance, or take long for what others judge as well."""
LOOK_S = 10.0
STUCK_S = 600.0
"""When no test has ended for so long, one is stuck."""
RECORDER = "reached_blocks"
"""Module that is put into each package of the copy, and the prefix of what it writes."""
_RECORDER_SOURCE = """
import os
from os import close, open as open_file, write  # a test may put another one into os
{is_traced}
FOLDER = {folder!r}
_test = os.environ.get("REACHED_BY", "")
_seen = set()

def begin(test):
    global _test
    _test = test
    _seen.clear()

def reached(block):
    if is_traced() or block in _seen:  # in this order: what is traced may not even look
        return
    _seen.add(block)
    _write(block)

def _write(block):
    try:
        tests = [_test] if _test else _running()
        text = "".join(f"{{block}}\\t{{test}}\\n" for test in tests)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = open_file(f"{{FOLDER}}/hits-{{os.getpid()}}", flags, 0o666)
        write(descriptor, text.encode())
        close(descriptor)
    except OSError:
        pass

def _running():
    found = []
    for name in os.listdir(FOLDER):
        if name.startswith("now-"):
            with open(f"{{FOLDER}}/{{name}}") as file:
                found.append(file.read())
    return found
"""

_TRACED = "from torch.compiler import is_compiling as is_traced"
"""Of modules that torch's compiler may trace: what they record would be part of the traced program."""
_NOT_TRACED = "def is_traced(): return False"


@dataclass
class Survey:
    """What is known of the tests."""

    tests: str = ""
    """Digest of the test files when they ran."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Test that passed -> how long it took."""
    reached: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """Module -> block -> tests, or test files where a fixture of the whole file has reached it."""

    @classmethod
    def read(cls, path: Path) -> Survey:
        """Return what is kept; nothing where there is no file."""
        return cls(*pickle.loads(path.read_bytes())) if path.is_file() else cls()

    def write(self, path: Path) -> None:
        """Keep it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps((self.tests, self.seconds, self.reached)))

    def tests_of(self, module: str, block: str) -> list[str]:
        """Return the tests that reach a block and passed: quick ones first, one of each file in turns."""
        blocks = self.reached.get(module, {})
        function = block.partition("#")[0]
        found = blocks.get(block) or _union(blocks, f"{function}#" if function else "") or _union(blocks, "")
        per_file: dict[str, list[str]] = {}
        for test in sorted(self._single(found), key=lambda test: self.seconds[test]):
            per_file.setdefault(file_of(test), []).append(test)
        turns = [(turn, self.cost_s([test]), test) for tests in per_file.values() for turn, test in enumerate(tests)]
        return [test for _, _, test in sorted(turns)]

    def cost_s(self, tests: Iterable[str]) -> float:
        """Return how long tests take together; where one job serves a file, one of its tests waits for it."""
        alone = [test for test in tests if file_of(test) not in self._shared]
        files = {file_of(test) for test in tests} & self._shared.keys()
        return sum(self.seconds[test] for test in alone) + sum(self._shared[file] for file in files)

    def within(self, tests: list[str], limit_s: float) -> list[str]:
        """Return tests until their time is up; the first one always."""
        chosen: list[str] = []
        left_s, begun = limit_s, set[str]()
        for test in tests:
            cost_s = 0.0 if file_of(test) in begun else self.cost_s([test])
            if not chosen or cost_s <= left_s:
                chosen.append(test)
                left_s -= cost_s
                begun |= {file_of(test)} & self._shared.keys()
        return chosen

    @cached_property
    def _shared(self) -> dict[str, float]:
        """End-to-end test file in which one job serves many tests -> how long it takes."""
        names = {test for blocks in self.reached.values() for tests in blocks.values() for test in tests}
        shared = {name for name in names if name.startswith("tests/e2e/") and "::" not in name}
        took: dict[str, float] = {}
        for test, seconds in self.seconds.items():
            if file_of(test) in shared:
                took[file_of(test)] = max(seconds, took.get(file_of(test), 0.0))
        return took

    def _single(self, tests: Iterable[str]) -> set[str]:
        wanted = set(tests)
        return {test for test in self.seconds if test in wanted or file_of(test) in wanted}


def _union(blocks: Mapping[str, set[str]], prefix: str) -> set[str]:
    return {test for name, tests in blocks.items() if name.startswith(prefix) for test in tests}


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


def digest_tests(root: Path) -> str:
    """Return what changes when a test file does."""
    return hashlib.sha256(b"".join((root / name).read_bytes() for name in list_test_files(root))).hexdigest()


def list_test_files(root: Path) -> list[str]:
    """Return the test files that may notice a fault."""
    found = [path for folder in TESTS for path in (root / folder).rglob("test_*.py")]
    names = sorted(str(path.relative_to(root)) for path in found)
    return [name for name in names if not name.startswith(LEFT_OUT)]


def instrument(root: Path, modules: Iterable[str], folder: Path) -> None:
    """Have every block of these modules of a copy say, in `folder`, which test has reached it."""
    for module in modules:
        path = root / module
        package = "msrun/runtime" if module.startswith("msrun/runtime/") else module.partition("/")[0]
        tree = ast.parse(path.read_text())
        for block in list(find_blocks(tree)):
            first = block.body[0]
            has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            call = ast.parse(f"{RECORDER}({f'{module}:{block.name}'!r})").body[0]
            block.body.insert(1 if has_docstring else 0, call)
        place = next(
            (
                number
                for number, node in enumerate(tree.body)
                if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__"
            ),
            None,
        )
        if place is None:
            continue
        name = f"{package.replace('/', '.')}.{RECORDER}"
        tree.body.insert(place, ast.parse(f"from {name} import reached as {RECORDER}").body[0])
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
        (root / package / f"{RECORDER}.py").write_text(
            _RECORDER_SOURCE.format(folder=str(folder), is_traced=_TRACED if "runtime" in package else _NOT_TRACED)
        )


def run_survey(copy: Path, modules: list[str], jobs: int) -> Survey:
    """Run the tests of a fresh copy of the tree, and return what they reach."""
    folder = copy.parent / "reached"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    survey = Survey(digest_tests(copy))
    files = list_test_files(copy)
    instrument(copy, modules, folder)
    options = ["-q", "-p", "no:cacheprovider", "-p", "mutants.reach_plugin", "--tb=short", "--dist", "loadfile"]
    marks = ["--hypothesis-profile=fast", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, *marks, "-n", str(jobs), *files]
    path = [str(copy), str(copy / "tests")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "REACH_FOLDER": str(folder)}
    with (copy.parent / "survey.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=copy, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        _await(process, folder)
    for written in folder.glob("tests-*"):
        for line in written.read_text().splitlines():
            test, seconds, has_passed = json.loads(line)
            if has_passed:
                survey.seconds[test] = seconds
    for written in folder.glob("hits-*"):
        for line in written.read_text().splitlines():
            place, _, test = line.partition("\t")
            module, _, block = place.partition(":")
            survey.reached.setdefault(module, {}).setdefault(block, set()).add(test)
    return survey


def _await(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for the end of all tests; where none has ended for long, go on with those that have."""
    begin, last = time.time(), 0.0
    while True:
        try:
            process.wait(LOOK_S)
            return
        except subprocess.TimeoutExpired:
            last = max([begin, last, *(path.stat().st_mtime for path in folder.glob("tests-*"))])
            if time.time() - last > STUCK_S:
                os.killpg(process.pid, signal.SIGKILL)
