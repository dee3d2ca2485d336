"""Parameter servers: frames and bodies in shared memory, pieces of tables, the service, its process, the context."""

import json
import multiprocessing
import os
import re
import secrets
import socket
import sys
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from msrun import contract
from msrun.errors import ParallelError, UsageError, WorldError
from msrun.runtime import get_ps_context, init, release, reset_ps_context, set_param_ps, set_ps_context
from msrun.server import remote
from msrun.server.__main__ import main
from msrun.server.connection import (
    DONE,
    ERROR,
    LEAST_BYTES,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    PREFIX,
    Connection,
    FrameError,
    FrameReader,
    Message,
    SharedBody,
    accept,
    encode,
    offer,
)
from msrun.server.remote import Fill, blocks, cut_rows, cut_table, make_rows, named_rows, number_rows, split_numbers
from msrun.server.serving import Service
from msrun.server.shard import describe_group, name_optimizer

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int8, torch.bool)
TENSORS = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=4)


def read(data, cuts=[], room=None):  # noqa: B006
    """Feed a reader bytes in chunks of these sizes, over and over."""
    reader, found, sizes, number = FrameReader(), [], cuts or [len(data)], 0
    reader.room = room
    while data:
        count = min(len(data), sizes[number % len(sizes)], reader.wanted.nbytes)
        reader.wanted[:count] = data[:count]
        message = reader.advance(count)
        data, number = data[count:], number + 1
        found += [message] if message is not None else []
    assert reader.wanted.nbytes == PREFIX.size, "no message is begun"
    return found


def joined(pieces):
    return b"".join(bytes(piece) for piece in pieces)


def frame(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return PREFIX.pack(MAGIC, len(text), len(body)) + text + body


@given(TENSORS, st.lists(st.integers(1, 50), max_size=5), st.integers(1, 3))
def test_messages_come_back_as_they_were_however_they_are_cut(described, cuts, times):
    tensors = [(torch.rand(shape) * 100).to(dtype) for dtype, shape in described]
    tensors.append(torch.arange(12.0).reshape(3, 4).t()[::2])  # its elements do not lie side by side
    message = Message("step", {"shard": [1, 2], "text": "ü"}, tensors)
    found = read(joined(encode(message)) * times, cuts)
    assert len(found) == times
    for one in found:
        assert (one.kind, one.fields) == ("step", message.fields)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one.tensors, tensors, strict=True))


@given(st.binary(min_size=1, max_size=200))
def test_bytes_of_strangers_are_an_error_or_no_message(data):
    reader = FrameReader()
    with suppress(FrameError):
        while data:
            count = min(len(data), reader.wanted.nbytes)
            reader.wanted[:count] = data[:count]
            assert reader.advance(count) is None
            data = data[count:]


@pytest.mark.parametrize(
    "data",
    [
        PREFIX.pack(b"GET ", 10, 10),
        PREFIX.pack(MAGIC, MAX_HEADER_BYTES + 1, 0),
        PREFIX.pack(MAGIC, 2, MAX_BODY_BYTES + 1),
        PREFIX.pack(MAGIC, 0, 0),
        frame(b"[" * 100000),
        *(
            frame({"kind": "step", "tensors": [[dtype, shape]]}, bytes(16))
            for dtype, shape in [("float32", s) for s in ([8], [-4, -1], [1.0], [True], [1 << 60])] + [("object", [1])]
        ),
        frame({"kind": 3, "tensors": []}),
    ],
)
def test_wrong_frames_are_refused_before_memory_is_taken_for_them(data):
    with pytest.raises(FrameError):
        read(data, [])


def test_what_is_too_long_is_not_sent():
    with pytest.raises(FrameError, match="bytes of header"):
        encode(Message("put", {"text": "x" * MAX_HEADER_BYTES}))
    with pytest.raises(FrameError, match="complex64 cannot be sent"):
        encode(Message("put", {}, [torch.zeros(2, dtype=torch.complex64)]))


@given(st.integers(1, 60), st.integers(1, 5), st.data())
def test_rows_are_found_by_their_numbers_in_the_whole(rows, servers, data):
    whole = torch.arange(rows) * 10
    names = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), unique=True)), dtype=torch.int64)
    begin = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(begin, rows))
    wide = [rows, remote.SMALL_BYTES]  # too large for one server
    for cut in (cut_table(rows, servers), cut_rows(wide, torch.float64, servers, 0)):
        assert sorted(row for piece in cut for row in piece.rows) == list(range(rows))
        assert {piece.server for piece in cut} == set(range(min(servers, rows)))
        numbers = number_rows(cut, names).sort().values
        assert torch.equal(named_rows(cut, numbers).sort().values, names.sort().values)
        found, inside = torch.zeros_like(names), []
        for piece, part, own_numbers in split_numbers(cut, numbers):
            own = piece.of(whole)
            assert len(own) == len(piece.rows)
            found[part] = own[own_numbers]
            inside += [piece.rows[number] for number in piece.overlap(begin, end)]
        assert torch.equal(found, named_rows(cut, numbers) * 10)
        assert sorted(inside) == list(range(begin, end))


