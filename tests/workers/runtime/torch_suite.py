"""Runs tests of torch's own suite for process groups on the backend shm, each in forked ranks.

usage: torch_suite.py RESULT.json RANKS [TEST ... | N/M]     these tests, or every M-th from the N-th, by default all;
                                                             writes {test: [outcome, text]}

torch's file skips tests by the name of the backend. Here it has the name shm and compares equal to gloo and to mpi, so
that what those two must do is asked of shm as well.
"""

import importlib.util
import json
import os
import sys
import unittest
from pathlib import Path
from types import ModuleType

RESULT, RANKS, NAMES = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
# mpi: other names skip tests of groups of two on fewer than 8 ranks
os.environ |= {"BACKEND": "mpi", "WORLD_SIZE": RANKS, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120"}
os.environ["INIT_METHOD"] = RESULT.with_suffix(".store").absolute().as_uri()

import torch.multiprocessing  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

import msrun.shm  # noqa: E402, F401  # registers the backend

SUITE = "torch.testing._internal.distributed.distributed_test"
NAME = 'BACKEND = os.environ["BACKEND"]\n'
DistTestCases.backend_feature["plugin"].add("shm")
DistTestCases.backend_feature["ddp"].add("shm")
DistTestCases.backend_feature["subgroup"].add("shm")


class AsGloo(str):
    """The name of the backend shm, which passes where a test asks for gloo or for mpi."""

    __slots__ = ()

    def __eq__(self, other):
        return other in ("shm", "gloo", "mpi")

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash("gloo")


def load():
    """Return torch's file of tests, with this name in place of the backend's."""
    found = importlib.util.find_spec(SUITE)
    assert found is not None and found.origin is not None
    text = Path(found.origin).read_text()
    assert text.count(NAME) == 1
    module = ModuleType(SUITE)
    vars(module).update(AsGloo=AsGloo, __file__=found.origin)
    sys.modules[SUITE] = module
    exec(compile(text.replace(NAME, 'BACKEND = AsGloo("shm")\n'), found.origin, "exec"), vars(module))
    return module


suite = load()


class ShmTest(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """torch's tests; each is run by ranks that are forked from here."""

    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Outcomes(unittest.TestResult):
    """What came of each test."""

    def __init__(self):
        super().__init__()
        self.found: dict[str, tuple[str, str]] = {}

    def _note(self, test, outcome, text=""):
        name = test.id().rpartition(".")[2]
        self.found[name] = outcome, text
        RESULT.write_text(json.dumps(self.found))
        print(name, outcome, text.splitlines()[0] if text else "", flush=True)

    def addSuccess(self, test):
        self._note(test, "passed")

    def addSkip(self, test, reason):
        self._note(test, "skipped", reason)

    def addFailure(self, test, err):
        self._note(test, "failed", self._exc_info_to_string(err, test))

    addError = addFailure  # noqa: N815


def main():
    names = unittest.defaultTestLoader.getTestCaseNames(ShmTest)
    if NAMES and "/" in NAMES[0]:
        first, step = map(int, NAMES[0].split("/"))
        names = names[first::step]
    elif NAMES:
        names = NAMES
    unittest.TestSuite(ShmTest(name) for name in names).run(Outcomes())


if __name__ == "__main__":
    main()
