"""One thread for the bytes of all hosts, over socket pairs: whatever one of them does, the others are served."""

import os
import socket
import threading
import time

import pytest
from fake_agents import InLoop
from job_runner import wait_until

from msrun.cluster.messages import encode_message
from msrun.errors import ClusterError
from msrun.launch.transport import link as module
from msrun.launch.transport.link import ByteChannel, EventLoop, Incoming, TaskThreads
from msrun.launch.transport.pipe import MARKER, SocketPipe

MUCH = 8 << 20


class Host:
    """One channel in the loop, and the host's end of it."""

    def __init__(self, loop):
        ours, self.stream = socket.socketpair()
        self.stream.settimeout(60)
        self.came = bytearray()
        self.ends = 0
        self.pipe = SocketPipe(ours=ours)
        self.channel = InLoop(loop, ByteChannel(loop, self.pipe, self._on_bytes, self._on_end))
        self.channel.start()

    def _on_bytes(self, _, data):
        self.came += data

    def _on_end(self, _):
        self.ends += 1

    def receive(self, size):
        data = bytearray()
        while len(data) < size:
            data += self.stream.recv(1 << 20)
        return bytes(data)


class Hosts:
    """A loop, and hosts in it."""

    def __init__(self):
        self.loop = EventLoop(2)
        self.loop.start()
        self.made = []

    def add(self):
        self.made.append(Host(self.loop))
        return self.made[-1]

    def turn(self):
        """Let the loop do what it has been asked to."""
        done = threading.Event()
        self.loop.call(done.set)
        assert done.wait(60)


@pytest.fixture
def hosts():
    made = Hosts()
    yield made
    for host in made.made:
        host.channel.stop(lambda: None)
    made.loop.close(time.monotonic() + 60)
    for host in made.made:
        host.pipe.close()
        host.stream.close()


def test_slow_reader_gets_all_in_its_order_and_holds_up_nobody_until_too_much_waits(hosts, monkeypatch):
    slow, other = hosts.add(), hosts.add()
    data = os.urandom(MUCH)
    slow.channel.send(data)
    slow.channel.send(b"the end")
    other.channel.send(b"hello")
    assert other.receive(5) == b"hello"
    assert slow.channel.has_unsent
    assert slow.receive(MUCH + 7) == data + b"the end"
    wait_until(lambda: not slow.channel.has_unsent, "all is sent")
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 10)
    slow.channel.send(bytes(10))
    hosts.turn()
    assert slow.ends == 0 and slow.receive(10)
    slow.channel.send(bytes(11))
    hosts.turn()
    assert slow.ends == 1


def test_end_is_told_once_and_after_all_that_was_said(hosts):
    host = hosts.add()
    host.stream.sendall(b"last words" * 20_000)
    host.stream.close()
    wait_until(lambda: host.ends, "it has ended")
    assert len(host.came) == 200_000
    host.channel.send(b"too late")
    host.channel.stop(lambda: pytest.fail("it has ended before"))
    hosts.turn()
    assert host.ends == 1


def test_what_a_host_has_said_is_read_although_it_takes_nothing_more(hosts):
    host = hosts.add()
    host.channel.send(bytes(MUCH))
    host.stream.sendall(b"not found")
    host.stream.shutdown(socket.SHUT_RD)
    host.channel.send(b"more")
    wait_until(lambda: host.came == b"not found", "it is read")
    assert host.ends == 0
    host.stream.close()
    wait_until(lambda: host.ends, "it has ended")


def test_channel_that_is_stopped_in_the_midst_of_writing_may_be_closed(hosts):
    host, closed = hosts.add(), threading.Event()
    host.channel.send(bytes(MUCH))
    wait_until(lambda: host.stream.recv(1), "a part is on its way")
    host.channel.stop(lambda: (host.pipe.close(), closed.set())[1])
    host.channel.stop(lambda: pytest.fail("it was stopped before"))
    assert closed.wait(60)
    hosts.turn()
    assert host.ends == 0
    again = hosts.add()  # may get the same descriptor
    again.stream.sendall(b"here")
    wait_until(lambda: again.came == b"here", "the next one is served")