def test_two_requests_and_a_reply_have_places_of_their_own():
    descriptor, size, fields = offer(3 * LEAST_BYTES)
    server = accept(fields)
    worker = SharedBody(descriptor, size)  # which closes the descriptor
    given = [[torch.arange(5), torch.full((3, 4), float(number))] for number in range(3)]
    messages = []
    for tensors in given[:2]:
        pieces = encode(Message("step", {"x": 1}, tensors), worker.requests, worker.next_request())
        assert len(pieces) == 1, "nothing but the header travels"
        messages += read(joined(pieces), [1], server.requests)
    messages += read(joined(encode(Message("done", {}, given[2]), server.reply)), [1], worker.reply)
    for message, tensors in zip(messages, given, strict=True):
        assert message.is_lent
        assert "shared" not in message.fields
        assert all(torch.equal(one, other) for one, other in zip(message.tensors, tensors, strict=True))
    made = server.reply[:80].view(torch.float64).fill_(2.0)
    encode(Message("done", {}, [made]), server.reply)
    assert server.reply[:80].view(torch.float64).tolist() == [2.0] * 10, "what was made in its place is not copied"


@pytest.mark.parametrize("shared", [[0, 17], [64, 16], [-16, 16], [0], "0", [0, 16, 0], [0.0, 16]])
def test_places_outside_the_memory_are_refused(shared):
    room = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(FrameError, match=r"shared|its tensors have"):
        read(joined(encode(Message("step", {"shared": shared}, ()))), [1], room)
    with pytest.raises(FrameError, match="shared"):
        read(joined(encode(Message("step", {}, [torch.ones(4)]), room)), [1])


def test_memory_of_others_and_of_other_sizes_is_refused():
    descriptor, _, fields = offer(LEAST_BYTES)
    host, pid, number, secret = fields["where"]
    for where, text in (
        ([["other", "pid:[1]"], pid, number, secret], "another machine"),
        ([host, pid, number, "0" * 32], "other memory than was said"),
        ([host, pid, 1 << 20, secret], "No such file"),
    ):
        with pytest.raises(RuntimeError, match=text):
            accept({**fields, "where": where})
    with pytest.raises(ValueError, match="mmap length is greater"):
        accept({**fields, "size": fields["size"] * 2})
    with pytest.raises(ValueError, match="0 bytes"):
        accept({**fields, "size": 0})
    os.close(descriptor)


KEY = [0, 0]
DEADLINE_S = 60.0
CREATE = {"shard": KEY, "label": "w", "shape": [2, 2], "dtype": "float32", "staleness": 0}


class Asked:
    """A service with two workers, and what it has answered."""

    def __init__(self, staleness=0):
        self.replies: list[tuple[int, Message]] = []
        self.service = Service(2, lambda rank, message: self.replies.append((rank, message)))
        created = {"label": "w", "shape": [4, 2], "dtype": "float64", "staleness": staleness, "shard": KEY}
        for rank in (0, 1):
            assert self.ask(rank, "create", created).kind == DONE
        self.ask(0, "put", {"shard": KEY, "field": "value", "begin": 0}, torch.ones(4, 2, dtype=torch.float64))
        self.ask(0, "filled", {"shard": KEY})
        for rank in (0, 1):
            self.ask(rank, "configure", {"shard": KEY, "optimizer": "SGD", "group": {"lr": 1.0}})

    def ask(self, rank, kind, fields, *tensors, is_lent=False):
        """Return the reply; None when there is none yet."""
        self.replies.clear()
        self.service.handle(rank, Message(kind, fields, tensors, is_lent))
        return next((message for other, message in self.replies if other == rank), None)

    def push(self, rank, gradient, *, is_lent=False):
        """Send a gradient without asking for new values."""
        fields = {"pushes": [[KEY, "dense", 0]], "groups": [{"lr": 0.5}], "pulls": []}
        return self.ask(rank, "step", fields, gradient, is_lent=is_lent)

    def step(self, rank, gradient, how="dense", *rows):
        pushes = [[KEY, "none" if gradient is None else how, 0]]
        fields = {"pushes": pushes, "groups": [{"lr": 0.5}], "pulls": [KEY]}
        return self.ask(rank, "step", fields, *rows, *([] if gradient is None else [gradient]))


def gradient(value, rows=4):
    return torch.full((rows, 2), value, dtype=torch.float64)


