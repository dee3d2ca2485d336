"""Which jobs a warm server can serve, what a job asks of it, and what becomes of the answer."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from unittest import mock

import pytest

from msrun.agent import warm
from msrun.agent.processes import child, fork_server, process_control
from msrun.agent.warm import (
    WarmProcess,
    WarmServer,
    WarmStart,
    changed_file,
    likeness,
    loaded_files,
    locked,
    read_at_import,
    start_warm,
    stop_warm_servers,
    warm_folder,
)
from msrun.cluster.messages import Channel
from msrun.errors import UsageError

WARM = WarmStart(("torch",), 600.0)


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_end_is_that_of_the_process_and_of_what_it_left(sleeper, monkeypatch):
    swept = list[str]()
    monkeypatch.setattr(warm, "end_job", swept.append)
    process = WarmProcess(sleeper.pid, "f00d")
    assert not process.wait(0.0) and not swept
    os.kill(sleeper.pid, signal.SIGSTOP)
    process.kill()
    assert process.wait(5.0) and swept == ["f00d"]
    assert sleeper.wait() == -signal.SIGKILL
    process.kill()
    process.close()
    process.close()


def test_what_has_ended_orderly_has_left_nothing(sleeper, monkeypatch):
    """Other hosts of a rehearsal, whose processes have the mark of the same job, may still work."""
    monkeypatch.setattr(warm, "end_job", lambda _: pytest.fail("nothing is left"))
    process = WarmProcess(sleeper.pid, "f00d")
    sleeper.communicate()
    assert process.wait(5.0)
    process.close()


class Server:
    """A warm server: answers each request as the test wants, in a thread, until it is closed."""

    def __init__(self, path, answer):
        self.asked = []
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
                for descriptor in descriptors:
                    os.close(descriptor)
                with contextlib.closing(Channel(connection)) as channel:
                    found = []
                    while not found and not channel.is_closed:
                        found = channel.receive()
                    self.asked += found
                    if self._answer is not None:
                        channel.send(self._answer)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's folder; every job is like "like"."""
    monkeypatch.setattr(warm, "likeness", lambda *_: "like")
    return warm_folder({"XDG_RUNTIME_DIR": str(tmp_path)})


@pytest.fixture
def serving(folder):
    with contextlib.ExitStack() as stack:

        def serve(answer, name="like.sock"):
            return stack.enter_context(contextlib.closing(Server(folder / name, answer)))

        yield serve


def start(folder, **env):
    return start_warm(
        WARM, env=env, working_directory=str(folder), job_id="f00d", caller={"XDG_RUNTIME_DIR": str(folder.parent)}
    )


