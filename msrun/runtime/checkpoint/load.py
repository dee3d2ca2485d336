"""load_checkpoint and latest_checkpoint: into any layout, on any number of ranks, before or after the first step."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from msrun.errors import CheckpointError, near_miss
from msrun.runtime.agreement import attempt, attempt_all, gather, meetings
from msrun.runtime.checkpoint.directory import (
    Manifest,
    Position,
    find_checkpoints,
    read_manifest,
    recover,
    recover_all,
)
from msrun.runtime.checkpoint.index import NETWORK, TensorKey, covers, index_of, key_of, own_key
from msrun.runtime.checkpoint.optimizer_state import restore_optimizer
from msrun.runtime.checkpoint.reader import (
    CheckpointReader,
    check_set,
    find_set,
    look_at,
    open_parts,
    open_source,
)
from msrun.runtime.checkpoint.save import background, host
from msrun.runtime.execute.placement import is_held
from msrun.runtime.nn.deferred_init import defer_values
from msrun.runtime.nn.random_stream import State, choose_random_state, put_random_state, put_stream_state
from msrun.runtime.parallel.context import get_auto_parallel_context
from msrun.runtime.parallel.parameters.layouts import ParameterLayout, check_layouts
from msrun.runtime.parallel.parameters.network_state import (
    Chunk,
    NetworkState,
    find_box,
    find_chunk,
    find_network_state,
    give_back,
    set_extra_state,
)
from msrun.runtime.parallel.strategy_file import read_strategy
from msrun.runtime.progress import waiting_in
from msrun.runtime.sharding.layout import Box
from msrun.runtime.world import get_group_size, get_rank

_log = logging.getLogger("msrun.runtime")
T = TypeVar("T")


@dataclass(frozen=True)
class Resumed:
    """Where a loaded checkpoint leaves training."""

    position: Position
    appended: dict[str, Any]
    random_of_epoch: State | None
    """This rank's generators when the epoch began; None when they are not known."""
    random_now: State | None

    def describe(self) -> dict[str, Any]:
        """Return the appended values and the position, in MindSpore's words."""
        return {
            **self.appended,
            "epoch_num": self.position.epoch,
            "step_in_epoch": self.position.step_in_epoch,
            "step_num": self.position.step,
        }


def latest_checkpoint(directory: str | os.PathLike[str], prefix: str | None = None) -> Path | None:
    """Return the complete checkpoint of a directory that was written last; None when there is none.

    All ranks call it together and get the same one. Where they give directories of their own, such as
    `f"ckpt_{get_rank()}"`, or are on hosts that share none, it is the last one that all of them have, each in its own.
    One that was not written to its end, or lost a file since, does not count.

    Args:
        prefix: only checkpoints of the ModelCheckpoint with this prefix.
    """
    background.wait()
    folder = Path(directory).absolute()

    def find() -> list[tuple[str, str, int]]:
        recover_all(folder)
        return [(path.name, manifest.save_id, manifest.serial) for path, manifest in find_checkpoints(folder, prefix)]

    seen = _look(folder, find)
    common = set.intersection(*({(name, save_id) for name, save_id, _ in found} for found in seen))
    last = [name for name, save_id, _ in seen[0] if (name, save_id) in common]
    return folder / last[-1] if last else None


