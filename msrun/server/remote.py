"""A parameter on the servers, as a worker sees it: where its pieces are, and how rows are read and written."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.embedding.lookup import EmbeddingLookup, TableFill, TableSlices, fill_part, look_up
from msrun.runtime.embedding.table_cache import RowCache
from msrun.runtime.nn.deferred_init import Entry, Reference, make_elsewhere
from msrun.runtime.parts.on_servers import VALUE
from msrun.server.connection import Message, ask

SMALL_BYTES = 1 << 16
"""A parameter of at most so much is not cut: another message costs more."""
PIECE_BYTES = 1 << 28
"""No piece of a cut parameter is larger, but for single rows; a message holds at least one."""


@dataclass(frozen=True)
class Piece:
    """The rows `range(start, stop, step)` of a parameter, on one server."""

    server: int
    number: int
    """Among the pieces of the parameter."""
    start: int
    stop: int
    step: int = 1

    @property
    def rows(self) -> range:
        """Its rows by their numbers in the whole parameter."""
        return range(self.start, self.stop, self.step)

    def of(self, whole: Tensor) -> Tensor:
        """Return its rows of a whole tensor with at least one dimension; a view."""
        return whole[self.start : self.stop : self.step]

    def overlap(self, begin: int, end: int) -> range:
        """Return its own row numbers of those in `range(begin, end)` of the whole."""
        first = max(0, -((self.start - begin) // self.step))
        last = max(first, min(len(self.rows), -((self.start - min(end, self.stop)) // self.step)))
        return range(first, last)


def cut_table(rows: int, servers: int) -> tuple[Piece, ...]:
    """Return the pieces of a table whose rows are looked up."""
    return tuple(Piece(server, server, server, rows, servers) for server in range(min(rows, servers)))


def cut_rows(shape: Sequence[int], dtype: torch.dtype, servers: int, first_server: int) -> tuple[Piece, ...]:
    """Return the pieces of a parameter that is pulled whole; one without dimensions counts as one row."""
    rows = shape[0] if shape else 1
    size = math.prod(shape) * dtype.itemsize
    wanted = 1 if size <= SMALL_BYTES else max(servers, -(-size // PIECE_BYTES))
    count = max(1, min(wanted, rows))
    bounds = [number * rows // count for number in range(count + 1)]
    return tuple(
        Piece((first_server + number) % servers, number, bounds[number], bounds[number + 1]) for number in range(count)
    )


def number_rows(pieces: Sequence[Piece], rows: Tensor) -> Tensor:
    """Return numbers that order rows of the whole by piece, and within it: what is sent to one server is a slice."""
    step = pieces[0].step
    return rows if step == 1 else rows % step * len(pieces[0].rows) + rows // step


def count_numbers(pieces: Sequence[Piece]) -> int:
    """Return what all numbers of `number_rows` are below."""
    return pieces[0].step * len(pieces[0].rows) if pieces[0].step > 1 else pieces[-1].stop


def named_rows(pieces: Sequence[Piece], numbers: Tensor) -> Tensor:
    """Return the rows of the whole that have these numbers."""
    step, size = pieces[0].step, len(pieces[0].rows)
    return numbers if step == 1 else numbers % size * step + numbers // size


def split_numbers(pieces: Sequence[Piece], numbers: Tensor) -> list[tuple[Piece, slice, Tensor]]:
    """Return for each piece which of ascending numbers are its own, and its own row numbers of them."""
    first, step = pieces[0], pieces[0].step
    starts = [piece.start if step == 1 else number * len(first.rows) for number, piece in enumerate(pieces)]
    edges = [0, *torch.searchsorted(numbers, numbers.new_tensor(starts[1:])).tolist(), len(numbers)]
    parts = [slice(begin, end) for begin, end in itertools.pairwise(edges)]
    return [(piece, part, numbers[part] - start) for piece, part, start in zip(pieces, parts, starts, strict=True)]


BLOCK = 1 << 22
"""Elements that are drawn at once."""
BY_ROW = "EmbeddingLookup"
"""Kind of the values of an EmbeddingLookup: `args` are its word or number, and the seed."""
IN_ORDER = ("normal_", "uniform_")
"""Kinds that need a generator; methods of Tensor."""
EACH = ("zero_", "fill_", "mul_", "add_", "sub_", "div_")
"""Kinds that treat every element alike; methods of Tensor."""


@dataclass
class Fill:
    """One line that gave a table values: what servers do for it, one after the other."""

    kind: str
    args: list[Any]
    first: int
    """Rows of the whole table."""
    last: int
    generator_state: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """Before the line; of a kind that needs it."""

    def use_seed(self, seed: int) -> None:
        """Take the seed of numbers by row."""
        self.args[1:] = [seed]


def divert_fills(labels: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, list[Fill]]:
    """Let deferred tables be made by the servers; returns how. All ranks call it together.

    Args:
        labels: names the tables in errors.
    """
    fills: dict[nn.Parameter, list[Fill]] = {parameter: [] for parameter in labels}
    make_elsewhere({p: functools.partial(_divert, p, label, fills[p]) for p, label in labels.items()})
    return fills


def _divert(parameter: nn.Parameter, label: str, fills: list[Fill], entry: Entry) -> Callable[[], None] | None:
    """Note what a line does to a table; returns what stands in for its random numbers."""
    (rows, width), operator = parameter.shape, entry.operator
    if isinstance(operator, TableFill):
        found = Fill(BY_ROW, [operator.init], 0, rows)
        fills.append(found)
        kind = f"param_init={operator.init if isinstance(operator.init, str) else type(operator.init).__name__}"
        if not isinstance(operator.init, str | int | float):
            raise _unknown(label, kind)
        return lambda: found.use_seed(operator.seed())
    kind = operator._schema.name.removeprefix("aten::") if hasattr(operator, "_schema") else operator.__name__
    if "empty" in kind or getattr(operator, "is_view", False):
        return None
    target, *numbers = entry.args or (None,)
    is_plain = all(isinstance(number, int | float) for number in numbers) and not any(entry.kwargs.values())
    part = _rows_of(target, width) if kind in (*IN_ORDER, *EACH) and is_plain else None
    if part is None or (kind in IN_ORDER and part != (0, rows)):
        raise _unknown(label, kind)
    fills.append(Fill(kind, numbers, *part))
    return _Skip(fills[-1], width, parameter.dtype) if kind in IN_ORDER else None


def _unknown(label: str, kind: str) -> StrategyError:
    return StrategyError(
        f"set_param_ps(init_in_server=True): {label} gets values by {kind}, which servers do not know: use nn.init's "
        "normal_, uniform_, constant_, zeros_ or ones_ of all of it, or a word of EmbeddingLookup"
    )


def _rows_of(target: Any, width: int) -> tuple[int, int] | None:
    """Return first and last row of a view of whole rows; None of others."""
    if not isinstance(target, Reference):
        return None
    strides = torch.empty(target.size, device="meta").stride()
    count = torch.Size(target.size).numel()
    if target.stride != strides or target.offset % width or count % width:
        return None
    return target.offset // width, (target.offset + count) // width


@dataclass
class _Skip:
    """What the replay of a tape calls for a line: the generator goes on as if it had drawn the table."""

    fill: Fill
    width: int
    dtype: torch.dtype

    def __call__(self) -> None:
        self.fill.generator_state = torch.get_rng_state()
        for first, last in blocks(self.fill, self.width):
            _draw(self.fill.kind, self.fill.args, (last - first, self.width), self.dtype, None)


def blocks(fill: Fill, width: int) -> Iterator[tuple[int, int]]:
    """Yield first and last row of what is drawn at once: all but the last have a multiple of 16 rows."""
    size = max(16, BLOCK // width // 16 * 16)
    count = max(1, (fill.last - fill.first) // size)
    yield from pairwise([*(fill.first + number * size for number in range(count)), fill.last])


def _draw(
    kind: str, args: list[Any], shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator | None
) -> Tensor:
    drawn: Tensor = getattr(torch.empty(shape, dtype=dtype), kind)(*args, generator=generator)
    return drawn


@torch.no_grad()
def make_rows(values: Tensor, piece: Piece, fill: Fill, rows: int) -> Tensor:
    """Give a piece its rows of those that a fill names, in place; returns the state of the generator after them.

    Args:
        values: of the piece's rows, (n, width).
        fill: of one block.
        rows: of the whole table.
    """
    own, width = piece.overlap(fill.first, fill.last), values.shape[1]
    part = values[own.start : own.stop]
    if fill.kind in EACH:
        getattr(part, fill.kind)(*fill.args)
        return fill.generator_state
    generator, shape = torch.Generator(), (fill.last - fill.first, width)
    if fill.kind == BY_ROW:
        init, seed = fill.args
        place = (slice(fill.first, fill.last), slice(0, width))
        drawn = fill_part(torch.empty(shape, dtype=values.dtype), init, TableSlices(rows, width, 1, None), place, seed)
    elif fill.kind in IN_ORDER:
        generator.set_state(fill.generator_state)
        drawn = _draw(fill.kind, fill.args, shape, values.dtype, generator)
    else:
        raise StrategyError(f"{fill.kind}: servers know {BY_ROW}, {', '.join((*IN_ORDER, *EACH))}")
    begin = piece.start + own.start * piece.step - fill.first
    part.copy_(drawn[begin :: piece.step][: len(part)])
    return generator.get_state()


numbers = itertools.count()
"""Of the parameters; all ranks take them in the same order."""


@dataclass
class RemoteParameter:
    """One parameter on the servers. All ranks make the same ones in the same order."""

    number: int
    """Of `numbers`."""
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
        for piece, first, _, place in self._messages(begin, begin + len(values), values):
            fields = {"shard": self.key(piece), "field": state, "begin": first}
            ask({piece.server: Message("put", fields, [values[place]])})

    def read(self, state: str, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return rows `begin` to `end` of the values, or of a tensor of the optimizer's state, after every step so far.

        The rows are in memory of their own.
        """
        found = torch.empty((end - begin, *self.row_shape), dtype=dtype)
        for piece, first, last, place in self._messages(begin, end, found):
            fields = {"shard": self.key(piece), "field": state, "begin": first, "end": last}
            found[place] = ask({piece.server: Message("read", fields)})[piece.server].tensors[0]
        return found

    def _messages(self, begin: int, end: int, values: Tensor) -> Iterator[tuple[Piece, int, int, slice]]:
        """Yield for each message about some rows the piece, first and last of its own rows, and where they are in the
        values of all rows.
        """
        rows = self._rows_per_message(values)
        for piece in self.pieces:
            own = piece.overlap(begin, end)
            for first in range(own.start, own.stop, rows):
                last = min(first + rows, own.stop)
                offset = piece.start + first * piece.step - begin
                yield piece, first, last, slice(offset, offset + (last - first - 1) * piece.step + 1, piece.step)

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


