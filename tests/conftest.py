"""What every test gets: a clean environment, an awkward directory, and real `msrun` processes that leave nothing."""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import hypothesis
import pytest
from golden import compare_golden, compare_page
from job_runner import REPOSITORY, WARM_SERVERS, WORKER_PATH, Finished, JobRunner, is_job_variable, latest_job
from required_wings import (  # noqa: F401 - hooks
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_sessionstart,
)

from msrun import contract

# Before any test imports torch: its idle threads would spin for more work, at the cost of the tests beside.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Jobs beside each other want the same cores; make test-slow lets every rank capture for itself.
os.environ.setdefault(contract.MSRUN_CAPTURE_CACHE, "share")

# Collecting eleven thousand tests makes a million objects that stay, and no garbage worth to look for.
gc.disable()

pytest_plugins = ["forked_workers", "on_ranks"]
UNIT = Path(__file__).parent / "unit"
E2E = Path(__file__).parent / "e2e"
WORKERS = Path(__file__).parent / "workers"

hypothesis.settings.register_profile("busy machine", deadline=None)  # no test asserts on time
hypothesis.settings.load_profile("busy machine")
hypothesis.settings.register_profile("fast", deadline=None, max_examples=10)  # of make test


STANDARD_ERROR = pytest.StashKey[int]()
CLOSING_S = 5.0
"""How long threads that end with a test may take to close what they have opened."""


def pytest_configure(config):
    """Keep the standard error that pytest does not capture, for the stacks of a test that hangs.

    And make the folder of the warm servers that runtime tests start from, one for all processes of this run.
    """
    config.stash[STANDARD_ERROR] = os.dup(2)
    os.environ[WARM_SERVERS] = tempfile.mkdtemp(prefix="jr-warm-", dir="/tmp")


def pytest_unconfigure(config):
    os.close(config.stash[STANDARD_ERROR])
    folder = os.environ.pop(WARM_SERVERS)
    env = {"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": folder}
    subprocess.run([sys.executable, "-m", "msrun", "--quiet", "--warm=stop"], cwd=REPOSITORY, env=env, check=False)
    shutil.rmtree(folder)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Use the core that is free meanwhile, where several processes run end-to-end tests.

    The warm server of torch imports; and where nothing is compiled yet, a child imports files, the last first.
    """
    folders = [Path(argument).resolve() for argument in session.config.args]
    if session.config.getoption("workers") < 2 or not any(E2E.is_relative_to(folder) for folder in folders):
        return (yield)
    child = None if sys.dont_write_bytecode or (UNIT / "__pycache__").exists() else os.fork()
    if child == 0:
        for path in sorted(UNIT.rglob("test_*.py"), reverse=True):
            with contextlib.suppress(BaseException):
                pytest.Module.from_parent(session, path=path).obj  # noqa: B018 - imports it
        os._exit(0)
    program = "from job_runner import JobRunner\nwith JobRunner() as runner: runner.warm()"
    environment = {**os.environ, "PYTHONPATH": WORKER_PATH}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdin=subprocess.DEVNULL):
        try:
            return (yield)
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item):
    """End a test that does not hear the signal of its time limit, such as a wait in C, with the stacks of all threads.

    pytest's own faulthandler_timeout has one value for all tests, below the limits that some of them set.
    """
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(2 * limit_s, file=item.config.stash[STANDARD_ERROR], exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, obj):
    """Make no items of slow tests, nor of the slow rows of tables, where nobody wants them: they are half of all."""
    if is_fast_run(collector.config):
        marks = [getattr(owner, "pytestmark", []) for owner in (obj, collector.obj)]
        if any(mark.name == "slow" for own in marks for mark in (own if isinstance(own, list) else [own])):
            return []
    return None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    yield
    if is_fast_run(metafunc.config):
        calls = metafunc._calls
        metafunc._calls = [call for call in calls if all(mark.name != "slow" for mark in call.marks)] or calls[:1]


def is_fast_run(config):
    return config.getoption("markexpr") == "not slow"


def pytest_collection_modifyitems(config, items):
    keep_share(config, items)
    draw_few_examples(items)


def keep_share(config, items):
    """MSRUN_SLOW_SHARE=12 keeps one of twelve slow tests, MSRUN_SLOW_SEED says which; who draws its cases stays."""
    share, seed = (
        int(os.environ.get(f"MSRUN_SLOW_{name}") or default) for name, default in (("SHARE", 1), ("SEED", 0))
    )
    left = [
        item
        for item in items
        if item.get_closest_marker("slow")
        and not item.get_closest_marker("random")
        and (zlib.crc32(item.nodeid.encode()) - seed) % share
    ]
    if left:
        config.hook.pytest_deselected(items=left)
        gone = {*left}
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def draw_few_examples(items):
    """Let no property of `make test` draw more examples than its profile, whatever stands at the test."""
    if hypothesis.settings.get_current_profile_name() != "fast":
        return
    most = hypothesis.settings.get_profile("fast").max_examples
    for item in items:
        test = getattr(item, "obj", None)
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples > most:
            test._hypothesis_internal_use_settings = hypothesis.settings(own, max_examples=most)


@pytest.fixture(autouse=True)
def clean_environ(descriptors_are_closed, monkeypatch):
    """Take away what a launcher, a scheduler or a user may have left in the environment of the tests.

    The look at descriptors begins first and ends last: what a test has put somewhere is taken back before it.
    """
    for name in [name for name in os.environ if is_job_variable(name)]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def means_torch(request, clean_environ, monkeypatch):
    """Let defaults mean torch's in unit tests but those of msrun.mindspore, whoever has imported it."""
    if UNIT in request.path.parents and request.path.parent != UNIT / "mindspore":
        monkeypatch.setenv(contract.MSRUN_MINDSPORE_SEMANTICS, "torch")