def test_rows_and_missing_gradients_count_as_zero_elsewhere():
    asked = Asked()
    asked.step(0, None)
    reply = asked.step(1, gradient(4.0, 2), "rows", torch.tensor([3, 1]))
    assert reply.tensors[0][:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_gradient_that_waits_for_others_is_kept_when_its_memory_is_written_again():
    asked = Asked()
    lent = gradient(1.0)
    assert asked.push(0, lent, is_lent=True).kind == DONE
    lent.fill_(100.0)
    asked.push(1, gradient(3.0))
    assert torch.equal(asked.ask(0, "rows", {"shard": KEY}, torch.tensor([2])).tensors[0], gradient(0.0, 1))


def test_step_that_fails_is_told_to_whoever_reads_next():
    asked = Asked()
    asked.service._shards[0, 0]._optimizer.step = None
    assert asked.push(0, gradient(1.0)).kind == DONE
    assert asked.push(1, gradient(1.0)).kind == DONE, "one answer to one request"
    reply = asked.ask(1, "rows", {"shard": KEY}, torch.tensor([2]))
    assert reply.kind == ERROR
    assert "w: its step failed: TypeError" in reply.fields["text"]


def test_who_waits_for_a_worker_that_has_left_is_told():
    asked = Asked()
    assert asked.step(0, gradient(1.0)) is None
    asked.service.leave(1)
    (rank, reply) = asked.replies[-1]
    assert (rank, reply.kind) == (0, ERROR)
    assert reply.fields["text"] == "w: rank 1 has left without its next gradient"


@pytest.mark.parametrize(
    ("kind", "fields", "tensors", "words"),
    [
        ("eval", {}, (), "no such request: eval"),
        ("rows", {"shard": [7, 0]}, (torch.tensor([0]),), "parameter 7, piece 0: not here"),
        ("rows", {"shard": KEY}, (torch.tensor([4]),), "w: rows that a piece of 4 rows does not have"),
        ("rows", {"shard": KEY}, (torch.tensor([-1]),), "w: rows that a piece of 4 rows does not have"),
        ("rows", {}, (), "rows: KeyError: 'shard'"),
        ("configure", {"shard": KEY, "optimizer": "Adam", "group": {}}, (), "one worker trains it with SGD, another"),
        ("put", {"shard": KEY, "field": "value", "begin": 2}, (gradient(0.0),), "w: (4, 2) written to (2, 2) of value"),
        ("read", {"shard": KEY, "field": "exp_avg", "begin": 0, "end": 1}, (), "there is no exp_avg in the state"),
        ("create", CREATE | {"label": "v", "shape": [3], "shard": KEY}, (), "in the same order"),
    ],
)
def test_wrong_requests_are_answered_in_words(kind, fields, tensors, words):
    asked = Asked()
    reply = asked.ask(1, kind, fields, *tensors)
    assert reply.kind == ERROR
    assert words in reply.fields["text"]
    assert "a gradient of shape (3, 2)" in asked.step(0, gradient(1.0, 3)).fields["text"]


def test_optimizers_are_named_by_what_their_step_does():
    class Renamed(torch.optim.AdamW):
        pass

    class Changed(torch.optim.SGD):
        def step(self, closure=None):
            return None

    weight = [torch.nn.Parameter(torch.zeros(2))]
    assert name_optimizer(Renamed(weight)) == "AdamW"
    assert name_optimizer(torch.optim.Adam(weight)) == "Adam"
    with pytest.raises(ParallelError, match="Changed cannot step parameters on servers"):
        name_optimizer(Changed(weight))
    group = {"params": weight, "lr": torch.tensor(0.5), "betas": (0.9, 0.99), "foreach": None}
    assert describe_group(group) == {"lr": 0.5, "betas": (0.9, 0.99), "foreach": None}
    with pytest.raises(ParallelError, match="setting filter is a function"):
        describe_group({"params": weight, "filter": lambda: 1})


def serve(env, said):
    """Be a server, which tells a pipe what it prints."""
    os.environ |= env
    sys.stdout = os.fdopen(os.dup(said.fileno()), "w", buffering=1)
    main()


@pytest.fixture
def served(tmp_path):
    """A running server, which was forked: torch is there already; connects to it as a worker."""
    token = secrets.token_hex(32)
    env = {
        contract.MSRUN_SERVER_TOKEN: token,
        contract.MSRUN_RENDEZVOUS: f"file://{tmp_path}/store",
        contract.MS_NODE_ID: "server_0",
        contract.MSRUN_SERVER_ADDRESS: "127.0.0.1",
        contract.MS_WORKER_NUM: "2",
    }
    (hears, says), context = multiprocessing.Pipe(duplex=False), multiprocessing.get_context("fork")
    process = context.Process(target=serve, args=(env, says))
    process.start()
    says.close()
    with os.fdopen(os.dup(hears.fileno())) as lines:
        match = re.search(r"listens on (\S+):(\d+)", lines.readline())
    assert match is not None
    address, port = match[1], int(match[2])

    def connect(rank, index=0, said=b""):
        return Connection(index, address, port, said or bytes.fromhex(token), rank)

    yield connect
    process.terminate()
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    process.close()
    said = os.read(hears.fileno(), 1 << 16).decode()
    assert said.count("refused a connection: a worker without the token of this job") == 1
    assert re.search(r"^server 0 ends: 1 pieces of \d+ bytes, \d+ steps$", said, re.MULTILINE), said
    hears.close()


def ask(connection, message):
    connection.send(message)
    return connection.receive()


def test_workers_are_served_whatever_others_say(served):
    first = served(0)
    silent = socket.create_connection(first._stream.getpeername())
    assert ask(first, Message("create", CREATE)).kind == "done"
    for rank, index, token, words in (
        (1, 0, secrets.token_bytes(32), "closed the connection"),
        (0, 0, b"", "closed the connection"),
        (2, 0, b"", "closed the connection"),
        (1, 1, b"", "it does not know the token of this job"),
    ):
        with pytest.raises(WorldError, match=words):
            served(rank, index, token)
    too_long = PREFIX.pack(MAGIC, 16, MAX_BODY_BYTES + 1)
    lies = joined(encode(Message("put", {}, [torch.zeros(4)])))[:-8] + b"\0" * 64
    for said in (too_long, b"\xff" * 64, lies):
        wrong = served(1)
        wrong._stream.sendall(said)
        with pytest.raises(WorldError, match=r"parameter server 0 at 127\.0\.0\.1:\d+ is lost"):
            while True:  # what was well formed before it is answered
                wrong.receive()
        wrong.close()
    second = served(1)
    for connection in (first, second):
        assert ask(connection, Message("create", CREATE)).kind == "done"
    values = torch.arange(4.0).reshape(2, 2)
    assert ask(first, Message("put", {"shard": [0, 0], "field": "value", "begin": 0}, [values])).kind == "done"
    assert ask(first, Message("filled", {"shard": [0, 0]})).kind == "done"
    reply = ask(second, Message("rows", {"shard": [0, 0]}, [torch.tensor([1])]))
    assert torch.equal(reply.tensors[0], values[1:])
    for connection in (first, second, silent):
        connection.close()


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch):
    for name in (contract.MSRUN_SERVER_TOKEN, contract.MS_SERVER_NUM):
        monkeypatch.delenv(name, raising=False)
    yield
    reset_ps_context()
    release()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"enable_ps": 1}, "enable_ps=1): must be True or False"),
        ({"staleness": -1}, "staleness=-1): must be a whole number, 0 or more"),
        ({"stalenes": 1}, "did you mean staleness"),
        ({"enable_ssl": True}, "leave it out; connections to parameter servers are not encrypted"),
    ],
)
def test_wrong_words_are_refused(words, said):
    with pytest.raises(UsageError) as caught:
        set_ps_context(**words)
    assert said in str(caught.value)