def load_checkpoint(
    ckpt_file_name: str | os.PathLike[str],
    net: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict_load: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint. All ranks call it together; each reads what it holds.

    It may have been written by another number of ranks, with other strategies or hsdp settings. Before AutoParallel's
    first call is as good as after it: parameters that have no memory yet get their values when they get their place.

    Args:
        ckpt_file_name: path of the checkpoint, a file or a directory; where the ranks of one save wrote directories of
            their own, each rank's, or one of them.
        net: the network to load into: a module, or an AutoParallel of one. None: nothing is changed.
        optimizer: the optimizer of `net`; with it training goes on, and the random generators do too.
        strict_load: refuse a network whose tensors are not exactly those of the checkpoint in name, shape and type.
            False: load those of equal name and shape, turn their type into the network's, and say what is left over.

    Returns:
        What was appended at saving, and `epoch_num` (epochs done), `step_in_epoch` (steps done in the next one) and
        `step_num` (steps done). Without `net` also every whole tensor of the network by its name: MindSpore's
        param_dict, for `load_param_into_net`.

    Raises:
        CheckpointError: no complete checkpoint is there, or it is one of another network.
    """
    meetings.gather("load_checkpoint()")
    if net is not None:
        resumed = resume(ckpt_file_name, net, optimizer, strict_load=strict_load)
        if optimizer is not None and resumed.random_now is not None:
            put_random_state(resumed.random_now)
        return resumed.describe()
    reader, manifest = _open_everywhere(ckpt_file_name)

    def read_all() -> dict[str, Any]:
        own = {own_key((NETWORK, name), get_rank()): name for name in manifest.own}
        names = {key: key[1] for key in reader.tensors if key[0] == NETWORK} | own
        tensors = {name: reader.read(key) for key, name in names.items()}
        return {**tensors, **_where(manifest, reader.state()).describe()}

    return attempt(read_all)


def resume(
    ckpt_file_name: str | os.PathLike[str],
    net: Any,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict_load: bool = True,
) -> Resumed:
    """Load into a network and its optimizer, and leave the random generators to the caller."""
    reader, manifest = _open_everywhere(ckpt_file_name)
    path = reader.path

    def read() -> Resumed:
        network = find_network_state(net)
        state = reader.state()
        load_network(reader, network, strict_load=strict_load)
        set_extra_state(network, state["extra"])
        if optimizer is not None:
            if state["optimizer"] is None:
                raise CheckpointError(f"checkpoint {path} holds no optimizer: load it without one")
            restore_optimizer(optimizer, network, reader, state["optimizer"])
            if state.get("dropout") is not None:  # older checkpoints have none
                put_stream_state(network.tensors.values(), state["dropout"])
        return _where(manifest, state)

    resumed = attempt(read)
    if optimizer is not None and resumed.random_now is None and get_rank() == 0:
        _log.warning(
            f"checkpoint {path}: the random generators of {manifest.world_size} ranks differed and cannot be given to "
            f"{get_group_size()}: they stay as they are"
        )
    return resumed


def _look(path: Path, question: Callable[[], T]) -> list[T]:
    """Ask one rank of every host and path, and return their answers on every rank, the lowest rank's first."""
    lookers: dict[Any, int] = {}
    for rank, place in enumerate(gather((str(path), host()))):
        lookers.setdefault(place, rank)
    answers = attempt_all(lambda: question() if get_rank() in lookers.values() else None)
    return [answer for rank, answer in enumerate(answers) if rank in lookers.values() and answer is not None]


def _find(name: str | os.PathLike[str]) -> tuple[list[Path], Manifest]:
    """Look whether the checkpoint is there and complete, over all ranks; return what of it is here."""
    background.wait()
    path = Path(name).absolute()

    def look() -> tuple[list[Path], Manifest, list[int]]:
        recover(path)
        if look_at(path) is None:
            others = [other.name for other, _ in find_checkpoints(path.parent)]
            if path.exists():
                raise CheckpointError(f"{path} is no complete checkpoint: load {_any_of(others, path)}")
            raise CheckpointError(
                f"there is no checkpoint {path}{near_miss(path.name, others)}: load {_any_of(others, path)}"
            )
        found, manifest = find_set([path])
        return list(found.values()), manifest, list(found)

    seen = _look(path, look)
    manifest = seen[0][1]
    if manifest.places:
        if any(other.save_id != manifest.save_id for _, other, _ in seen):
            raise CheckpointError(
                f"the ranks' checkpoints, {path} here, are of different saves: load what latest_checkpoint returns"
            )
        check_set(path, manifest, {number for _, _, numbers in seen for number in numbers})
    others = [other for paths, _, _ in seen for other in paths if other != path]
    return [path, *dict.fromkeys(others)], manifest


def _open_everywhere(name: str | os.PathLike[str]) -> tuple[CheckpointReader, Manifest]:
    """Open a checkpoint on all ranks together."""
    paths, manifest = _find(name)
    reader = attempt(lambda: _open_here(paths, manifest))
    return (complete(reader) if manifest.places else reader), manifest


def _open_here(paths: Sequence[Path], manifest: Manifest) -> CheckpointReader:
    """Open what of a checkpoint this rank sees."""
    if manifest.own and manifest.world_size != get_group_size():
        raise CheckpointError(
            f"checkpoint {paths[0]}: {manifest.own[0]} is marked layerwise_parallel, and each of {manifest.world_size} "
            f"ranks saved its own: load it on {manifest.world_size} ranks, this job has {get_group_size()}"
        )
    first, *others = paths
    own = ((path, read_manifest(path)) for path in others if manifest.places)
    return open_parts([first, *(path for path, found in own if found and found.save_id == manifest.save_id)])


def _any_of(others: Sequence[str], path: Path) -> str:
    return f"one that {path.parent} has: {', '.join(others[-3:])}" if others else "another one, its folder has none"


def _where(manifest: Manifest, state: Mapping[str, Any]) -> Resumed:
    choices = []
    for when in ("epoch", "now"):
        states = state["random"][when]
        choices.append(choose_random_state(states, get_rank(), get_group_size()) if states[0] is not None else None)
    return Resumed(manifest.position, state["appended"], *choices)


def load_network(reader: CheckpointReader, network: NetworkState, *, strict_load: bool) -> None:
    """Put the values of a checkpoint's network where they belong."""
    load_tensors(reader, replace(network, tensors=_match(reader, network, strict_load=strict_load)))


def load_tensors(source: CheckpointReader, network: NetworkState) -> None:
    """Put the values of tensors, all of which the source has in their shapes, where they belong."""
    parts: dict[TensorKey, Chunk] = {}
    deferred: dict[str, Callable[[], Tensor]] = {}

    def read(key: TensorKey, box: Box, dtype: torch.dtype) -> Tensor:
        value = torch.empty(box.sizes, dtype=dtype)
        source.fill({key: Chunk(value, box)})
        return value

    seen: set[int] = set()
    for name, tensor in network.tensors.items():
        if id(tensor) in seen or not is_held(tensor):  # tied, or in another stage of a pipeline
            continue
        seen.add(id(tensor))
        key = key_of(network, name)
        if tensor.is_meta:
            deferred[name] = functools.partial(read, key, find_box(tensor), tensor.dtype)
        else:
            parts[key] = find_chunk(tensor, find_box(tensor))
    source.fill(parts)
    for name, tensor in network.tensors.items():
        if key_of(network, name) in parts:
            give_back(tensor, parts[key_of(network, name)])
    defer_values(deferred, network.tensors)


def _match(reader: CheckpointReader, network: NetworkState, *, strict_load: bool) -> dict[str, Tensor]:
    """Return the network's tensors that are to be loaded."""
    theirs = set(reader.network_names)
    mine = {name for name in network.tensors if name not in network.own}
    left_over = [
        f"{name} is not in the checkpoint" for name in network.tensors if key_of(network, name) not in reader.tensors
    ]
    left_over += [f"{name} is only in the checkpoint" for name in sorted(theirs - mine)]
    fitting = {}
    for name, tensor in network.tensors.items():
        key = key_of(network, name)
        if key not in reader.tensors:
            continue
        shape, dtype = find_box(tensor).shape, reader.tensors[key].dtype
        if shape != reader.tensors[key].shape:
            left_over.append(f"{name} has shape {shape}, in the checkpoint {reader.tensors[key].shape}")
        elif strict_load and tensor.dtype != dtype:
            left_over.append(f"{name} is {tensor.dtype}, in the checkpoint {dtype}")
        else:
            fitting[name] = tensor
    if left_over and strict_load:
        more = f" (and {len(left_over) - 1} more)" if len(left_over) > 1 else ""
        raise CheckpointError(
            f"checkpoint {reader.path} is one of another network: {left_over[0]}{more}; load what fits with "
            "strict_load=False"
        )
    if left_over and get_rank() == 0:
        _log.warning(f"checkpoint {reader.path}: {len(left_over)} tensors were not loaded: {'; '.join(left_over[:5])}")
    return fitting


def load_param_into_net(
    net: Any, parameter_dict: Mapping[str, Any], strict_load: bool = False
) -> tuple[list[str], list[str]]:
    """Load parameters and buffers by name; each rank takes the part that it holds. Nothing is exchanged.

    AutoParallel's first call may come before or after: parameters without memory get their values with their place.
    Where names do not agree, one prefix that those of the network have and those of `parameter_dict` lack is left out,
    as MindSpore does.

    Args:
        net: a module, or an AutoParallel of one.
        parameter_dict: name -> whole tensor, such as `load_checkpoint(path)` or a state dict; other values are not
            used. A parameter marked `layerwise_parallel` takes this rank's own.
        strict_load: refuse another type of element and leave no prefix out. False: floating-point types are converted.

    Returns:
        Names of the network's tensors that were not loaded, and names of `parameter_dict` that were not used.

    Raises:
        CheckpointError: a tensor of another shape, or of another type of element that is not converted.
    """
    if not isinstance(parameter_dict, Mapping):
        raise CheckpointError(
            f"parameter_dict is a {type(parameter_dict).__name__}: give the dict that load_checkpoint(path) returns"
        )
    network = find_network_state(net)
    given = {name: value for name, value in parameter_dict.items() if isinstance(value, Tensor)}
    source_of = {name: name for name in network.tensors if name in given}
    if not strict_load:
        source_of |= _without_prefix([name for name in network.tensors if name not in given], given)
    for name, source in source_of.items():
        _check(name, network.tensors[name], given[source], strict_load=strict_load)
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in given.items()}
    values = {key_of(network, name): whole[source] for name, source in source_of.items()}
    path = Path("parameter_dict")
    load_tensors(
        CheckpointReader(path, [index_of(path, values)]),
        replace(network, tensors={name: network.tensors[name] for name in source_of}),
    )
    used = set(source_of.values())
    return [n for n in network.tensors if n not in source_of], [n for n in parameter_dict if n not in used]


