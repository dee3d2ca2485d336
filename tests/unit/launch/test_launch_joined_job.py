"""Hosts on each of which msrun is typed, until all have come: whom they wait for, and what they are told."""

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from job_runner import wait_until
from open_gate import TOKEN, OpenGate, dial_as, host_request
from plans import small_spec

from msrun import contract
from msrun.agent.signals import SignalPipe
from msrun.cluster.connection import Caller, NoKey, Seal, hello, read_hello
from msrun.cluster.messages import FrameBuffer, Inbox, encode_body, encode_message, frame, pack_hosts
from msrun.cluster.protocol import HostPart, protocol
from msrun.cluster.rendezvous import UnresolvedName, listen
from msrun.errors import ClusterError, Interrupted, MsrunError, PeerFailed, UsageError
from msrun.launch import joined_job as module
from msrun.launch import rendezvous
from msrun.launch.fleet import joined_hosts
from msrun.launch.fleet.joined_hosts import JoinedHosts
from msrun.launch.job import Start
from msrun.launch.joined_job import DialledPart, JobKey, dial, find_master
from msrun.launch.rendezvous import Patience
from msrun.launch.transport.pipe import MARKER
from msrun.planning.hosts import HostAssignment, HostEntry

WAITS = "the job starts again; waiting for its next start"


def spec_for(worker_num=2, **changes):
    return small_spec(Path("/"), worker_num, **{"local_worker_num": 1, "master_addr": "train-0.train", **changes})


# -- the name of the scheduler's host ---------------------------------------------------------------------------------


def never_resolves(name):
    raise UnresolvedName(f"{name}: not known")


def find(spec, said):
    with SignalPipe() as signals:
        return find_master(spec, Patience(spec, signals, said.append))


def test_name_that_becomes_known_later_is_waited_for(monkeypatch):
    answers = []

    def resolve(name):
        answers.append(name)
        return never_resolves(name) if len(answers) < 3 else "10.0.0.8"

    monkeypatch.setattr(module, "resolve_address", resolve)
    monkeypatch.setattr(rendezvous, "RETRY_S", 0.0)
    monkeypatch.setattr(rendezvous, "FIRST_LINE_S", 0.0)
    said = []
    assert find(spec_for(), said) == "10.0.0.8"
    assert said == ["train-0.train: not known; trying again"]


def test_signal_ends_the_wait_for_a_name(monkeypatch):
    def resolve(name):
        os.kill(os.getpid(), signal.SIGTERM)
        return never_resolves(name)

    monkeypatch.setattr(module, "resolve_address", resolve)
    with pytest.raises(Interrupted, match="stopped by SIGTERM before all hosts had come"):
        find(spec_for(cluster_time_out_s=-1), [])
    assert find(spec_for(stands_for=HostEntry("h")), []) == "train-0.train", "of a rehearsal"


def test_key_that_no_host_has_written_is_no_key(tmp_path):
    with pytest.raises(NoKey, match=r"no key of this job: .*\.meeting_\d+ is not there; give all hosts the same"):
        JobKey(spec_for(log_dir=tmp_path)).read()


# -- a host that dials ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(*answers):
    """Yield the place of a server that sends each caller one of these, and what callers have said first."""
    heard = []
    with listen("127.0.0.1", 0) as listener:

        def answer():
            for said in answers:
                stream, _ = listener.accept()
                with stream:
                    heard.append(FrameBuffer(1 << 10).feed(stream.recv(1 << 10))[0])
                    stream.sendall(said)
                    stream.shutdown(socket.SHUT_WR)
                    while stream.recv(1 << 10):
                        pass

        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()[:2], heard
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is no msrun scheduler"),
        (frame(hello("0" * 64).replace(b":%d," % protocol(), b":99,")), "speaks protocol 99, this one"),
        (frame(hello("0" * 64) + b" "), "is no msrun scheduler: it does not say hello"),
        (frame(encode_body({"type": "assigned", "hosts": []})), "is no msrun scheduler"),
        (frame(b"refused \x1b[2J\n"), "refused this host: ?[2J?"),
        (frame(b"[" * 5000), "is no msrun scheduler"),
        (
            frame(hello("0" * 64)) + frame(Seal(b"another", "0" * 64, "0" * 64, is_scheduler=True).close(b"{}")),
            "does not know this job's token",
        ),
    ],
)
def test_host_does_not_trust_whoever_answers(answer, reason):
    with answering(answer) as (place, _), pytest.raises(ClusterError) as caught:
        dial_as(host_request(0), place)
    assert reason in str(caught.value)


