"""What a parameter server does for its workers: requests in, replies out, some of them when other workers have come.

    create {shard, label, shape, dtype, staleness}             every worker, first of all
    put {shard, field, begin} [values]                         rows of the values or of the optimizer's state
    make {shard, piece, fill, rows} [generator's state]        -> [its state]   a block of a table's first values
    filled {shard}                                             all values are there
    configure {shard, optimizer, group}                        every worker, before its first gradient
    numbers {shard, numbers, names} [tensors]                  of the optimizer's state
    step {pushes: [[shard, how, group]], groups, pulls: [shard]} [gradients]   -> [values of the shards pulled]
    rows {shard} [row numbers]                                 -> {version} [values]
    read {shard, field, begin, end}                            -> [values]
    state {shard}                                              -> {shaped, dtypes, numbers, names} [tensors]

A shard is [parameter, piece], two numbers. `how` is none, dense, rows or sparse; the last two bring row numbers, too.
A reply is `done`, or `error` {text}. A worker sends its next request when it has the reply.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from msrun.errors import MsrunError, ParallelError
from msrun.runtime.server.first_values import Fill, make_rows
from msrun.runtime.server.frames import DONE, ERROR, Message
from msrun.runtime.server.pieces import Piece
from msrun.runtime.server.shard import Gradient, Shard

Reply = TypeVar("Reply", bound=Message | None)


@dataclass(frozen=True)
class _Waiting:
    """A worker that waits for values."""

    rank: int
    shards: Sequence[Shard]
    reply: Callable[[], Message]
    staleness: int | None

    def answer(self) -> Message:
        for shard in self.shards:
            shard.check_steps()
        return self.reply()

    @property
    def is_over(self) -> bool:
        return all(shard.is_ready(self.rank, staleness=self.staleness) for shard in self.shards)


class Service:
    """The shards of one server. Owned by its event loop; opens nothing."""

    def __init__(
        self,
        workers: int,
        send: Callable[[int, Message], None],
        find_room: Callable[[int, int], Tensor | None] = lambda _rank, _size: None,
    ) -> None:
        """
        Args:
            send: takes the reply to a rank.
            find_room: gives memory that a rank sees, for a reply of so many bytes to it; None: it has none.
        """
        self._find_room = find_room
        self._workers = workers
        self._send = send
        self._shards: dict[tuple[int, int], Shard] = {}
        self._waiting: list[_Waiting] = []
        self._gone: set[int] = set()

    def handle(self, rank: int, message: Message) -> None:
        """Do what a worker asks for; it gets its reply now or later."""
        known = {
            "create": self._create,
            "put": self._put,
            "make": self._make,
            "filled": self._fill,
            "configure": self._configure,
            "numbers": self._set_numbers,
            "step": self._step,
            "rows": self._rows,
            "read": self._read,
            "state": self._state,
        }
        ask = known.get(message.kind, _refuse)
        reply = _answer(message.kind, lambda: ask(rank, message))
        if reply is not None:
            self._send(rank, reply)
        self._look()

    def come(self, rank: int) -> None:
        """Note that a worker has come, which may have left before."""
        self._gone.discard(rank)

    def leave(self, rank: int) -> None:
        """Note that a worker has gone, and tell those that wait for it."""
        self._gone.add(rank)
        self._waiting = [waiting for waiting in self._waiting if waiting.rank != rank]
        self._look()

    def describe(self) -> str:
        """Return what the server has done, in words."""
        size = sum(shard.values.nbytes for shard in self._shards.values())
        steps = max((shard.version for shard in self._shards.values()), default=0)
        return f"{len(self._shards)} pieces of {size} bytes, {steps} steps"

    # -- waiting --------------------------------------------------------------------------------------------------

    def _later(
        self, rank: int, shards: Sequence[Shard], reply: Callable[[], Message], staleness: int | None = None
    ) -> None:
        self._waiting.append(_Waiting(rank, shards, reply, staleness))

    def _look(self) -> None:
        """Answer those who need not wait any more, or wait in vain."""
        still = []
        for waiting in self._waiting:
            missing = {other for shard in waiting.shards for other in shard.waits_for(waiting.rank)} & self._gone
            if waiting.is_over:
                self._send(waiting.rank, _answer("reply", waiting.answer))
            elif missing:
                shard = next(shard for shard in waiting.shards if shard.waits_for(waiting.rank) & missing)
                self._send(
                    waiting.rank, _error(f"{shard.label}: rank {min(missing)} has left without its next gradient")
                )
            else:
                still.append(waiting)
        self._waiting = still

    # -- requests -------------------------------------------------------------------------------------------------

    def _find(self, key: Sequence[int]) -> Shard:
        shard = self._shards.get((key[0], key[1]))
        if shard is None:
            raise ParallelError(f"parameter {key[0]}, piece {key[1]}: not here")
        return shard

    def _create(self, _rank: int, message: Message) -> Message:
        fields = message.fields
        key = (fields["shard"][0], fields["shard"][1])
        shape, dtype = tuple(fields["shape"]), getattr(torch, fields["dtype"])
        if key not in self._shards:
            self._shards[key] = Shard(fields["label"], shape, dtype, self._workers, fields["staleness"])
        shard = self._shards[key]
        if (tuple(shard.values.shape), shard.values.dtype, shard.staleness) != (shape, dtype, fields["staleness"]):
            raise ParallelError(
                f"{fields['label']}: the ranks put other parameters on the servers, or give another staleness: call "
                "set_param_ps for the same modules in the same order on every rank"
            )
        return Message(DONE)

    def _put(self, _rank: int, message: Message) -> Message:
        self._find(message.fields["shard"]).write(message.fields["field"], message.fields["begin"], message.tensors[0])
        return Message(DONE)

    def _make(self, _rank: int, message: Message) -> Message:
        fields, (state,) = message.fields, message.tensors
        values = self._find(fields["shard"]).values.detach()
        kind, args, first, last = fields["fill"]
        fill = Fill(kind, args, first, last, state)
        return Message(DONE, {}, [make_rows(values, Piece(0, 0, *fields["piece"]), fill, fields["rows"])])

    def _fill(self, _rank: int, message: Message) -> Message:
        self._find(message.fields["shard"]).is_filled = True
        return Message(DONE)

    def _configure(self, _rank: int, message: Message) -> Message:
        self._find(message.fields["shard"]).configure(message.fields["optimizer"], message.fields["group"])
        return Message(DONE)

    def _set_numbers(self, _rank: int, message: Message) -> Message:
        tensors = {name: value.clone() for name, value in zip(message.fields["names"], message.tensors, strict=True)}
        self._find(message.fields["shard"]).set_numbers({**message.fields["numbers"], **tensors})
        return Message(DONE)

    def _step(self, rank: int, message: Message) -> Message | None:
        tensors = iter(message.tensors)
        groups = message.fields["groups"]
        for key, how, group in message.fields["pushes"]:
            gradient = _gradient(how, tensors, is_lent=message.is_lent)
            self._find(key).push(rank, gradient, groups[group])
        pulled = [self._find(key) for key in message.fields["pulls"]]
        if not pulled:  # the worker goes on beside the step
            self._send(rank, Message(DONE))
        for key, _, _ in message.fields["pushes"]:
            self._find(key).advance(rank)
        if pulled:
            self._later(rank, pulled, lambda: Message(DONE, {}, [shard.read_all() for shard in pulled]))
        return None

    def _rows(self, rank: int, message: Message) -> Message | None:
        shard = self._find(message.fields["shard"])

        def reply() -> Message:
            find_room = functools.partial(self._find_room, rank)
            return Message(DONE, {"version": shard.version}, [shard.read_rows(message.tensors[0], find_room)])

        self._later(rank, [shard], reply)
        return None

    def _read(self, rank: int, message: Message) -> Message | None:
        shard, fields = self._find(message.fields["shard"]), message.fields

        def reply() -> Message:
            return Message(DONE, {}, [shard.read(fields["field"], fields["begin"], fields["end"])])

        self._later(rank, [shard], reply, staleness=0)
        return None

    def _state(self, rank: int, message: Message) -> Message | None:
        shard = self._find(message.fields["shard"])

        def reply() -> Message:
            numbers, tensors = shard.describe_state()
            small = {key: value for key, value in numbers.items() if isinstance(value, Tensor)}
            fields = {
                "shaped": list(tensors),
                "dtypes": [str(value.dtype).removeprefix("torch.") for value in tensors.values()],
                "numbers": {key: value for key, value in numbers.items() if key not in small},
                "names": list(small),
            }
            return Message(DONE, fields, list(small.values()))

        self._later(rank, [shard], reply, staleness=0)
        return None


def _gradient(how: str, tensors: Any, *, is_lent: bool) -> Gradient | None:
    if how == "none":
        return None
    rows = next(tensors) if how in ("rows", "sparse") else None
    return Gradient(next(tensors), rows, is_sparse=how == "sparse", is_lent=is_lent)


def _answer(kind: str, work: Callable[[], Reply]) -> Reply | Message:
    """Return the reply, or an error in words: a wrong request is its worker's failure, not the server's end."""
    try:
        return work()
    except MsrunError as error:
        return _error(str(error))
    except Exception as error:  # noqa: BLE001 - whatever it was
        return _error(f"{kind}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _refuse(_rank: int, message: Message) -> Message:
    raise ParallelError(f"no such request: {message.kind}")


def _error(text: str) -> Message:
    return Message(ERROR, {"text": text})