@pytest.fixture(autouse=True)
def descriptors_are_closed(request):
    """Whatever a unit test opens is closed when it ends: what leaks one descriptor a call ends a long job."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    if UNIT not in request.path.parents:
        return
    end = time.monotonic() + CLOSING_S
    while left := opened_since(before):
        assert time.monotonic() < end, f"left open: {sorted(left)}"
        # What an object holds that nobody has any more, mostly a young one: to look at all takes a second.
        gc.collect(1 if time.monotonic() < end - 0.9 * CLOSING_S else 2)
        time.sleep(0.02)


def opened_since(before):
    """Return new descriptors of this process and what they are open on, without what multiprocessing keeps for good.

    It opens these once for a process, whatever test comes first: the memory that its locks and barriers share, and
    pipes to its resource tracker and its fork server.
    """
    shared_memory = f"/dev/shm/pym-{os.getpid()}-"  # as multiprocessing.heap names it
    kept = {resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd}
    found = set()
    for name in set(os.listdir("/proc/self/fd")) - before:
        with contextlib.suppress(OSError):  # that of the listing itself
            target = os.readlink(f"/proc/self/fd/{name}")
            if int(name) not in kept and not target.startswith(shared_memory):
                found.add((int(name), target))
    return found


@pytest.fixture(scope="session", autouse=True)
def first_store_was_opened():
    """Open a store of torch before any test does: with the first one libuv opens a pipe that it keeps for good."""
    if "torch" in sys.modules:  # else no test that was collected opens one in this process
        from torch.distributed import TCPStore

        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="session", autouse=True)
def signals_reach_jobs():
    """Undo what nohup or a service has set: what this process ignores, every job would ignore too.

    A handler of ours, unlike the wish to ignore, does not pass to started programs.
    """
    ignored = [
        n
        for n in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
        if signal.getsignal(n) is signal.SIG_IGN
    ]
    for signum in ignored:
        signal.signal(signum, lambda *_: None)
    yield
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)


@pytest.fixture
def logged():
    """The records that go to the loggers of msrun, from INFO on, and of msrun.mindspore."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    loggers = [logging.getLogger(name) for name in ("msrun", "mindspore")]
    before = loggers[0].level
    loggers[0].setLevel(logging.INFO)
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    loggers[0].setLevel(before)
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture
def odd_path(tmp_path):
    """A directory whose name breaks every careless quoting."""
    path = tmp_path / 'it\'s a "dir" with  blanks; ünï☃ $HOME `id` *'
    path.mkdir()
    return path


@pytest.fixture(scope="session")
def workers():
    """The folder of tiny worker programs."""
    return WORKERS


@pytest.fixture
def msrun():
    """Starts real jobs; afterwards no process and no temporary folder of them is left."""
    with JobRunner() as runner:
        yield runner


@contextlib.contextmanager
def signals_as_before():
    """Undo what a command does to its process: at its end it ignores signals, and so would all jobs of this process."""
    before = {signum: signal.getsignal(signum) for signum in signal.Signals}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        yield
    finally:
        for signum, handler in before.items():
            if handler is not None and signal.getsignal(signum) is not handler:
                signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture
def msrun_here(msrun, monkeypatch, capfd):
    """Runs the command in this process, at a tenth of the cost: for what it refuses before there is a job."""
    from msrun.cli import main

    def run(*words, cwd, env: Mapping[str, str] = {}):
        with monkeypatch.context() as patch, signals_as_before():
            for name, value in msrun.environ(env).items():
                patch.setenv(name, value)
            patch.setattr(tempfile, "tempdir", None)  # found anew, from TMPDIR
            patch.chdir(cwd)
            capfd.readouterr()
            with pytest.raises(SystemExit) as ended:
                main([str(word) for word in words])
            said = capfd.readouterr()
        return Finished(int(str(ended.value.code)), said.out.encode(), said.err, latest_job(cwd / "log_output"))

    return run


@pytest.fixture(scope="module")
def msrun_of_module():
    """The same for jobs whose one run serves several tests."""
    with JobRunner() as runner:
        yield runner


@pytest.fixture
def mindspore_python():
    """A Python that has MindSpore."""
    return os.environ.get("MINDSPORE_PYTHON") or pytest.skip("MINDSPORE_PYTHON names no Python that has MindSpore")


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """The folder that an example writes when it has no data, so that not every worker of every example makes it."""
    from msrun.data import write_digits

    return write_digits(tmp_path_factory.mktemp("data") / "digits")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tmp_path / "small disk"
    folder.mkdir()
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"cannot mount a tmpfs: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        detach = 2  # MNT_DETACH: also when a failed test has left somebody in it
        assert libc.umount2(os.fsencode(folder), detach) == 0


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="Write the files of tests/golden anew.")


@pytest.fixture
def golden(request):
    """Compares a text with a file of tests/golden in full; --update-golden writes the file instead."""
    return functools.partial(compare_golden, request.config.getoption("--update-golden"))


@pytest.fixture
def golden_page(request):
    """Compares a page of the documentation with what it should be, or writes it."""
    return functools.partial(compare_page, request.config.getoption("--update-golden"))