def test_connection_that_fails_in_an_unknown_way_ends_alone(hosts, monkeypatch, capsys):
    def fail(*_):
        raise EOFError("no more")

    bad, deaf, good = hosts.add(), hosts.add(), hosts.add()
    monkeypatch.setattr(bad.pipe, "read", fail)
    monkeypatch.setattr(deaf.pipe, "write", fail)
    bad.stream.sendall(b"x")
    deaf.channel.send(b"y")
    wait_until(lambda: bad.ends, "it has ended")
    deaf.stream.sendall(b"said")
    good.stream.sendall(b"here")
    wait_until(lambda: deaf.came == b"said" and good.came == b"here", "the others are served")
    good.came = None
    good.stream.sendall(b"more")
    wait_until(lambda: good.ends, "it has ended")
    hosts.turn()
    assert "TypeError" in capsys.readouterr().err, "the fault was in the loop's own work"


def test_what_was_called_for_is_done_before_the_end():
    loop, done = EventLoop(1), list[int]()
    loop.call(lambda: done.append(1))
    loop.call_later(3600, lambda: done.append(2))
    loop.start()
    loop.call(lambda: loop.ending.run(lambda: done.append(3), pytest.fail))
    loop.close(time.monotonic() + 60)
    assert done == [1, 3]


def test_fault_in_the_loop_is_told_once_and_the_other_hosts_are_served():
    told, done = list[BaseException](), list[int]()
    loop = EventLoop(1, told.append)

    def fail():
        raise KeyError("slip")

    loop.start()
    for function in (fail, lambda: done.append(1), fail, lambda: loop.ending.run(fail, fail_again)):
        loop.call(function)
    loop.call(lambda: loop.call_later(0.0, fail))
    loop.call(lambda: loop.call_later(0.001, lambda: done.append(2)))
    wait_until(lambda: done == [1, 2] and len(told) == 2, "the loop goes on")
    loop.close(time.monotonic() + 60)
    assert sorted(str(error) for error in told) == ["'slip'", "no one to tell"]


def fail_again(_):
    raise OSError("no one to tell")


def test_tasks_are_done_so_many_at_a_time_and_their_errors_told():
    threads, at_work, most, errors = TaskThreads(2, "test"), list[int](), list[int](), list[Exception]()

    def work(number):
        at_work.append(number)
        most.append(len(at_work))
        time.sleep(0.001)
        at_work.remove(number)
        if number == 3:
            raise OSError("no")

    for number in range(20):
        threads.run(lambda number=number: work(number), errors.append)
    assert threads.join(60) and len(most) == 20 and max(most) <= 2
    assert [str(error) for error in errors] == ["no"]
    assert not [thread for thread in threading.enumerate() if thread.name == "test"]


def test_thread_that_cannot_be_started_is_told_of(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    errors = []
    TaskThreads(1, "test").run(lambda: None, errors.append)
    assert isinstance(errors[0], ClusterError) and "raise ulimit -u" in str(errors[0])
    with pytest.raises(ClusterError, match=r"can't start new thread here; raise ulimit -u"):
        EventLoop(1).start()


SAID = [{"type": "hello", "seq": 1}, {"type": "log", "data": "x" * 300}]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_are_whole_whatever_the_pieces_are(size):
    data = b"Welcome!\n" + MARKER[:4] + MARKER + b"".join(map(encode_message, SAID))
    incoming, found = Incoming(), []
    for begin in range(0, len(data), size):
        found += incoming.feed(data[begin : begin + size])
    assert found == SAID and incoming.noise == "" and not incoming.is_noise
    assert incoming.unacknowledged == sum(len(encode_message(message)) for message in SAID)


def test_noise_without_an_agent_is_kept_as_far_as_it_is_quoted(monkeypatch):
    monkeypatch.setattr(module, "MAX_NOISE_BYTES", 10)
    incoming = Incoming()
    assert incoming.feed(b"not found") == [] and not incoming.is_noise
    incoming.feed(b"!!" * 1000)
    assert incoming.is_noise and incoming.noise == "!" * 10