def test_host_does_not_wait_for_ever_for_an_answer(monkeypatch):
    monkeypatch.setattr(module, "GREETING_S", 0.0)
    with listen("127.0.0.1", 0) as silent, pytest.raises(ClusterError, match="does not answer: is it another program"):
        dial_as(host_request(0), silent.getsockname()[:2])


def test_signals_are_heeded_while_a_scheduler_is_silent(monkeypatch):
    def greet(connection, _):
        return Caller(connection, TOKEN, "here", lambda: host_request(0))

    with listen("127.0.0.1", 0) as silent, SignalPipe((signal.SIGTSTP,)) as signals:
        monkeypatch.setattr(rendezvous, "stop_this_process", lambda: signals.tell(signal.SIGTERM))
        signals.tell(signal.SIGTSTP)
        with pytest.raises(Interrupted, match="stopped by SIGTERM before all hosts had come"):
            dial(silent.getsockname()[:2], greet, None, Patience(spec_for(), signals, print))


def test_host_shows_another_nonce_at_every_try_and_says_that_nobody_is_there(monkeypatch):
    monkeypatch.setattr(rendezvous, "RETRY_S", 0.0)
    monkeypatch.setattr(rendezvous, "FIRST_LINE_S", 0.0)
    said = []
    with answering(b"", b"", frame(b"refused no")) as (place, heard), pytest.raises(ClusterError, match=r"host: no$"):
        dial_as(host_request(0), place, said=said)
    nonces = {read_hello(body) for body in heard}
    assert None not in nonces and len(nonces) == 3
    assert said == [f"no scheduler at 127.0.0.1:{place[1]} (it closed the connection); trying again"]


# -- hosts that come in -----------------------------------------------------------------------------------------------


class Host(threading.Thread):
    """One that comes, and why it goes again: no job of these tests begins."""

    def __init__(self, place, node_rank, worker_num):
        super().__init__()
        self._place, self._request = place, host_request(node_rank, worker_num)
        self.said = []
        self.error = None
        self.start()

    def run(self):
        with contextlib.closing(Inbox()) as no_signals:
            try:
                connection, silence_s = dial_as(self._request, self._place)
                with DialledPart(spec_for(), connection, silence_s, no_signals, self._place) as part:
                    part.await_part(Patience(spec_for(), no_signals, self.said.append))
            except MsrunError as error:
                self.error = error


class Meeting:
    """The host with the scheduler, of a job of a worker on each host."""

    def __init__(self, worker_num, **changes):
        with listen("127.0.0.1", 0) as listener:
            self.place = listener.getsockname()[:2]
        self.worker_num = worker_num
        self.said = []
        self.signals = SignalPipe()
        self.signals.__enter__()
        spec, own = spec_for(worker_num=worker_num, **changes), host_request(0, worker_num)
        start = mock.Mock(caller={}, job_id="JOB", say=self.said.append)
        self.joined = JoinedHosts(spec, start, own, self.place, listen(*self.place), TOKEN, None, self.signals)
        self.hosts = []

    def come(self, node_rank):
        self.hosts.append(Host(self.place, node_rank, self.worker_num))
        return self.hosts[-1]

    def close(self):
        self.signals.__exit__()
        for host in self.hosts:
            host.join(10)
            assert not host.is_alive()


@pytest.fixture
def meeting():
    with contextlib.ExitStack() as stack:

        def make(worker_num, **changes):
            return stack.enter_context(contextlib.closing(Meeting(worker_num, **changes)))

        yield make


def test_host_that_comes_in_the_same_moment_as_the_last_of_them_waits_for_the_next_start(meeting, monkeypatch):
    here = meeting(2, min_hosts=2, cluster_time_out_s=20)
    waits = "the job runs; this host is used from its next start on"
    with contextlib.suppress(UsageError), here.joined as joined:
        are_enough = joined._are_enough
        monkeypatch.setattr(joined, "_are_enough", lambda: are_enough() and len(joined.agents.others) == 2)
        hosts = [here.come(1), here.come(1)]
        joined.meet()
        wait_until(lambda: any(waits in host.said for host in hosts), "it waits")
        assert len(joined.hosts) == 2 and len(joined.pool.waiting) == 1
        joined.call_off("nobody needs it", 0)
        not_used = lambda: here.said[-1].endswith("; the job did not use it") and not joined.pool.waiting  # noqa: E731
        assert joined.agents.hear(not_used, {}, deadline=time.monotonic() + 10)
        wait_until(lambda: all(host.said[-1:] == ["nobody needs it"] for host in hosts), "both have been told")
        assert [host.error for host in hosts] == [None, None]
        raise UsageError("that is all")