Table = nn.Embedding | EmbeddingLookup


def check_embedding(module: Table) -> None:
    """Refuse settings that need the whole table in the forward pass."""
    if isinstance(module, EmbeddingLookup):  # scales the rows that it has looked up
        return
    wrong = "max_norm" if module.max_norm is not None else "scale_grad_by_freq" if module.scale_grad_by_freq else ""
    if wrong:
        raise StrategyError(f"{type(module).__name__}({wrong}=...) cannot be on parameter servers: leave {wrong} out")


def pull_rows(module: Table, remote: RemoteParameter) -> None:
    """Let an embedding look its rows up on the servers. At its first call the table goes there.

    Afterwards its weight keeps shape and type but no memory: every element reads as NaN. `cache` of the module is the
    worker's RowCache, or None.
    """
    remote.readers.add(module)
    if isinstance(module, EmbeddingLookup):
        source = functools.partial(_servers_of, module, "embedding_table", remote, None)
        module.look_up_elsewhere(source, remote.cache)
        return
    embedding = module

    def forward(indices: Tensor) -> Tensor:
        return look_up(embedding.weight, indices, _servers_of(embedding, "weight", remote, embedding.padding_idx))

    vars(module)["forward"] = forward
    vars(module)["cache"] = remote.cache


def _servers_of(module: nn.Module, name: str, remote: RemoteParameter, padding: int | None) -> _Servers:
    weight = module.get_parameter(name)
    if not remote.is_placed:
        remote.place(weight.detach())
        weight.data = empty_like_nan(weight)
    return _Servers(weight, remote, padding)


