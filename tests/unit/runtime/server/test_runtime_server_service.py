"""What a parameter server answers, without sockets: steps when all gradients have come, errors in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from msrun.errors import ParallelError
from msrun.runtime.server.frames import DONE, ERROR, Message
from msrun.runtime.server.meeting import (
    NotProved,
    build_answer,
    build_claim,
    check_answer,
    check_claim,
    new_nonce,
)
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
