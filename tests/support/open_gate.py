"""A gate for hosts on each of which msrun is typed, without the job behind it, and hosts that come to it."""

import contextlib
import socket
import time
from unittest import mock

from job_runner import wait_until

from msrun.cluster.connection import Caller, HostRequest, Refused, Registry
from msrun.cluster.messages import Inbox
from msrun.cluster.protocol import protocol
from msrun.cluster.rendezvous import listen
from msrun.errors import ClusterError
from msrun.launch.fleet.joined_hosts import Gate
from msrun.launch.joined_job import dial
from msrun.launch.rendezvous import Patience
from msrun.launch.transport.link import EventLoop

TOKEN = b"secret"
SILENCE_S = 30.0


def host_request(node_rank, worker_num=2):
    return HostRequest(protocol(), worker_num, 1, node_rank, f"h{node_rank}", f"10.0.0.{node_rank}", 0)


def dial_as(request, place, tls=None, token=TOKEN, said=None):
    """Return the connection of a host that was let in, and how long the scheduler may be silent."""

    def greet(connection, _):
        return Caller(connection, token, f"{place[0]}:{place[1]}", lambda: request)

    say = (said if said is not None else []).append
    with contextlib.closing(Inbox()) as no_signals:
        patience = Patience(mock.Mock(cluster_time_out_s=20), no_signals, say)
        return dial(place, greet, tls, patience)


class OpenGate:
    """Lets in the hosts of a job of a worker each. Leaving the context proves that its loop has met no fault."""

    def __init__(self, tls=None, worker_num=2):
        listener = listen("127.0.0.1", 0)
        self.place = ("127.0.0.1", listener.getsockname()[1])
        self.notes = []
        self.faults = []
        self.registry = Registry(worker_num, 0)
        self.loop = EventLoop(1, self.faults.append)
        self.gate = Gate(self.loop, listener, TOKEN, tls, self._on_knock, self.notes.append)
        self.let_in = []
        self._dialled = []

    def _on_knock(self, stranger, request):
        try:
            self.registry.add(id(stranger), request)
        except Refused as error:
            self.gate.refuse(stranger, str(error))
            return
        self.let_in.append(stranger.connection)
        stranger.accept(SILENCE_S)

    def __enter__(self):
        self.loop.start()
        self.gate.open()
        return self

    def __exit__(self, _, __, ___):
        self.gate.close()
        self.loop.close(time.monotonic() + 5)
        for connection in (*self.let_in, *self._dialled):
            connection.close()
        assert not self.faults, self.faults

    def dial(self, node_rank, tls=None, token=TOKEN):
        """Return the connection of a host that was let in."""
        connection, silence_s = dial_as(host_request(node_rank), self.place, tls, token)
        assert silence_s == SILENCE_S
        self._dialled.append(connection)
        return connection

    def refusal(self, node_rank, tls=None, token=TOKEN):
        """Return why a host cannot take part; the last note says it for the other side."""
        count = len(self.notes)
        try:
            self.dial(node_rank, tls, token)
        except ClusterError as error:
            wait_until(lambda: len(self.notes) > count, "the other side notes it")
            return str(error)
        raise AssertionError("it was let in")

    def let_in_both(self, tls=None):
        """Prove that the job goes on: its two hosts come in."""
        for node_rank in range(2):
            self.dial(node_rank, tls)
        assert self.registry.is_complete

    def stranger(self, source="127.0.0.1"):
        return socket.create_connection(self.place, 10, (source, 0))
