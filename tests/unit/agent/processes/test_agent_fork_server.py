"""The fork server: what it imports, when it may fork, what it is told, and that it runs before its job is known."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import closing
from unittest import mock

import pytest
from fake_agents import FakeClock
from job_runner import run_python

from msrun import contract
from msrun.agent.processes import fork_server
from msrun.agent.processes.process_control import start_time
from msrun.agent.processes.server_handle import (
    FIRST_SERVER_ID,
    MINDSPORE_SCHEDULER_ID,
    SCHEDULER_ID,
    ForkServerHandle,
    ProcessSpec,
    ServerProcess,
    read_spec,
    start_fork_server,
)
from msrun.cluster.messages import Channel, await_input
from msrun.errors import ClusterError
from msrun.planning.program import Program
from msrun.planning.record import encode_record

SINGLE_THREAD = """
import sys, threading, types
from msrun.agent.processes import child, fork_server
print(fork_server.fork_safety())
sys.modules["torch.cuda"] = types.SimpleNamespace(is_initialized=lambda: {initialised})
print(fork_server.fork_safety())
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(fork_server.fork_safety())
"""


@pytest.mark.parametrize("initialised", [True, False])
def test_process_with_a_live_accelerator_or_another_thread_must_not_fork(initialised):
    first, second, third = run_python(SINGLE_THREAD.format(initialised=initialised)).splitlines()
    assert first == "('fork', '')" and third.startswith("('exec', '1 threads were started by imports")
    assert second.startswith("('exec', 'torch.cuda was initialised" if initialised else "('fork', '')")


FINALIZERS = """
import weakref
from msrun.agent.processes.fork_server import forget_finalizers
class Thing: pass
early, late = Thing(), Thing()
weakref.finalize(early, print, "of the server")
forget_finalizers()
weakref.finalize(late, print, "of the worker")
"""


def test_finalizers_of_imports_are_forgotten_and_later_ones_run():
    """Also fails when the interpreter no longer keeps them where they are looked for."""
    assert hasattr(weakref.finalize, "_registry")
    assert run_python(FINALIZERS) == "of the worker\n"


class Server:
    """A fork server in this process, turned by hand, and the agent's ends of its sockets."""

    def __init__(self, clock):
        (ours, theirs), (self.passing, self._taking) = socket.socketpair(), socket.socketpair()
        self._agent, self._channel = Channel(ours), Channel(theirs)
        self.loop = fork_server.ForkServer(self._channel, os.getpid(), self._taking, clock)
        self.clock = clock

    def ask(self, kind, **fields):
        """Return what the server says to a request, and in the turn after."""
        self._agent.send({"type": kind, **fields})
        self.loop.turn()
        return self.later(0.0)

    def start(self, *process_ids):
        return self.ask("start", processes=encode_record([ProcessSpec(one, "/l") for one in process_ids]))

    def later(self, seconds):
        self.clock.advance(seconds)
        self.loop.turn()
        found = []
        while await_input(self._agent, 0.0) and not self._agent.is_closed:
            found += self._agent.receive()
        return found

    def hang_up(self):
        self._agent.close()
        self.loop.turn()

    def close(self):
        self.loop.close()
        for one in (self._agent, self._channel, self.passing, self._taking):
            one.close()


@pytest.fixture
def server():
    with closing(Server(FakeClock())) as made:
        yield made


