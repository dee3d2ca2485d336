"""A parameter on the servers, as a worker sees it: where its pieces are, and how rows are read and written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from msrun.runtime import world
from msrun.runtime.embedding.row_cache import RowCache
from msrun.runtime.parts.on_servers import on_servers
from msrun.runtime.server.connection import ask
from msrun.runtime.server.first_values import Fill, blocks
from msrun.runtime.server.frames import Message
from msrun.runtime.server.pieces import PIECE_BYTES, VALUE, Piece, split_numbers

_numbers = itertools.count()


@dataclass
class RemoteParameter:
    """One parameter on the servers. All ranks make the same ones in the same order."""

    number: int
    """From `next_number`."""
    label: str
    """For errors."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    staleness: int
    is_table: bool
    """Its rows are looked up, and no worker has them all; others are whole on every worker, too."""
    is_sparse: bool = False
    """The optimizer gets its gradients as sparse ones, as of `nn.Embedding(sparse=True)`."""
    cache: RowCache | None = None
    """Rows of a table that this worker keeps."""
    readers: WeakSet[nn.Module] = field(default_factory=WeakSet, init=False)
    """The modules that look its rows up."""
    pushed: int = field(default=0, init=False)
    """Steps that this worker has sent."""
    _pulled: Tensor = field(default_factory=lambda: torch.empty(0), init=False, repr=False)
    """Memory for the rows that are pulled."""
    is_placed: bool = field(default=False, init=False)
    """The servers have its values."""
    optimizer: str = field(default="", init=False)
    """Name of the optimizer that steps it there; empty before the first step."""

    # -- pieces ---------------------------------------------------------------------------------------------------

    def key(self, piece: Piece) -> list[int]:
        """Return how requests name a piece."""
        return [self.number, piece.number]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row; a parameter without dimensions is one row of one."""
        return self.shape[1:]

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape with at least one dimension, as pieces are cut from it."""
        return tensor.reshape(1) if not self.shape else tensor

    def pulled_bytes(self, piece: Piece) -> int:
        """Return how much a step brings back of a piece."""
        return 0 if self.is_table else len(piece.rows) * math.prod(self.row_shape) * self.dtype.itemsize

    def _ask_each(self, kind: str, fields: dict[str, Any] | None = None) -> list[Message]:
        """Ask every piece the same, and return the replies in the order of the pieces."""
        return [
            ask({piece.server: Message(kind, {"shard": self.key(piece), **(fields or {})})})[piece.server]
            for piece in self.pieces
        ]

    # -- values and state -----------------------------------------------------------------------------------------

    def place(self, value: Tensor | None, fills: Sequence[Fill] = ()) -> None:
        """Give the servers the values of rank 0, or have them made there. Every rank calls it before anything else.

        Args:
            value: all values; None: `fills` say how the servers make them.
        """
        name = str(self.dtype).removeprefix("torch.")
        for piece in self.pieces:
            shape = [len(piece.rows), *self.row_shape]
            fields = {"shape": shape, "dtype": name, "label": self.label, "staleness": self.staleness}
            ask({piece.server: Message("create", {"shard": self.key(piece), **fields})})
        if world.get_rank() == 0:
            if value is None:
                self._make(fills)
            else:
                self.write(VALUE, 0, self.rows_of(value))
            self._ask_each("filled")
        self.is_placed = True

    def _make(self, fills: Iterable[Fill]) -> None:
        """Let all servers make the values, a block at a time: they answer others in between."""
        for fill in fills:
            for first, last in blocks(fill, self.shape[1]):
                described = [fill.kind, fill.args, first, last]
                requests = {
                    piece.server: Message(
                        "make",
                        {
                            "shard": self.key(piece),
                            "piece": [piece.start, piece.stop, piece.step],
                            "fill": described,
                            "rows": self.shape[0],
                        },
                        [fill.generator_state],
                    )
                    for piece in self.pieces
                }
                replies = ask(requests)
                fill.generator_state = replies[self.pieces[0].server].tensors[0]

    def configure(self, name: str, group: dict[str, Any]) -> None:
        """Name the optimizer that steps it. Every rank calls it before its first gradient."""
        self._ask_each("configure", {"optimizer": name, "group": group})
        self.optimizer = name

    def write(self, state: str, begin: int, values: Tensor) -> None:
        """Replace rows of the values, or of a tensor of the optimizer's state, from row `begin` of the whole on."""
        if self.cache is not None:
            self.cache.clear()
        rows = self._rows_per_message(values)
        for piece in self.pieces:
            own = piece.overlap(begin, begin + len(values))
            for first in range(own.start, own.stop, rows):
                last = min(first + rows, own.stop)
                offset = piece.start + first * piece.step - begin
                part = values[offset : offset + (last - first - 1) * piece.step + 1 : piece.step]
                fields = {"shard": self.key(piece), "field": state, "begin": first}
                ask({piece.server: Message("put", fields, [part])})

    def read(self, state: str, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return rows `begin` to `end` of the values, or of a tensor of the optimizer's state, after every step so far.

        The rows are in memory of their own.
        """
        found = torch.empty((end - begin, *self.row_shape), dtype=dtype)
        rows = self._rows_per_message(found)
        for piece in self.pieces:
            own = piece.overlap(begin, end)
            for first in range(own.start, own.stop, rows):
                last = min(first + rows, own.stop)
                offset = piece.start + first * piece.step - begin
                fields = {"shard": self.key(piece), "field": state, "begin": first, "end": last}
                part = ask({piece.server: Message("read", fields)})[piece.server].tensors[0]
                found[offset : offset + (last - first - 1) * piece.step + 1 : piece.step] = part
        return found

    def read_all(self, state: str, dtype: torch.dtype) -> Tensor:
        """Return all values, or a tensor of the optimizer's state, in the parameter's shape."""
        return self.read(state, 0, self.shape[0] if self.shape else 1, dtype).reshape(self.shape)

    def _rows_per_message(self, values: Tensor) -> int:
        return max(1, PIECE_BYTES // max(1, values[:1].nbytes))

    def describe_state(self) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
        """Return the state of the optimizer: its numbers, and the types of its tensors of the parameter's shape."""
        reply = self._ask_each("state")[0]
        numbers = {**reply.fields["numbers"], **dict(zip(reply.fields["names"], reply.tensors, strict=True))}
        dtypes = {
            key: getattr(torch, name) for key, name in zip(reply.fields["shaped"], reply.fields["dtypes"], strict=True)
        }
        return numbers, dtypes

    def write_numbers(self, numbers: dict[str, Any]) -> None:
        """Replace what of the optimizer's state has no shape, such as the count of steps."""
        small = {key: value for key, value in numbers.items() if isinstance(value, Tensor)}
        plain = {key: value for key, value in numbers.items() if key not in small}
        for piece in self.pieces:
            fields = {"shard": self.key(piece), "numbers": plain, "names": list(small)}
            ask({piece.server: Message("numbers", fields, list(small.values()))})

    def pull(self, numbers: Tensor) -> Tensor:
        """Return the values of rows, by their numbers of `number_rows`, ascending; on the device of the numbers.

        The next pull may write over them.
        """
        if self.cache is None:
            return self._pull(numbers.to("cpu"))[0].to(numbers.device)
        return self.cache.fetch(numbers.to("cpu"), self._pull, numbers.device, oldest=self.pushed - self.staleness)

    def _pull(self, numbers: Tensor) -> tuple[Tensor, int]:
        """Return values, and how many steps all of them have at least."""
        version = self.pushed
        if len(self._pulled) < numbers.numel():  # kept: new memory costs more than what is done with it
            with torch.inference_mode(mode=False):  # what is made inside it could not be changed outside
                self._pulled = torch.empty((numbers.numel(), *self.row_shape), dtype=self.dtype)
        found = self._pulled[: numbers.numel()]
        limit = self._rows_per_message(found)
        for some, values in zip(numbers.split(limit), found.split(limit), strict=True):
            wanted = {piece.server: (piece, part, own) for piece, part, own in split_numbers(self.pieces, some)}
            requests = {
                server: Message("rows", {"shard": self.key(piece)}, [own])
                for server, (piece, _, own) in wanted.items()
                if own.numel()
            }
            for server, reply in ask(requests).items():
                values[wanted[server][1]] = reply.tensors[0]
                version = min(version, reply.fields["version"])
        return found, version


def next_number() -> int:
    """Return a number that no parameter of this process had; all ranks ask for them in the same order."""
    return next(_numbers)


def note_remote(parameter: nn.Parameter, remote: RemoteParameter) -> None:
    """Remember that a parameter is on the servers."""
    on_servers[parameter] = remote


def find_remote(parameter: Tensor) -> RemoteParameter | None:
    """Return what is known of a parameter on the servers; None of others."""
    found: RemoteParameter | None = on_servers.get(parameter)
    return found


def find_remotes(parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, RemoteParameter]]:
    """Yield those of some parameters that are on the servers."""
    if len(on_servers):
        for parameter in parameters:
            remote = find_remote(parameter)
            if remote is not None:
                yield parameter, remote
