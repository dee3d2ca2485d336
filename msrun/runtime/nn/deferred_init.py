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
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.errors import ParallelError
from msrun.runtime.nn.random_stream import torchs_numbers
from msrun.runtime.nn.tape import Entry, Tape, tape_of
from msrun.runtime.tensors.plain_tensors import plain, plain_tensors
from msrun.runtime.tensors.put_value import put_value
from msrun.runtime.world import device

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
    """Return the tapes behind a module's deferred tensors, each once, in order of first use.

    Raises:
        ParallelError: a meta tensor that `no_init_parameters` did not make.
    """
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
