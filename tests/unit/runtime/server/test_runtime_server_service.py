"""A parameter server: its service, its process, the context, and first values of tables."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from msrun import contract
from msrun.errors import ParallelError, UsageError, WorldError
from msrun.runtime import get_ps_context, init, release, reset_ps_context, set_param_ps, set_ps_context
from msrun.runtime.server import remote
from msrun.runtime.server.connection import Connection
from msrun.runtime.server.frames import DONE, ERROR, MAGIC, MAX_BODY_BYTES, PREFIX, Message, encode
from msrun.runtime.server.meeting import NotProved, build_answer, build_claim, check_answer, check_claim, new_nonce
from msrun.runtime.server.remote import Fill, blocks, cut_table, make_rows
from msrun.runtime.server.serving import Service
from msrun.runtime.server.shard import describe_group, name_optimizer

KEY = [0, 0]


class Asked:
    """A service with two workers, and what it has answered."""

    def __init__(self, staleness: int = 0) -> None:
        self.replies: list[tuple[int, Message]] = []
        self.service = Service(2, lambda rank, message: self.replies.append((rank, message)))
        self.created = {"label": "w", "shape": [4, 2], "dtype": "float64", "staleness": staleness, "shard": KEY}
        for rank in (0, 1):
            assert self.ask(rank, "create", self.created).kind == DONE
        self.ask(0, "put", {"shard": KEY, "field": "value", "begin": 0}, torch.ones(4, 2, dtype=torch.float64))
        self.ask(0, "filled", {"shard": KEY})
        for rank in (0, 1):
            self.ask(rank, "configure", {"shard": KEY, "optimizer": "SGD", "group": {"lr": 1.0}})

    def ask(self, rank: int, kind: str, fields: dict[str, Any], *tensors: Tensor) -> Any:
        """Return the reply; None when there is none yet."""
        self.replies.clear()
        self.service.handle(rank, Message(kind, fields, tensors))
        return next((message for other, message in self.replies if other == rank), None)

    def step(self, rank: int, gradient: Tensor | None, how: str = "dense", *rows: Tensor) -> Any:
        pushes = [[KEY, "none" if gradient is None else how, 0]]
        fields = {"pushes": pushes, "groups": [{"lr": 0.5}], "pulls": [KEY]}
        return self.ask(rank, "step", fields, *rows, *([] if gradient is None else [gradient]))


def gradient(value: float, rows: int = 4) -> Tensor:
    return torch.full((rows, 2), value, dtype=torch.float64)


def test_step_is_made_with_the_mean_when_the_last_gradient_comes() -> None:
    asked = Asked()
    assert asked.step(0, gradient(1.0)) is None
    reply = asked.step(1, gradient(3.0))
    assert {rank for rank, _ in asked.replies} == {0, 1}
    assert torch.equal(reply.tensors[0], gradient(1.0 - 0.5 * 2.0))


def test_rows_and_missing_gradients_count_as_zero_elsewhere() -> None:
    asked = Asked()
    asked.step(0, None)
    reply = asked.step(1, gradient(4.0, 2), "rows", torch.tensor([3, 1]))
    assert reply.tensors[0][:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]


def push(asked: Asked, rank: int, gradient: Tensor, *, is_lent: bool = False) -> Message:
    """Send a gradient without asking for new values."""
    asked.replies.clear()
    fields = {"pushes": [[KEY, "dense", 0]], "groups": [{"lr": 0.5}], "pulls": []}
    asked.service.handle(rank, Message("step", fields, [gradient], is_lent))
    ((_, reply),) = asked.replies
    return reply


def test_gradient_that_waits_for_others_is_kept_when_its_memory_is_written_again() -> None:
    asked = Asked()
    lent = gradient(1.0)
    assert push(asked, 0, lent, is_lent=True).kind == DONE
    lent.fill_(100.0)
    push(asked, 1, gradient(3.0))
    assert torch.equal(asked.ask(0, "rows", {"shard": KEY}, torch.tensor([2])).tensors[0], gradient(0.0, 1))


def test_step_that_fails_is_told_to_whoever_reads_next() -> None:
    asked = Asked()
    asked.service._shards[0, 0]._optimizer.step = None  # type: ignore[union-attr, assignment]
    assert push(asked, 0, gradient(1.0)).kind == DONE
    assert push(asked, 1, gradient(1.0)).kind == DONE, "one answer to one request"
    reply = asked.ask(1, "rows", {"shard": KEY}, torch.tensor([2]))
    assert reply.kind == ERROR
    assert "w: its step failed: TypeError" in reply.fields["text"]


def test_stale_worker_is_answered_until_it_is_too_far_ahead() -> None:
    asked = Asked(staleness=2)
    assert asked.step(0, gradient(1.0)).kind == DONE
    assert asked.step(0, gradient(1.0)).kind == DONE
    assert asked.step(0, gradient(1.0)) is None
    asked.step(1, gradient(1.0))
    assert 0 in {rank for rank, _ in asked.replies}


def test_who_waits_for_a_worker_that_has_left_is_told() -> None:
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
        (
            "configure",
            {"shard": KEY, "optimizer": "Adam", "group": {}},
            (),
            "w: one worker trains it with SGD, another",
        ),
        ("put", {"shard": KEY, "field": "value", "begin": 2}, (gradient(0.0),), "w: (4, 2) written to (2, 2) of value"),
        ("read", {"shard": KEY, "field": "exp_avg", "begin": 0, "end": 1}, (), "there is no exp_avg in the state"),
        (
            "create",
            {"label": "v", "shape": [3], "dtype": "float32", "staleness": 0, "shard": KEY},
            (),
            "in the same order",
        ),
    ],
)
def test_wrong_requests_are_answered_in_words(
    kind: str, fields: dict[str, Any], tensors: tuple[Tensor, ...], words: str
) -> None:
    reply = Asked().ask(1, kind, fields, *tensors)
    assert reply.kind == ERROR
    assert words in reply.fields["text"]


def test_gradient_of_another_shape_is_refused() -> None:
    assert "a gradient of shape (3, 2)" in Asked().step(0, gradient(1.0, 3)).fields["text"]


def test_both_sides_prove_that_they_know_the_token() -> None:
    theirs, own = new_nonce(), new_nonce()
    claim = build_claim(b"token", theirs, own, 5)
    assert check_claim(b"token", theirs, claim) == (5, own)
    check_answer(b"token", theirs, own, 2, build_answer(b"token", theirs, own, 2))
    for token, nonce, said in (
        (b"other", theirs, claim),
        (b"token", new_nonce(), claim),
        (b"token", theirs, own + claim[32:36] + own),
    ):
        with pytest.raises(NotProved):
            check_claim(token, nonce, said)
    for answer in (build_answer(b"other", theirs, own, 2), build_answer(b"token", theirs, own, 1), claim[-32:]):
        with pytest.raises(NotProved):
            check_answer(b"token", theirs, own, 2, answer)


def test_optimizers_are_named_by_what_their_step_does() -> None:
    class Renamed(torch.optim.AdamW):
        pass

    class Changed(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
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


DEADLINE_S = 60.0
CREATE = {"shard": [0, 0], "label": "w", "shape": [2, 2], "dtype": "float32", "staleness": 0}


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    token: bytes
    address: str
    port: int

    def connect(self, rank: int, index: int = 0, token: bytes = b"") -> Connection:
        """Connect as a worker."""
        return Connection(index, self.address, self.port, token or self.token, rank)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    token = secrets.token_hex(32)
    env = {
        **os.environ,
        contract.MSRUN_SERVER_TOKEN: token,
        contract.MSRUN_RENDEZVOUS: f"file://{tmp_path}/store",
        contract.MS_NODE_ID: "server_0",
        contract.MSRUN_SERVER_ADDRESS: "127.0.0.1",
        contract.MS_WORKER_NUM: "2",
    }
    command = [sys.executable, "-m", "msrun.runtime.server"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    match = re.search(r"listens on (\S+):(\d+)", process.stdout.readline())
    assert match is not None
    yield Served(process, bytes.fromhex(token), match[1], int(match[2]))
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    process.stdout.close()


def ask(connection: Connection, message: Message) -> Message:
    connection.send(message)
    return connection.receive()


def test_workers_are_served_whatever_others_say(served: Served) -> None:
    first = served.connect(0)
    assert ask(first, Message("create", CREATE)).kind == "done"
    for rank, index, token, words in (
        (1, 0, secrets.token_bytes(32), "closed the connection"),
        (0, 0, b"", "closed the connection"),
        (2, 0, b"", "closed the connection"),
        (1, 1, b"", "it does not know the token of this job"),
    ):
        with pytest.raises(WorldError, match=words):
            served.connect(rank, index, token)
    too_long = PREFIX.pack(MAGIC, 16, MAX_BODY_BYTES + 1)
    lies = b"".join(bytes(piece) for piece in encode(Message("put", {}, [torch.zeros(4)])))[:-8] + b"\0" * 64
    for said in (too_long, b"\xff" * 64, lies):
        wrong = served.connect(1)
        wrong._stream.sendall(said)
        with pytest.raises(WorldError, match=r"parameter server 0 at 127\.0\.0\.1:\d+ is lost"):
            while True:  # what was well formed before it is answered
                wrong.receive()
        wrong.close()
    second = served.connect(1)
    for connection in (first, second):
        assert ask(connection, Message("create", CREATE)).kind == "done"
    values = torch.arange(4.0).reshape(2, 2)
    assert ask(first, Message("put", {"shard": [0, 0], "field": "value", "begin": 0}, [values])).kind == "done"
    assert ask(first, Message("filled", {"shard": [0, 0]})).kind == "done"
    reply = ask(second, Message("rows", {"shard": [0, 0]}, [torch.tensor([1])]))
    assert torch.equal(reply.tensors[0], values[1:])
    for connection in (first, second):
        connection.close()


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (contract.MSRUN_SERVER_TOKEN, contract.MS_SERVER_NUM):
        monkeypatch.delenv(name, raising=False)
    yield
    reset_ps_context()
    release()


def test_context_keeps_what_was_set_until_it_is_reset() -> None:
    set_ps_context(enable_ps=True, staleness=2)
    assert (get_ps_context("enable_ps"), get_ps_context("staleness")) == (True, 2)
    reset_ps_context()
    assert (get_ps_context("enable_ps"), get_ps_context("staleness")) == (False, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"enable_ps": 1}, "enable_ps=1): must be True or False"),
        ({"staleness": -1}, "staleness=-1): must be a whole number, 0 or more"),
        ({"stalenes": 1}, "did you mean staleness"),
        ({"enable_ssl": True}, "leave it out; connections to parameter servers are not encrypted"),
    ],
)
def test_wrong_words_are_refused(words: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        set_ps_context(**words)
    assert said in str(caught.value)


def test_what_is_missing_is_named_one_after_the_other() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"before init\(\): call init\(\) first"):
        set_param_ps(layer)
    init()
    with pytest.raises(UsageError, match=r"without set_ps_context\(enable_ps=True\)"):
        set_param_ps(layer)
    set_ps_context(enable_ps=True)
    with pytest.raises(UsageError, match="in a job without parameter servers: start it with msrun --server_num"):
        set_param_ps(layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("kind", "args"), [("normal_", [0.5, 2.0]), ("uniform_", [-0.1, 0.3])])
@pytest.mark.parametrize(("rows", "width"), [(101, 7), (5, 3), (2, 5), (64, 8), (33, 1)])
def test_blocks_have_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, kind: str, args: list[Any], rows: int, width: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(remote, "BLOCK", 32)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    whole = getattr(torch.empty(rows, width, dtype=dtype), kind)(*args)
    after = torch.get_rng_state()
    for servers in (1, 3):
        found = torch.empty_like(whole)
        for piece in cut_table(rows, servers):
            part = torch.empty(len(piece.rows), width, dtype=dtype)
            end = make_all(part, piece, Fill(kind, args, 0, rows, state), rows)
            piece.of(found).copy_(part)
            assert torch.equal(end, after)
        assert torch.equal(found, whole)


def make_all(part: Tensor, piece: Any, fill: Fill, rows: int) -> Tensor:
    for first, last in blocks(fill, part.shape[1]):
        fill = replace(fill, generator_state=make_rows(part, piece, replace(fill, first=first, last=last), rows))
    return fill.generator_state