def test_those_that_have_come_in_time_are_told_who_has_not(meeting, monkeypatch):
    monkeypatch.setattr(joined_hosts, "RETELL_S", 0.05)
    here = meeting(3, cluster_time_out_s=2, join_window_s=0.0)
    with pytest.raises(PeerFailed, match=r"--cluster_time_out 2: 2 of 3 .*; came: "), here.joined as joined:
        hosts = [here.come(1), here.come(1)]
        joined.meet()
    for host in hosts:
        host.join(10)
    taken, late = sorted((host.error for host in hosts), key=str, reverse=True)
    assert "--node_rank 1 is taken by" in str(taken) and any("--node_rank 1 is taken by" in one for one in here.said)
    assert isinstance(late, PeerFailed) and late.exit_code == contract.EXIT_TIMEOUT
    assert "2 of 3 registered, missing: rank 2, from node 2 on" in hosts[0].said + hosts[1].said


def test_host_that_waits_heeds_signals_and_misses_the_scheduler():
    with OpenGate() as gate, SignalPipe() as signals:
        patience = Patience(spec_for(), signals, print)
        with DialledPart(spec_for(), gate.dial(1), 30.0, signals, gate.place) as part:
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Interrupted, match="stopped by SIGTERM before all hosts had come"):
                part.await_part(patience)
            gate.let_in[0].close()
            with pytest.raises(
                ClusterError, match=r"lost the scheduler at 127.0.0.1:\d+, which .*, before all hosts had"
            ):
                part.await_part(patience)


def test_host_keeps_its_fork_server_from_start_to_start_and_tells_the_launcher_what_it_does(monkeypatch):
    said, given, server = [], [], mock.Mock()
    result = mock.Mock(goes_on=True, server=server, failure=None, survivors=())
    monkeypatch.setattr(module, "run_part", lambda spec, start, own: given.append((spec, start, own)) or result)
    monkeypatch.setattr(Start, "say", lambda _, text: said.append(text))
    hosts = tuple(HostAssignment(node, f"h{node}", f"10.0.0.{node}", (node,), (0,)) for node in range(2))
    more = {"rank_table": "", "first_attempt": 1, "max_restarts": 2, "folder": 3}
    part = HostPart("JOB", 1, None, "10.0.0.0", 7, use_shared=False, hosts=pack_hosts(hosts), **more)
    with OpenGate() as gate, SignalPipe() as signals:
        with DialledPart(spec_for(log_dir=Path("/logs")), gate.dial(1), 30.0, signals, gate.place) as dialled:
            assert dialled.run(part, Start({}, "")) is dialled.run(part, Start({}, "")) is result
            server.kill.assert_not_called()
        server.kill.assert_called_once_with()
    assert said[:2] == [f"all 2 hosts have come together again; this is {hosts[1].describe()}", WAITS]
    (_, _, first), (spec, start, second) = given
    assert (first.early_server, second.early_server, second.stopped_limit_s) == (None, server, 60.0)
    assert (spec.log_dir, spec.node_rank, start.job_id) == (Path("/logs/JOB/node_3"), 1, "JOB")
    assert (spec.first_attempt, spec.max_restarts) == (1, 2)


@pytest.mark.parametrize(
    ("is_silent", "why"), [(False, "has closed its connection"), (True, "has given no sign of life for")]
)
def test_host_that_goes_before_all_have_come_may_register_again(meeting, is_silent, why):
    here = meeting(3, heartbeat_time_out_s=0.3 if is_silent else 15.0)

    def come_and_go():
        connection, _ = dial_as(host_request(1, 3), here.place)
        connection.write(MARKER)
        if is_silent:  # after a sign of life: it hears, and says nothing
            connection.write(encode_message({"type": "beat", "seen": 0}))
        else:
            connection.close()
        wait_until(lambda: any(why in line and "it may register again" in line for line in here.said), "it is told")
        connection.close()
        for node_rank in (1, 2):
            here.come(node_rank)

    with contextlib.suppress(UsageError), here.joined as joined:
        goes = threading.Thread(target=come_and_go)
        goes.start()
        joined.meet()
        goes.join(10)
        assert f"lost node 1 (h1, 10.0.0.1), which {why}" in "\n".join(here.said)
        assert len(joined.agents.others) == 2
        raise UsageError("that is all")
