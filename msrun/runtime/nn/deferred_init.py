"""Deferred initialisation: build a network without memory for its weights, and give each rank only its part later.

Inside `no_init_parameters` tensors are made on the meta device and every operation on them is written to a tape, with
the state of the random generator at its beginning. Initialising replays the tape: the weights are exactly those that
the same lines would have made at once, on any number of ranks and in any layout. One parameter at a time exists as a
whole while its tape runs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.errors import ParallelError
from msrun.runtime.nn.random_stream import torchs_numbers
from msrun.runtime.tensors.plain_tensors import plain, plain_tensors, put_value
from msrun.runtime.world import device


@dataclass(frozen=True)
class Reference:
    """A tensor on the tape: a view of a storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Entry:
    """One operation."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Reference, ...]
    new_seed: Tensor | None = None
    """State of the random generator, when the user set it since the entry before."""


@dataclass
class Tape:
    """Everything that one `no_init_parameters` block did to its tensors."""

    generator_state: Tensor
    entries: list[Entry] = field(default_factory=list)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    """Kept alive so that a number names one storage only."""

    def __post_init__(self) -> None:
        self._seen_state: Tensor | None = self.generator_state

    def expect_new_seed(self) -> None:
        """The user is setting the generator, maybe to the very state that it has."""
        self._seen_state = None

    def take_new_seed(self) -> Tensor | None:
        """Return the generator's state if it was set since the last call: recording itself never moves it."""
        state = torch.get_rng_state()
        if self._seen_state is not None and torch.equal(state, self._seen_state):
            return None
        self._seen_state = state
        return state

    def remember(self, tensor: Tensor) -> Reference:
        """Return a tensor's reference and keep its storage known."""
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage
        tape_of[storage._cdata] = self
        return Reference(storage._cdata, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    @property
    def seeds(self) -> list[Tensor | None]:
        """The states that the replay gives the random generator: the first one, and one per entry or None."""
        return [self.generator_state, *(entry.new_seed for entry in self.entries)]

    def use_seeds(self, seeds: list[Tensor | None]) -> None:
        """Replay with other states of the random generator: those of another rank."""
        assert seeds[0] is not None
        self.generator_state = seeds[0]
        self.entries = [replace(entry, new_seed=seed) for entry, seed in zip(self.entries, seeds[1:], strict=True)]

    def never_written(self) -> set[int]:
        """Return the storages that were only reserved and never given a value."""
        touched: dict[int, list[str]] = {}
        for entry in self.entries:
            for storage in {reference.storage for reference in entry.results}:
                touched.setdefault(storage, []).append(str(entry.operator))
        return {storage for storage, names in touched.items() if all("empty" in name for name in names)}

    def replay(self, wanted: dict[int, Callable[[Tensor], None]], entries: int | None = None) -> None:
        """Run the tape; give each wanted storage, as a flat tensor, to its taker when nothing changes it any more.

        Args:
            entries: run only so many.
        """
        last_use = self._last_use()
        values: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.set_rng_state(self.generator_state)
            for index, entry in enumerate(self.entries[:entries]):
                if entry.new_seed is not None:
                    torch.set_rng_state(entry.new_seed)
                args, kwargs = pytree.tree_map(lambda x: self._value(x, values), (entry.args, entry.kwargs))
                if kwargs.get("device") is not None:  # whatever it is: the numbers of the CPU are everybody's
                    kwargs = {**kwargs, "device": torch.device("cpu")}
                flat = [t for t in pytree.tree_leaves(entry.operator(*args, **kwargs)) if isinstance(t, Tensor)]
                for reference, result in zip(entry.results, flat, strict=True):
                    if reference.storage not in values:
                        values[reference.storage] = _flat(_conform(result, reference))
                for storage in [s for s in values if last_use[s] == index]:
                    flat_value = values.pop(storage)
                    if storage in wanted:
                        wanted[storage](flat_value)

    def take_out(self, storage: int, divert: Callable[[Entry], Callable[[], None] | None]) -> int:
        """Have a storage made elsewhere: the replay makes it no more, and calls what stands in for its lines.

        Returns how many entries a replay needs to call all that stand in.

        Args:
            divert: gets each line that touches the storage; returns what the replay calls in its place, or None.
        """
        needed = 0
        for index, entry in enumerate(self.entries):
            if self._touches(entry, storage):
                stand_in = divert(entry)
                self.entries[index] = Entry(stand_in or _nothing, (), {}, (), entry.new_seed)
                needed = index + 1 if stand_in is not None else needed
        self.storages.pop(storage)
        tape_of.pop(storage, None)
        return needed

    @staticmethod
    def _touches(entry: Entry, storage: int) -> bool:
        leaves = (*pytree.tree_leaves((entry.args, entry.kwargs)), *entry.results)
        return any(isinstance(leaf, Reference) and leaf.storage == storage for leaf in leaves)

    def _last_use(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for index, entry in enumerate(self.entries):
            for leaf in (*pytree.tree_leaves((entry.args, entry.kwargs)), *entry.results):
                if isinstance(leaf, Reference):
                    last[leaf.storage] = index
        return last

    @staticmethod
    def _value(item: Any, values: dict[int, Tensor]) -> Any:
        if isinstance(item, Reference):
            return values[item.storage].as_strided(item.size, item.stride, item.offset)
        return item


def _nothing() -> None:
    """Stand in for a line without random numbers."""


def _conform(result: Tensor, reference: Reference) -> Tensor:
    """Return `result` with the strides that meta promised: a kernel may lay its result out otherwise."""
    if tuple(result.stride()) == reference.stride and result.storage_offset() == reference.offset:
        return result
    return torch.empty_strided(reference.size, reference.stride, dtype=result.dtype).copy_(result)


def _flat(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as one dimension."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


tape_of: dict[int, Tape] = {}
"""storage number -> the tape that made it; entries go when they are replayed"""


CPU = torch.device("cpu")


class _Recorder(TorchDispatchMode):
    """Makes new tensors on meta and writes what happens to them on a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        returned = [str(value.type) for value in func._schema.returns]
        if any(self._is_recorded(leaf) for leaf in leaves) and returned and not any("Tensor" in t for t in returned):
            raise ParallelError(
                f"{func} needs the value of a parameter whose initialisation is deferred: build that part of the "
                "network outside no_init_parameters"
            )
        names = [argument.name for argument in func._schema.arguments]
        if not leaves and "device" in names:
            result = func(*args, **{**kwargs, "device": torch.device("meta")})
            if "dtype" in names and isinstance(result, Tensor):  # torch's default type may be another one later
                kwargs["dtype"] = result.dtype
        elif any(self._is_recorded(leaf) for leaf in leaves):
            result = func(*pytree.tree_map(_to_meta, args), **pytree.tree_map(_to_meta, kwargs))
        else:
            return func(*args, **kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            new_seed = self._tape.take_new_seed()
        flat = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self._tape.entries.append(
            Entry(
                func,
                pytree.tree_map(self._refer, tuple(args)),
                pytree.tree_map(self._refer, kwargs),
                tuple(self._tape.remember(tensor) for tensor in flat),
                new_seed,
            )
        )
        return result

    def _is_recorded(self, tensor: Tensor) -> bool:
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._tape.storages

    def _refer(self, item: Any) -> Any:
        return self._tape.remember(item) if isinstance(item, Tensor) and self._is_recorded(item) else item


@contextlib.contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


_SKIPS_META = ("_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_")
"""Functions of torch.nn.init that do nothing to a meta tensor (torch 2.11 to 2.13): recorded as a whole instead."""


@contextlib.contextmanager
def _recorded_initialisers(tape: Tape) -> Iterator[None]:
    """Let the initialisers that look at values be recorded by their call."""
    originals = {name: getattr(nn.init, name) for name in _SKIPS_META if hasattr(nn.init, name)}
    with contextlib.ExitStack() as patches:
        for name, original in originals.items():
            patches.enter_context(_swapped(nn.init, name, _recorded(tape, original)))
        yield


_SETS_SEED = ("manual_seed", "set_rng_state")


@contextlib.contextmanager
def _watched_seed(tape: Tape) -> Iterator[None]:
    """Notice when the random generator is set to the state that it has already."""

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tape.expect_new_seed()
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for name in _SETS_SEED:
            for owner in (torch, torch.random):
                patches.enter_context(_swapped(owner, name, watched(getattr(owner, name))))
        yield


def _recorded(tape: Tape, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (tensor.is_meta and tensor.untyped_storage()._cdata in tape.storages):
            return original(tensor, *args, **kwargs)
        reference = tape.remember(tensor)
        tape.entries.append(Entry(original, (reference, *args), kwargs, (reference,), tape.take_new_seed()))
        return tensor

    return call


def _to_meta(item: Any) -> Any:
    return item.to("meta") if isinstance(item, Tensor) and not item.is_meta else item


class NoInitParameters:
    """`with no_init_parameters():`, and `with no_init_parameters:` as the documents also write it."""

    def __init__(self) -> None:
        self._stack: list[contextlib.ExitStack] = []

    def __call__(self) -> NoInitParameters:
        return self

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        tape = Tape(torch.get_rng_state())
        stack.enter_context(_recorded_initialisers(tape))
        stack.enter_context(_watched_seed(tape))
        stack.enter_context(_Recorder(tape))
        self._stack.append(stack)

    def __exit__(self, *error: Any) -> None:
        self._stack.pop().close()


no_init_parameters = NoInitParameters()
"""Parameters made inside have no memory until they are initialised, by AutoParallel at its first call or by
`init_parameters`."""


def deferred_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return name -> parameter or buffer that still waits for its values."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in named if tensor.is_meta}


def _storage(tensor: Tensor) -> int:
    return plain(tensor).untyped_storage()._cdata


def tape_states(module: nn.Module) -> list[Tape]:
    """Return the tapes behind a module's deferred tensors, each once, in order of first use."""
    tapes: dict[int, Tape] = {}
    for name, tensor in deferred_tensors(module).items():
        tape = tape_of.get(_storage(tensor))
        if tape is None:
            raise ParallelError(
                f"parameter {name} is on the meta device but was not made inside no_init_parameters(): nothing is "
                "known of its values; build the network inside no_init_parameters()"
            )
        tapes[id(tape)] = tape
    return list(tapes.values())


def replay_deferred(
    module: nn.Module, cut: Callable[[str, Tensor], Tensor], on_host: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Compute the deferred tensors of a module, one whole tensor at a time, on the CPU.

    Args:
        cut: (name, whole tensor) -> the part to keep, which is brought to this rank's device.
        on_host: names of parts that stay in the host's memory.

    Yields:
        (name, kept part) for every deferred parameter and buffer; tied ones once.
    """
    tapes = tape_states(module)
    by_storage: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in deferred_tensors(module).items():
        by_storage.setdefault(_storage(tensor), (name, tensor))
    kept: list[tuple[str, Tensor]] = []

    def taker(name: str, meta: Tensor) -> Callable[[Tensor], None]:
        def take(flat: Tensor) -> None:
            with plain_tensors():  # of one that is this rank's rows by itself, such as a table's
                whole = flat.as_strided(meta.shape, meta.stride(), meta.storage_offset())
            place = CPU if name in on_host else device()
            kept.append((name, cut(name, whole).to(place, copy=True, memory_format=torch.contiguous_format)))

        return take

    for tape in tapes:
        for storage in tape.never_written() & set(by_storage):
            _warn_never_written(by_storage[storage][0])
        tape.replay({s: taker(*entry) for s, entry in by_storage.items() if s in tape.storages})
    yield from kept
    for storage in by_storage:
        tape_of.pop(storage, None)


def _warn_never_written(name: str) -> None:
    warnings.warn(
        f"parameter {name} was made by torch.empty and never given a value inside no_init_parameters(): its values are "
        "arbitrary. Initialisers that look at values (orthogonal_, dirac_, sparse_) are only seen when called as "
        "torch.nn.init.NAME",
        stacklevel=3,
    )


def defer_values(values: Mapping[str, Callable[[], Tensor]], tensors: Mapping[str, Tensor]) -> None:
    """Let deferred tensors get other values than those of the lines that made them: whole ones, computed when needed.

    Args:
        values: name -> what returns the whole value.
        tensors: the deferred tensors of these names.
    """
    tape = Tape(torch.Generator().manual_seed(0).get_state())
    for name, value in values.items():
        meta = tensors[name]
        earlier = tape_of.get(_storage(meta))
        if earlier is not None:
            earlier.storages.pop(_storage(meta), None)
        tape.entries.append(Entry(value, (), {}, (tape.remember(plain(meta)),)))


def fill_when_made(tensor: Tensor, fill: Callable[[Tensor], Tensor]) -> None:
    """Fill a tensor now; one that is deferred when its values are made, with the random numbers of this place.

    Args:
        fill: gets the tensor and returns it.
    """
    tape = tape_of.get(_storage(tensor)) if tensor.is_meta else None
    if tape is None:
        fill(tensor)
        return
    reference = tape.remember(tensor)
    tape.entries.append(Entry(fill, (reference,), {}, (reference,), tape.take_new_seed()))


@torchs_numbers()
def make_elsewhere(diverts: Mapping[Tensor, Callable[[Entry], Callable[[], None] | None]]) -> None:
    """Have deferred parameters made elsewhere, and call what stands in for their lines; all ranks call it together.

    Args:
        diverts: parameter -> as for `Tape.take_out`.
    """
    needed: dict[int, tuple[Tape, int]] = {}
    for parameter, divert in diverts.items():
        tape = tape_of[_storage(parameter)]
        entries = tape.take_out(_storage(parameter), divert)
        needed[id(tape)] = tape, max(entries, needed.get(id(tape), (tape, 0))[1])
    for tape, entries in needed.values():
        tape.replay({}, entries)


@torchs_numbers()
def init_parameters(module: nn.Module) -> nn.Module:
    """Give every deferred parameter and buffer its whole value, on this rank's device; returns the module."""
    tensors = deferred_tensors(module)
    for name, value in list(replay_deferred(module, lambda _, whole: whole)):
        put_value(tensors[name], value)
    return module