def _without_prefix(missing: list[str], given: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name of the network -> name in the dict, for the prefix of the longest name that the dict lacks."""
    longest = max(missing, key=len, default="")
    parts = longest.split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count]) + "."
        if longest.removeprefix(prefix) in given:
            return {
                n: n.removeprefix(prefix) for n in missing if n.startswith(prefix) and n.removeprefix(prefix) in given
            }
    return {}


def _check(name: str, tensor: Tensor, value: Tensor, *, strict_load: bool) -> None:
    shape = find_box(tensor).shape
    if tuple(value.shape) != shape:
        raise CheckpointError(
            f"{name} has shape {shape}, in parameter_dict {tuple(value.shape)}: give the values of this network, whole"
        )
    are_floats = tensor.is_floating_point() and value.is_floating_point()
    if tensor.dtype != value.dtype and (strict_load or not are_floats):
        remedy = "convert it, or give strict_load=False" if are_floats else "convert it"
        raise CheckpointError(f"{name} is {tensor.dtype}, in parameter_dict {value.dtype}: {remedy}")


def load_distributed_checkpoint(
    network: Any,
    checkpoint_filenames: Sequence[str | os.PathLike[str]],
    predict_strategy: Mapping[str, ParameterLayout] | str | os.PathLike[str] | None = None,
    train_strategy_filename: str | os.PathLike[str] | None = None,
    strict_load: bool = False,
) -> None:
    """Load a network from the checkpoints that the ranks of a training wrote, each its own parts.

    The network may be cut in any way, or be cut by its first call later: each rank reads what it holds. All ranks call
    it together.

    Args:
        network: a module, or an AutoParallel of one.
        checkpoint_filenames: of all ranks, in their order; or one that is complete, or that has the others beside it.
        predict_strategy: how this network will be cut, from `Model.infer_train_layout`, `Model.infer_predict_layout`,
            `find_layouts` or a strategy file. It is checked against the network; the network itself decides.
        train_strategy_filename: how the checkpoints were cut, else `strategy_ckpt_load_file` of the context. Only plain
            torch.save files need it: msrun's say it themselves.
        strict_load: refuse a network whose tensors are not exactly those of the checkpoint.

    Raises:
        CheckpointError: a checkpoint is missing or incomplete, or one of another network.
    """
    if isinstance(checkpoint_filenames, str | os.PathLike) or not checkpoint_filenames:
        raise CheckpointError(
            f"checkpoint_filenames={checkpoint_filenames!r}: give a list with the checkpoints of all ranks, in order"
        )
    background.wait()
    strategy = train_strategy_filename or get_auto_parallel_context("strategy_ckpt_load_file") or None

    def load() -> None:
        if isinstance(predict_strategy, str | os.PathLike):
            check_layouts(network, read_strategy(predict_strategy))
        elif predict_strategy is not None:
            check_layouts(network, predict_strategy)
        reader, _ = open_source(dict(enumerate(map(Path, checkpoint_filenames))), strategy)
        load_network(reader, find_network_state(network), strict_load=strict_load)

    attempt(load)


_Table = dict[TensorKey, tuple[tuple[int, ...], torch.dtype, list[Box]]]


def complete(reader: CheckpointReader) -> CheckpointReader:
    """Return a reader that has every tensor whole on every rank. All ranks call it together.

    Where some rank sees only some parts, all tensors are sent to all ranks and stay in memory until they are read.
    """
    tables = gather(
        {
            key: (stored.shape, stored.dtype, list(stored.parts))
            for key, stored in reader.tensors.items()
            if not key[0].startswith("rank_")  # that belongs to one rank alone
        }
    )
    keys = list(dict.fromkeys(key for table in tables for key in table))
    if all(key in table and covers(table[key][2], table[key][0]) for table in tables for key in keys):
        return reader
    failures: list[str] = []
    wholes = {key: _bring(reader, key, tables, failures) for key in keys}

    def look() -> None:
        if failures:
            raise CheckpointError(failures[0])

    attempt(look)
    reader.tensors |= index_of(reader.path, wholes)
    return reader


def _bring(reader: CheckpointReader, key: TensorKey, tables: list[_Table], failures: list[str]) -> Tensor:
    """Send every part of a tensor from the lowest rank that has it to all."""
    shape, dtype, _ = next(table[key] for table in tables if key in table)
    value = torch.empty(shape, dtype=dtype)
    owners: dict[Box, int] = {}
    for rank, table in enumerate(tables):
        for box in table[key][2] if key in table else ():
            owners.setdefault(box, rank)
    for box, owner in owners.items():
        part = torch.zeros(box.sizes, dtype=dtype)
        if owner == get_rank():
            try:
                reader.fill({key: Chunk(part, box)})
            except CheckpointError as error:  # the others wait for the message
                failures.append(str(error))
        with waiting_in(lambda: f"the parts of {'.'.join(key)}"):
            dist.broadcast(part.view(-1).view(torch.uint8), owner)
        value[box.slices].copy_(part)
    return value