def test_what_is_missing_is_named_one_after_the_other():
    layer = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"before init\(\): call init\(\) first"):
        set_param_ps(layer)
    init()
    with pytest.raises(UsageError, match=r"without set_ps_context\(enable_ps=True\)"):
        set_param_ps(layer)
    set_ps_context(enable_ps=True)
    with pytest.raises(UsageError, match="in a job without parameter servers: start it with msrun --server_num"):
        set_param_ps(layer)
    set_ps_context(staleness=2)
    assert (get_ps_context("enable_ps"), get_ps_context("staleness")) == (True, 2)
    reset_ps_context()
    assert (get_ps_context("enable_ps"), get_ps_context("staleness")) == (False, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("kind", "args"), [("normal_", [0.5, 2.0]), ("uniform_", [-0.1, 0.3])])
@pytest.mark.parametrize(("rows", "width"), [(101, 7), (5, 3), (2, 5), (64, 8), (33, 1)])
def test_blocks_have_the_bits_of_the_whole(monkeypatch, kind, args, rows, width, dtype):
    monkeypatch.setattr(remote, "BLOCK", 32)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    whole = getattr(torch.empty(rows, width, dtype=dtype), kind)(*args)
    after = torch.get_rng_state()
    for servers in (1, 3):
        found = torch.empty_like(whole)
        for piece in cut_table(rows, servers):
            part, end = torch.empty(len(piece.rows), width, dtype=dtype), state
            for first, last in blocks(Fill(kind, args, 0, rows, state), width):
                end = make_rows(part, piece, Fill(kind, args, first, last, end), rows)
            piece.of(found).copy_(part)
            assert torch.equal(end, after)
        assert torch.equal(found, whole)