def test_what_is_asked_for_early_is_imported_also_by_the_name_of_a_submodule(server, monkeypatch):
    for name in ("wsgiref", "wsgiref.util"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert server.ask("import", names=["wsgiref:util"]) == [] and "wsgiref.util" in sys.modules


def test_process_that_cannot_be_forked_is_named_and_nobody_is_started_after_it(server, monkeypatch):
    def refuse():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    (message,) = server.start(0, 1, 2)
    assert message["type"] == "cannot_start" and server.later(1.0) == []
    begin, _, end = message["reason"].partition(" (")
    assert begin == "cannot start worker 0: Resource temporarily unavailable"
    assert end == "the user or the container has as many processes as it may); raise ulimit -u or pids.max"
    (told,) = server.ask("stop", signum=signal.SIGTERM, grace_s=1.0, attempt=0)
    assert (told["type"], told["not_started"]) == ("told", [0, 1, 2])
    assert "cannot start worker 5" in server.start(5)[0]["reason"], "the next attempt tries again"


@pytest.fixture
def sent(monkeypatch):
    """The signals that were sent to workers, each of which is process 1 << 23, which there is not."""
    found = []
    monkeypatch.setattr(os, "fork", lambda: 1 << 23)
    monkeypatch.setattr(fork_server.process_control, "signal_processes", lambda pids, n: found.extend([n] * bool(pids)))
    monkeypatch.setattr(fork_server.process_control, "signal_groups", lambda pids, n: found.extend([n] * bool(pids)))
    monkeypatch.setattr(fork_server.process_control, "descendants", lambda _: [])
    monkeypatch.setattr(fork_server.Reaper, "reap", lambda _: [])
    return found


def kinds(messages):
    return [message["type"] for message in messages]


@pytest.mark.parametrize(
    ("signum", "then"),
    [(signal.SIGTERM, [(10.0, signal.SIGKILL)]), (signal.SIGINT, [(8.0, signal.SIGTERM), (2.0, signal.SIGKILL)])],
)
def test_workers_get_the_signal_then_term_then_kill(server, sent, signum, then):
    server.start(0)
    assert kinds(server.ask("stop", signum=signum, grace_s=10.0, attempt=0)) == ["told"] and sent[0] == signum
    assert server.ask("pause") == [] and signal.SIGSTOP not in sent, "what is to end is left alone"
    for seconds, expected in then:
        sent.clear()
        server.later(seconds - 0.1)
        assert sent == []
        said = server.later(0.1)
        assert sent[0] == expected and kinds(said) == ["killed"] * (expected == signal.SIGKILL)
    sent.clear()
    said = server.ask("stop", signum=signal.SIGKILL, grace_s=0.0, attempt=0)
    assert kinds(said) == ["told", "killed"] and sent == [signal.SIGKILL]


def test_pause_starts_nobody_and_what_is_stopped_goes_on_to_end(server, sent):
    server.ask("pause")
    assert server.start(0, 1) == []
    assert kinds(server.ask("resume")) == ["started", "started"] and sent == [signal.SIGCONT] * bool(sent)
    server.ask("pause")
    sent.clear()
    assert kinds(server.ask("stop", signum=signal.SIGTERM, grace_s=10.0, attempt=0)) == ["told"]
    assert sent == [signal.SIGCONT, signal.SIGTERM, signal.SIGCONT]


@pytest.mark.parametrize("handles", [True, False])
def test_signal_for_a_young_worker_waits_for_its_handler(server, sent, monkeypatch, handles):
    monkeypatch.setattr(fork_server.process_control, "handles_signal", lambda *_: handles)
    server.start(3)
    server.ask("signal", process_ids=[3, 4], signum=signal.SIGUSR1)
    assert sent == [signal.SIGUSR1] * handles
    server.later(1.0)
    monkeypatch.setattr(fork_server.process_control, "handles_signal", lambda *_: True)
    server.later(1.0)
    server.later(100.0)
    assert sent == [signal.SIGUSR1], "once"
    monkeypatch.setattr(fork_server.process_control, "handles_signal", lambda *_: False)
    server.start(5)
    server.ask("signal", process_ids=[5], signum=signal.SIGUSR1)
    monkeypatch.setattr(fork_server.Reaper, "reap", lambda _: [(1 << 23, 0, 0.0)])
    server.later(100.0)
    assert sent == [signal.SIGUSR1], "whoever has its number now is not meant"


def test_end_of_a_grace_does_not_hit_the_next_attempt(server, sent):
    assert kinds(server.ask("stop", signum=signal.SIGTERM, grace_s=10.0, attempt=0)) == ["told"]
    assert kinds(server.ask("sweep")) == ["swept"]
    server.start(0)
    server.later(10.0)
    assert signal.SIGKILL not in sent


@pytest.mark.parametrize("process_id", [0, FIRST_SERVER_ID, MINDSPORE_SCHEDULER_ID])
def test_late_end_is_news_of_the_attempt_that_it_served(server, sent, monkeypatch, process_id):
    """Its main thread may have ended before others: it is a zombie then, that cannot be collected yet."""
    server.start(process_id)
    ends = iter([[], [(1 << 23, 0, 0.0)]])
    monkeypatch.setattr(fork_server.Reaper, "reap", lambda _: next(ends, []))
    assert kinds(server.ask("sweep")) == ["exited", "swept"]


def test_what_a_worker_has_left_gets_a_moment_to_end(server, sent, monkeypatch):
    looks = iter([[11], [11]])
    monkeypatch.setattr(fork_server.process_control, "descendants", lambda _: next(looks, []))
    assert kinds(server.ask("sweep")) == ["swept"] and sent == [signal.SIGTERM]
    monkeypatch.setattr(fork_server, "LEFTOVER_GRACE_S", 0.0)
    monkeypatch.setattr(fork_server, "KILL_DEADLINE_S", 0.0)
    monkeypatch.setattr(fork_server.process_control, "descendants", lambda _: [11])
    assert server.ask("sweep")[0]["survivors"] == [11] and sent[1:] == [signal.SIGTERM, signal.SIGKILL]


def test_agent_that_stays_stopped_is_ended_and_one_that_goes_on_is_not(server, monkeypatch):
    ended = []
    is_stopped = True
    monkeypatch.setattr(fork_server.process_control, "is_stopped", lambda _: is_stopped)
    monkeypatch.setattr(fork_server.process_control, "signal_processes", lambda pids, _: ended.extend(pids))
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    server.later(100.0)
    assert ended == [], "without a limit nobody looks"
    with open(os.devnull) as null:
        socket.send_fds(server.passing, [b"f"], [null.fileno()] * 3)
    server.ask("begin", environment={}, stopped_limit_s=8.0, open_files=9)
    server.later(2.0)
    for _ in range(2):
        is_stopped = False
        server.later(2.0)
        is_stopped = True
        server.later(8.0)
        assert ended == [], "it has moved since"
    server.later(2.0)
    (agent,) = ended
    assert agent == os.getpid() and agent.started_at == start_time(os.getpid()), "nobody who gets its number later"


@pytest.fixture
def begun(server, sent, monkeypatch, tmp_path):
    """A server that was given a folder and files, that one worker waits to be started by, and a signal for another."""
    (tmp_path / "run").mkdir()
    for name in ("adopt_orphans", "die_with_parent", "kill_descendants"):
        monkeypatch.setattr(fork_server.process_control, name, mock.Mock(return_value=[4711]))
    monkeypatch.setattr(fork_server.process_control, "handles_signal", lambda *_: False)
    with open(os.devnull) as null:
        server.loop.given.scheduler_fds = os.dup(null.fileno()), os.dup(null.fileno())
    asked = {"preload": ["never"], "start_method": "exec", "run_dir": str(tmp_path / "run"), "blas_threads": 2}
    (ready,) = server.ask("prepare", **asked)
    assert (ready["start_method"], ready["reason"], server.loop.given.blas_threads) == ("exec", "asked for", 2)
    assert fork_server.process_control.adopt_orphans.called, "and it outlives the agent, to clean up"
    assert fork_server.process_control.die_with_parent.call_args == mock.call(os.getpid(), 0)
    assert kinds(server.start(SCHEDULER_ID)) == ["started"]
    server.ask("pause")
    server.start(7)
    server.ask("signal", process_ids=[SCHEDULER_ID], signum=signal.SIGUSR1)
    sent.clear()
    return server


def test_server_that_rests_forgets_the_part_that_is_over_and_serves_the_next(begun, sent, tmp_path):
    files = begun.loop.given.scheduler_fds
    assert begun.ask("rest") == [{"type": "finished", "survivors": [4711]}]
    assert list(tmp_path.iterdir()) == [] and not begun.loop.has_finished
    for descriptor in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert begun.later(100.0) == sent == []
    assert kinds(begun.start(5)) == ["started"]


@pytest.mark.parametrize("has_closed", [True, False])
def test_agent_that_is_gone_without_a_word_or_before_it_has_passed_its_files_leaves_nothing_behind(
    begun, tmp_path, has_closed
):
    if has_closed:
        begun.hang_up()
    else:
        begun.passing.close()
        begun.ask("begin", environment={}, stopped_limit_s=0.0, open_files=9)
    kill = fork_server.process_control.kill_descendants
    assert kill.call_args_list == [mock.call(5.0, [1 << 23]), mock.call(5.0)], "the scheduler last"
    assert begun.loop.has_finished and list(tmp_path.iterdir()) == []


def test_server_that_does_not_end_is_killed(tmp_path):
    (ours, theirs), (passing, taking) = socket.socketpair(), socket.socketpair()
    process = subprocess.Popen(["sleep", "600"])
    with closing(theirs), closing(taking):
        ForkServerHandle(ServerProcess(process), Channel(ours), passing, {}, str(tmp_path)).end(0.01)
    assert process.poll() == -signal.SIGKILL


def test_server_that_takes_nothing_is_killed_and_one_that_cannot_be_started_is_told(tmp_path):
    process, channel = mock.Mock(), mock.Mock()
    handle = ForkServerHandle(process, channel, mock.Mock(), {}, str(tmp_path))
    handle.import_early(("torch",))
    channel.send.assert_called_once_with({"type": "import", "names": ["torch"]})
    assert not process.kill.called
    channel.send.side_effect = TimeoutError
    handle.send("sweep")
    assert process.kill.called
    with pytest.raises(ClusterError, match=r"cannot start the fork server \(.*\): No such file or directory"):
        start_fork_server(env={}, working_directory=str(tmp_path / "gone"), log_fd=2)


IMPORT = """
import gc
from msrun.agent.processes.fork_server import collection_paused
gc.set_threshold(50, 5, 5)
rounds = []
gc.callbacks.append(lambda phase, info: rounds.append(phase))
with collection_paused():
    for _ in range(2):  # from Python 3.12 on a collection that was due before comes at the next jump
        rounds.clear()
    kept = [[number] for number in range(10_000)]
    {module}
print(len(rounds), gc.get_threshold(), gc.isenabled(), gc.get_freeze_count() > 10_000)
more = [[number] for number in range(10_000)]
print(len(rounds) > 0)
"""


@pytest.mark.parametrize(
    ("module", "thresholds"),
    [("pass", (50, 5, 5)), ("gc.set_threshold(900, 9, 9)", (900, 9, 9)), ("gc.disable()", (50, 5, 5))],
)
def test_imports_are_not_searched_for_garbage_and_what_modules_set_stays(module, thresholds):
    inside, afterwards = run_python(IMPORT.format(module=module)).splitlines()
    goes_on = module != "gc.disable()"
    assert (inside, afterwards) == (f"0 {thresholds} {goes_on} True", str(goes_on))


@pytest.mark.parametrize(
    ("changes", "folder", "can_serve"),
    [
        ({}, "", True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "a", "GLOO_SOCKET_IFNAME": "eth0"}, "", True),
        ({"OMP_NUM_THREADS": "2"}, "", False),
        ({"LD_LIBRARY_PATH": "/lib"}, "", False),
        ({"MSRUN_JOB_ID": "other"}, "", False),
        ({}, "other", False),
    ],
    ids=["nothing else", "the job's", "threads", "libraries", "another job", "another directory"],
)
def test_a_server_serves_what_differs_in_nothing_that_imports_read(tmp_path, changes, folder, can_serve):
    before = {contract.MSRUN_JOB_ID: "f00d", "PATH": os.environ["PATH"], "WORLD_SIZE": "old", "GROUP_WORLD_SIZE": "2"}
    ours, passing = socket.socketpair()
    with ours, passing:
        process = mock.Mock()
        handle = ForkServerHandle(process, Channel(ours), passing, before, str(tmp_path))
        assert handle.can_serve({**before, **changes}, str(tmp_path / folder)) is can_serve


@pytest.mark.parametrize(
    "spec",
    [
        ProcessSpec(-1, "/log"),
        ProcessSpec(3, "/log", Program("module", "m", ("a", "b")), env={"A": "1", "GONE": None}, cpus=(0, 2)),
    ],
)
def test_a_process_is_read_as_it_was_asked_for(spec):
    message = json.loads(json.dumps(encode_record(spec)))
    assert read_spec(message) == spec
    with pytest.raises(TypeError, match="unknown: newer"):
        read_spec({**message, "newer": 1})
