"""Tests whose body every rank of a world runs.

    @on_ranks(4)
    def test_a_sum_is_the_same_on_all_ranks(ranks):
        total = torch.ones(3) * ranks.rank
        dist.all_reduce(total)
        assert total.tolist() == [6.0] * 3

One pool of ranks serves all tests of a module that want as many. They are forked by a process that was forked from
pytest itself when the tests had been collected: a rank has every test with its parameters and imports nothing, and no
backward pass has run before it, after which torch allows no fork. What a rank fails by is shown as pytest shows it.
Fixtures are set up in pytest and handed to the ranks, as far as they can be pickled (`tmp_path`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import TypeVar

import pytest
from job_runner import WORKER_IMPORTS, is_job_variable

T = TypeVar("T")
OTHERS_S = 5.0
"""How long the others have to end a test after one has failed: they may wait for it for ever."""
MARK = "on_ranks"


def on_ranks(*sizes, dtype="float32", env=None, slow=False):
    """Return the decorator of a test that runs on ranks; it may have an argument `ranks`.

    Args:
        sizes: how many, one after the other; parameters of pytest may have marks. Without, the test has an indirect
            parameter `ranks`.
        dtype: torch's default type during the test.
        env: more variables of the ranks, before they join their world.
        slow: `make test` leaves it out.
    """

    def decorate(test):
        mark = getattr(pytest.mark, MARK)(tuple(sorted((env or {}).items())), dtype)
        test = pytest.mark.usefixtures("ranks")(mark(pytest.mark.slow(test) if slow else test))
        return pytest.mark.parametrize("ranks", sizes, indirect=True)(test) if sizes else test

    return decorate


class Ranks:
    """The world of a test, as one of its ranks sees it."""

    def __init__(self, rank, size):
        self.rank = rank
        self.size = size

    def part(self, tensor, dim=0):
        """Return this rank's part of a batch."""
        return tensor.chunk(self.size, dim)[self.rank]

    def gather(self, value):
        """Return what each rank has given."""
        import torch.distributed as dist

        found = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def first(self, make):
        """Return what `make` gives on rank 0, which alone calls it."""
        import torch.distributed as dist

        found = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(found, 0)
        return found[0]


@dataclass
class Report:
    """How a test has ended on one rank."""

    kind: str
    """passed, skipped, failed, died, waits; left: the rank has ended its process with status 0, and so its world"""
    text: str = ""


class RankServer:
    """The process that forks ranks, and what pytest says to it."""

    def __init__(self, items):
        self._connection, there = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = _fork(lambda: _serve(there, self._connection, {item.nodeid: item for item in items}))
        there.close()

    def run(self, item):
        """Run a test on its ranks; raise what pytest shows."""
        (env, _), params = item.get_closest_marker(MARK).args, item.callspec.params
        size, names = params["ranks"], set(item._fixtureinfo.argnames) - params.keys()
        limit = item.get_closest_marker("timeout")
        deadline_s = 0.9 * float(limit.args[0] if limit else item.config.getini("timeout"))
        self._connection.send((item.nodeid, size, env, {name: item.funcargs[name] for name in names}, deadline_s))
        reports = self._connection.recv()
        if all(report.kind == "skipped" for report in reports):
            pytest.skip(reports[0].text)
        told = {}
        for rank, report in sorted(enumerate(reports), key=lambda one: one[1].kind == "waits"):
            if report.kind not in ("passed", "left"):
                told.setdefault(f"{report.kind}\n{report.text}", []).append(rank)
        if told:
            heads = {text: f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for text, ranks in told.items()}
            pytest.fail("\n".join(f"{heads[text]} of {size} {text}" for text in told), pytrace=False)

    def stop(self):
        """End it, and with it the ranks."""
        self._connection.close()
        os.waitpid(self.pid, 0)


_server = pytest.StashKey[RankServer]()


class Hooks:
    """What this plugin asks others."""

    def pytest_on_rank(self, item):
        """Called on every rank before it runs a test."""


def pytest_addhooks(pluginmanager):
    pluginmanager.add_hookspecs(Hooks)


def pytest_configure(config):
    config.addinivalue_line("markers", f"{MARK}(env, dtype): every rank of a world runs the test, see on_ranks.py")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    if any(item.get_closest_marker(MARK) for item in session.items) and not session.config.option.collectonly:
        _prepare()
        if session.config.getoption("--workers", 0) < 2:
            pytest_worker_begins(session)


def pytest_worker_begins(session):
    items = [item for item in session.items if item.get_closest_marker(MARK)]
    if items:
        session.config.stash[_server] = RankServer(items)


def pytest_worker_ends(session):
    with contextlib.suppress(KeyError):
        session.config.stash[_server].stop()


def pytest_sessionfinish(session):
    pytest_worker_ends(session)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not pyfuncitem.get_closest_marker(MARK):
        return None
    pyfuncitem.config.stash[_server].run(pyfuncitem)
    return True


@pytest.fixture
def ranks():
    """The world of a test on ranks; on each of them it is a `Ranks`."""


