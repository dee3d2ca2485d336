"""pytest --workers N: collect once, then run the tests in N processes that are forked from the one that has collected.

Workers that collect each for itself pay eleven seconds each, half of it for imports of torch. A file's tests run in one
worker, in their order. A worker that is free takes the next file, every second worker from the end: where those at one
end wait much and those at the other compute, both have a use for a core.
"""

import collections
import itertools
import os
import signal
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait

import pytest
from _pytest.config import create_terminal_writer


class Hooks:
    """What this plugin asks others."""

    def pytest_worker_begins(self, session):
        """Called in every worker before it runs a test."""

    def pytest_worker_ends(self, session):
        """Called in every worker after its last test."""


def pytest_addhooks(pluginmanager):
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run the files of tests in N processes")


def pytest_configure(config):
    number = config.getoption("--workers")
    if number > 1 and not config.getoption("collectonly"):
        config.pluginmanager.register(ForkedWorkers(number), "forked workers")


@dataclass
class Worker:
    pid: int
    link: Connection
    takes_last: bool
    files: list = field(default_factory=list)
    """Lists of tests that it has got: the one that it runs, and the next when it runs the last test of that."""
    running: str = ""


class ForkedWorkers:
    """Hands out the files, and takes the reports as if the tests had run here."""

    def __init__(self, number):
        self._number = number
        self._workers = []
        self._not_run = set()
        """Tests of which nothing is known yet."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            return None  # pytest's own loop says why
        session.config._tmp_path_factory.getbasetemp()  # made once, for all
        session.config.pluginmanager.getplugin("terminalreporter").showfspath = False  # a line for each change of file
        tests = {test.nodeid: test for test in session.items}
        self._not_run = {*tests}
        left = collections.deque(
            [test.nodeid for test in file] for _, file in itertools.groupby(session.items, key=lambda test: test.path)
        )
        try:
            for _ in range(min(self._number, len(left))):
                self._fork(session, tests)
            while self._workers:
                ready = wait([worker.link for worker in self._workers])
                for worker in [worker for worker in self._workers if worker.link in ready]:
                    self._handle(session, worker, left, tests)
                if session.shouldfail or session.shouldstop:
                    break
        finally:
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGINT)
                worker.link.close()
                os.waitpid(worker.pid, 0)
        if self._not_run and not (session.shouldfail or session.shouldstop):
            some = ", ".join(sorted(self._not_run)[:3])
            session.shouldfail = f"{len(self._not_run)} tests were not run, for their workers have ended: {some} ..."
        for why, error in ((session.shouldfail, session.Failed), (session.shouldstop, session.Interrupted)):
            if why:
                raise error(why)
        return True

    def _fork(self, session, tests):
        here, there = Pipe()
        pid = os.fork()
        if not pid:
            for link in [here, *(worker.link for worker in self._workers)]:
                link.close()  # so that each worker sees the end of its own link
            work(session, there, tests)
        there.close()
        of_others = sum(worker.takes_last for worker in self._workers)
        self._workers.append(Worker(pid, here, takes_last=2 * of_others < len(self._workers)))

    def _handle(self, session, worker, left, tests):
        """Take what a worker says: that it wants a file, begins or ends a test, a report; or that it is gone."""
        hook = session.config.hook
        try:
            kind, said = worker.link.recv()
        except (EOFError, ConnectionResetError):
            self._replace(session, worker, left, tests)
            return
        if kind == "wants":
            take = left.pop if worker.takes_last else left.popleft
            worker.files = [*worker.files[-1:], take() if left else []]
            worker.link.send(worker.files[-1])
        elif kind == "begins":
            worker.running = said
            hook.pytest_runtest_logstart(nodeid=said, location=tests[said].location)
        elif kind == "report":
            hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=session.config, data=said))
        else:
            worker.running = ""
            self._not_run.discard(said)
            hook.pytest_runtest_logfinish(nodeid=said, location=tests[said].location)

    def _replace(self, session, worker, left, tests):
        """Let a test that has ended its worker fail, and another worker run the tests after it."""
        self._workers.remove(worker)
        worker.link.close()
        _, status = os.waitpid(worker.pid, 0)
        if not worker.running:
            return
        self._not_run.discard(worker.running)
        why = f"its worker ended with {os.waitstatus_to_exitcode(status)}"
        place = tests[worker.running].location
        report = pytest.TestReport(worker.running, place, {}, "failed", why, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        given = [*itertools.chain(*worker.files)]
        rest = given[given.index(worker.running) + 1 :]
        if rest:
            left.appendleft(rest)
        self._fork(session, tests)


def work(session, link, tests):
    """Run, in a worker, the tests of one file after the other, and send their reports. Never returns."""
    config, status = session.config, 1
    try:
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of all workers
        capture.start_global_capturing()
        capture.suspend_global_capture()
        reporter = config.pluginmanager.getplugin("terminalreporter")
        reporter._tw = create_terminal_writer(config, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
        config._tmp_path_factory._basetemp = config._tmp_path_factory.getbasetemp() / f"worker-{os.getpid()}"
        config._tmp_path_factory._basetemp.mkdir(mode=0o700)
        config.pluginmanager.register(Reporter(config, link))
        config.hook.pytest_worker_begins(session=session)
        try:
            run_files(config, link, tests)
        except (KeyboardInterrupt, EOFError, BrokenPipeError):  # this run is over
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it comes from the terminal, and from pytest once more
            session._setupstate.teardown_exact(None)
        config.hook.pytest_worker_ends(session=session)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # never into what pytest does at its own end


def run_files(config, link, tests):
    """Run what is handed out; a file is asked for before the last test of the one before, which ends its fixtures."""

    def next_file():
        link.send(("wants", None))
        return link.recv()

    names = next_file()
    while names:
        following = []
        for place, name in enumerate(names):
            if name == names[-1]:
                following = next_file()
            after = [*names, *following][place + 1 : place + 2]
            link.send(("begins", name))
            config.hook.pytest_runtest_protocol(item=tests[name], nextitem=tests[after[0]] if after else None)
            link.send(("ends", name))
        names = following


class Reporter:
    """Sends the reports of a worker."""

    def __init__(self, config, link):
        self._config = config
        self._link = link

    def pytest_runtest_logreport(self, report):
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", data))