def test_all_servers_are_stopped_and_what_a_killed_one_left_is_removed(folder, serving):
    servers = [serving({"type": "stopping"}, name) for name in ("a.sock", "b.new")]
    serving({"type": "busy"}, "c.sock")
    serving(None, "d.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "dead.sock"))
    assert stop_warm_servers({"XDG_RUNTIME_DIR": str(folder.parent)}) == 2
    assert [server.asked for server in servers] == [[{"type": "stop"}]] * 2
    assert not (folder / "dead.sock").exists() and (folder / "a.sock").exists()


def test_folder_into_which_others_may_look_is_refused(folder):
    folder.chmod(0o750)
    with pytest.raises(UsageError, match="is not a folder that only you can open"):
        start(folder)


ENV = {"PATH": "/bin", "PYTHONPATH": "/a:/b", "OMP_NUM_THREADS": "1", "FOO": "1"}


def test_only_what_has_its_effect_at_import_makes_jobs_unlike():
    own = likeness(ENV, ["torch", "msrun.runtime:init"], "/work")
    for env in (
        {**ENV, "FOO": "2"},
        {**ENV, "GLOO_SOCKET_IFNAME": "eth7"},
        {**ENV, "PATH": "/usr/bin"},
        {**ENV, "MASTER_PORT": "1"},
    ):
        assert likeness(env, ["torch.nn", "msrun"], "/elsewhere") == own
    for env in ({**ENV, "LD_PRELOAD": "x.so"}, {**ENV, "TORCH_SHOW_CPP_STACKTRACES": "1"}):
        assert likeness(env, ["torch", "msrun"], "/work") != own
    assert likeness(ENV, ["numpy", "msrun.runtime:init"], "/work") != own, "another package"
    env = {**ENV, "PYTHONPATH": "lib"}
    assert likeness(env, ["torch"], "/work") != likeness(env, ["torch"], "/elsewhere"), "its search path is relative"


def test_a_server_knows_no_secret_of_the_user():
    assert read_at_import({**ENV, "AWS_SECRET_ACCESS_KEY": "x", "MSRUN_TOKEN": "y"}) == {
        name: ENV[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")
    }


def test_a_file_that_was_changed_or_removed_is_named(tmp_path):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("1")
    other.write_text("2")
    files = {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in (one, other)}
    assert changed_file(files) == ""
    other.write_text("22")
    assert changed_file(files) == str(other)
    one.unlink()
    assert changed_file(files) == str(one)
    assert {warm.__file__, os.__file__} <= loaded_files().keys() and changed_file(loaded_files()) == ""


IDLE_S = 600.0


def test_lock_of_a_server_is_the_users_alone_and_free_again_afterwards(tmp_path):
    with locked(tmp_path / "a.sock", waits=False) as is_held, locked(tmp_path / "a.sock", waits=False) as is_held_twice:
        assert (is_held, is_held_twice) == (True, False)
        assert (tmp_path / "a.lock").stat().st_mode & 0o777 == 0o600
    with locked(tmp_path / "a.sock", waits=False) as is_held:
        assert is_held


def test_idle_server_stays_while_somebody_is_about_to_ask(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(warm.time, "monotonic", lambda: now)
    path = tmp_path / "server"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        server = WarmServer(listener, path, IDLE_S, [])
        now += IDLE_S
        server.end_when_idle(has_jobs=True)
        server.end_when_idle(has_jobs=False)
        assert not server.is_ending, "a job has just run"
        now += IDLE_S
        with locked(path, waits=True):
            server.end_when_idle(has_jobs=False)
            assert not server.is_ending
        server.end_when_idle(has_jobs=False)
        assert server.is_ending and not path.exists()


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Has a warm server in this process, which forks nobody, work through requests; gives answers and imports."""

    def work(idle_s, *asked, reap=ChildProcessError):
        imported, path = [], tmp_path / "server"
        monkeypatch.setattr(warm.os, "fork", lambda: 1 << 23)
        monkeypatch.setattr(warm.os, "wait", mock.Mock(side_effect=ChildProcessError))
        monkeypatch.setattr(warm.os, "waitpid", mock.Mock(side_effect=reap))
        monkeypatch.setattr(warm.signal, "signal", lambda *_: None)
        monkeypatch.setattr(warm, "import_all", lambda names: imported.append(names) or "threads" not in names)
        with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
            listener.bind(str(path))
            listener.listen()
            clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in asked]
            for client, names in zip(clients, asked, strict=True):
                client.connect(str(path))
                socket.send_fds(client, [b"f"], [0])
                Channel(client).send({"type": "start", "imports": names} if isinstance(names, list) else names)
            assert WarmServer(listener, path, idle_s, ["torch"]).serve() is None and not path.exists()
            return [answer for client in clients for answer in Channel(client).receive()], imported

    return work


def test_what_jobs_import_is_imported_once_for_the_next_until_no_fork_is_safe(serve):
    answers, imported = serve(IDLE_S, ["torch"], ["torch", "more"], ["more"], ["threads"], ["never"])
    assert answers == [{"type": "started", "pid": 1 << 23}] * 4 and imported == [["more"], ["threads"]]


def test_server_passes_over_what_it_does_not_understand_and_ends_when_it_is_told_to(serve, capsys):
    answers, imported = serve(IDLE_S, {"type": "none"}, {"no": "type"}, ["torch"], {"type": "stop"}, ["never"])
    assert answers == [{"type": "started", "pid": 1 << 23}, {"type": "stopping"}] and imported == []
    assert capsys.readouterr().err == "a request was not understood: 'type'\n"


def test_server_that_has_imported_what_forbids_a_fork_never_serves(tmp_path, monkeypatch):
    (tmp_path / "a.new").touch()
    monkeypatch.setattr(sys, "argv", ["-c", "", "0", str(tmp_path / "a.sock"), "600.0", "torch"])
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(process_control, "adopt_orphans", lambda: None)
    monkeypatch.setattr(child, "name_process", lambda _: None)
    monkeypatch.setattr(fork_server, "preload", imported := mock.Mock())
    monkeypatch.setattr(fork_server, "fork_safety", lambda: ("exec", "threads"))
    with pytest.raises(SystemExit, match="1"):
        warm.main()
    imported.assert_called_once_with(["torch"])
    assert not list(tmp_path.iterdir())


def test_server_whose_files_have_changed_says_so_and_ends(serve, monkeypatch):
    monkeypatch.setattr(warm, "changed_file", lambda _: "/x.py")
    assert serve(IDLE_S, ["more"]) == ([{"type": "stale", "path": "/x.py"}], [])


def test_server_that_nobody_asks_ends_once_no_job_of_its_runs(serve):
    assert serve(0.01, reap=[(9, 0), (0, 0), ChildProcessError]) == ([], [])
    assert warm.os.waitpid.call_count == 3