def _fork(work):
    """Run `work` in a child that ends with this process; return its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == parent:
            work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _serve(connection, of_pytest, items):
    """Fork ranks and let them run tests until pytest has gone."""
    of_pytest.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pools = {}
    try:
        while True:
            nodeid, size, env, values, deadline_s = connection.recv()
            key = (items[nodeid].path, size, env)
            for other in [other for other in pools if other[0] != key[0]]:
                pools.pop(other).close()
            if key not in pools:
                pools[key] = Pool(size, dict(env), items)
            reports = pools[key].run(nodeid, values, deadline_s)
            if any(report.kind not in ("passed", "skipped") for report in reports):
                pools.pop(key).close()  # its ranks may be at different places
            connection.send(reports)
    except (EOFError, BrokenPipeError):  # between two tests, or within one
        for pool in pools.values():
            pool.close()


def _prepare():
    """Do once what every rank would do, and start no thread."""
    import torch

    torch.set_num_threads(1)
    for name in WORKER_IMPORTS:
        importlib.import_module(name)
    gc.freeze()  # no rank looks for garbage among what all have


class Pool:
    """The ranks of one world."""

    def __init__(self, size, env, items):
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir="/tmp"))
        self.pids, self.connections = [], []
        for rank in range(size):
            here, there = Pipe()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            names = {"MSRUN_JOB_ID": self.folder.name, "MSRUN_RENDEZVOUS": f"file://{self.folder}/store"}
            names |= {"MSRUN_MINDSPORE_SEMANTICS": "torch"} | {name: str(value) for name, value in place.items()} | env
            self.connections.append(here)
            self.pids.append(_fork(lambda there=there, names=names, rank=rank: self._be(rank, there, names, items)))
            there.close()

    def run(self, nodeid, values, deadline_s):
        """Return how a test ends on each rank."""
        end = time.monotonic() + deadline_s
        reports = {}
        for connection in self.connections:
            with contextlib.suppress(OSError):  # it has died: told below
                connection.send((nodeid, values))
        while missing := [c for rank, c in enumerate(self.connections) if rank not in reports]:
            for connection in (arrived := wait(missing, max(0.0, end - time.monotonic()))):
                rank = self.connections.index(connection)
                try:
                    reports[rank] = connection.recv()
                except (EOFError, OSError):
                    status = os.waitstatus_to_exitcode(os.waitpid(self.pids[rank], 0)[1])
                    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                    reports[rank] = Report("died" if status else "left", f"{how}\n{self._log(rank)}")
                    self.pids[rank] = 0
                if reports[rank].kind in ("failed", "died"):
                    end = min(end, time.monotonic() + OTHERS_S)
            if not arrived:
                for rank in set(range(len(self.pids))) - reports.keys():
                    os.kill(self.pids[rank], signal.SIGUSR1)  # the stacks of all threads
                time.sleep(0.3)
                break
        for rank, report in reports.items():
            if report.kind == "failed":
                report.text += f"\n{self._log(rank)}"
        return [reports.get(rank) or Report("waits", self._log(rank)) for rank in range(len(self.pids))]

    def close(self):
        for pid in filter(None, self.pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _log(self, rank):
        """Return what a rank has written; stacks end at the test."""
        text = (self.folder / f"{rank}.log").read_text(errors="replace")
        return re.sub(r'(  File ".*/on_ranks.py", .*\n)(  File .*\n)*', "", text)[-6000:]

    def _be(self, rank, connection, names, items):
        """Be a rank: join the world and run tests until the pool is closed."""
        for other in self.connections:
            other.close()
        log = os.open(self.folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        faulthandler.enable(file=sys.stderr)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        gc.enable()
        for name in filter(is_job_variable, list(os.environ)):
            del os.environ[name]
        os.environ |= names | {"TMPDIR": str(self.folder)}
        tempfile.tempdir = None
        os.chdir(self.folder)

        import torch

        from msrun.runtime import get_group_size, init

        # A world that is joined makes dynamo's tables anew, which are complete here: 0.2 s of each rank.
        torch._dynamo.trace_rules.clear_lru_cache = lambda: None
        init(os.environ.get("BACKEND"), timeout_s=120)
        world = Ranks(rank, get_group_size())
        with contextlib.suppress(EOFError):
            while True:
                nodeid, values = connection.recv()
                os.environ["PYTEST_CURRENT_TEST"] = f"{nodeid} (call)"  # as pytest says it in its own process
                connection.send(_report_of(items[nodeid], {"ranks": world, **values}))


def _report_of(item, values):
    """Run a test on this rank, as in a process of its own as far as torch's settings go."""
    import torch

    torch.set_default_dtype(getattr(torch, item.get_closest_marker(MARK).args[1]))
    torch.manual_seed(0)
    values = {**item.callspec.params, **values}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            item.ihook.pytest_on_rank(item=item)
            item.obj(**{name: values[name] for name in item._fixtureinfo.argnames})
    except pytest.skip.Exception as skipped:
        return Report("skipped", str(skipped))
    except BaseException as error:
        return Report("failed", str(item.repr_failure(pytest.ExceptionInfo.from_exception(error))))
    return Report("passed")