def empty_like_nan(weight: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor of the same shape and type in which every element is one and the same NaN."""
    one = torch.full((1,) * weight.dim(), float("nan"), dtype=weight.dtype, device=device or weight.device)
    return one.expand(weight.shape)


class _Servers:
    """The servers as the source of the rows of one lookup."""

    def __init__(self, weight: Tensor, remote: RemoteParameter, padding_idx: int | None) -> None:
        self._weight, self._remote, self._padding = weight, remote, padding_idx

    def number(self, rows: Tensor) -> Tensor:
        if rows.numel():
            low, high = (int(row) for row in torch.aminmax(rows))
            if not 0 <= low <= high < self._remote.shape[0]:
                raise IndexError(f"row {low} to {high} of an embedding with {self._remote.shape[0]} rows")
        return number_rows(self._remote.pieces, rows)

    def fetch(self, numbers: Tensor, place: Tensor) -> Tensor:
        return self._remote.pull(numbers).index_select(0, place)

    def give_back(self, numbers: Tensor, gradients: Tensor) -> Tensor:
        rows = named_rows(self._remote.pieces, numbers)
        if self._padding is not None:  # as of torch's embedding, the padding row has no gradient, not one of zeros
            keep = rows != self._padding
            rows, gradients = rows[keep], gradients[keep]
        device = self._weight.device
        shape = self._weight.shape  # not in the order of the rows, but in that in which they are sent
        return torch.sparse_coo_tensor(rows[None].to(device), gradients.to(device), shape, check_invariants=False)
