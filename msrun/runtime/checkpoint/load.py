"""load_checkpoint and latest_checkpoint: into any layout, on any number of ranks, before or after the first step."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrun.errors import CheckpointError, near_miss
from msrun.runtime.checkpoint.agreement import attempt, decide
from msrun.runtime.checkpoint.directory import (
    Manifest,
    Position,
    find_checkpoints,
    read_manifest,
    recover,
    recover_all,
)
from msrun.runtime.checkpoint.optimizer_state import restore_optimizer
from msrun.runtime.checkpoint.parts import NetworkState, Part, find_box, find_network_state, find_part, set_extra_state
from msrun.runtime.checkpoint.random_state import State, choose_random_state, put_random_state
from msrun.runtime.checkpoint.save import STATE_FILE
from msrun.runtime.checkpoint.tensor_files import NETWORK, TensorKey, TensorReader
from msrun.runtime.nn.deferred_init import defer_values
from msrun.runtime.nn.random_stream import put_stream_state
from msrun.runtime.parallel.parameters.placement import is_held
from msrun.runtime.world import get_group_size, get_rank

_log = logging.getLogger("msrun.runtime")


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

    All ranks call it together and get rank 0's answer, so they load the same one. One that was not written to its
    end, or lost a file since, does not count.

    Args:
        prefix: only checkpoints of the ModelCheckpoint with this prefix.
    """

    def find() -> Path | None:
        folder = Path(directory).absolute()
        recover_all(folder)
        found = find_checkpoints(folder, prefix)
        return found[-1][0] if found else None

    return decide(find)


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
        ckpt_file_name: path of the checkpoint.
        net: the network to load into: a module, or an AutoParallel of one. None: nothing is changed.
        optimizer: the optimizer of `net`; with it training goes on, and the random generators do too.
        strict_load: refuse a network whose tensors are not exactly those of the checkpoint in name, shape and type.
            False: load those of equal name and shape, turn their type into the network's, and say what is left over.

    Returns:
        What was appended at saving, and `epoch_num` (epochs done), `step_in_epoch` (steps done in the next one) and
        `step_num` (steps done). Without `net` also every whole tensor of the network by its name.

    Raises:
        CheckpointError: no complete checkpoint is there, or it is one of another network.
    """
    if net is not None:
        resumed = resume(ckpt_file_name, net, optimizer, strict_load=strict_load)
        if optimizer is not None and resumed.random_now is not None:
            put_random_state(resumed.random_now)
        return resumed.describe()
    path, manifest = _find(ckpt_file_name)

    def read_all() -> dict[str, Any]:
        reader = TensorReader(path)
        tensors = {name: reader.read((NETWORK, name)) for name in reader.network_names}
        return {**tensors, **_where(manifest, _read_state(path)).describe()}

    return attempt(read_all)


def resume(
    ckpt_file_name: str | os.PathLike[str],
    net: Any,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict_load: bool = True,
) -> Resumed:
    """Load into a network and its optimizer, and leave the random generators to the caller."""
    path, manifest = _find(ckpt_file_name)

    def read() -> Resumed:
        reader, state, network = TensorReader(path), _read_state(path), find_network_state(net)
        _load_network(path, reader, network, strict_load=strict_load)
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


def _find(name: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    """Let rank 0 look whether the checkpoint is there and complete."""

    def find() -> tuple[Path, Manifest]:
        path = Path(name).absolute()
        recover(path)
        manifest = read_manifest(path)
        if manifest is not None:
            return path, manifest
        others = [other.name for other, _ in find_checkpoints(path.parent)]
        if path.exists():
            raise CheckpointError(f"{path} is no complete checkpoint: load {_any_of(others, path)}")
        raise CheckpointError(
            f"there is no checkpoint {path}{near_miss(path.name, others)}: load {_any_of(others, path)}"
        )

    return decide(find)


def _any_of(others: Sequence[str], path: Path) -> str:
    return f"one that {path.parent} has: {', '.join(others[-3:])}" if others else "another one, its folder has none"


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path / STATE_FILE, map_location="cpu", weights_only=True)
    except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {str(error).splitlines()[0]}") from None
    return state


def _where(manifest: Manifest, state: Mapping[str, Any]) -> Resumed:
    choices = []
    for when in ("epoch", "now"):
        states = state["random"][when]
        choices.append(choose_random_state(states, get_rank(), get_group_size()) if states[0] is not None else None)
    return Resumed(manifest.position, state["appended"], *choices)


def _load_network(path: Path, reader: TensorReader, network: NetworkState, *, strict_load: bool) -> None:
    fitting = _match(path, reader, network, strict_load=strict_load)
    parts: dict[TensorKey, Part] = {}
    deferred: dict[str, Callable[[], Tensor]] = {}
    seen: set[int] = set()
    for name, tensor in fitting.items():
        if id(tensor) in seen or not is_held(tensor):  # tied, or in another stage of a pipeline
            continue
        seen.add(id(tensor))
        if tensor.is_meta:
            deferred[name] = _deferred_read(reader, name, tensor.dtype)
        else:
            parts[NETWORK, name] = find_part(tensor, find_box(tensor))
    reader.fill(parts)
    defer_values(deferred, fitting)


def _deferred_read(reader: TensorReader, name: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: reader.read((NETWORK, name)).to(dtype)


def _match(path: Path, reader: TensorReader, network: NetworkState, *, strict_load: bool) -> dict[str, Tensor]:
    """Return the network's tensors that are to be loaded."""
    theirs = set(reader.network_names)
    left_over = [f"{name} is not in the checkpoint" for name in network.tensors if name not in theirs]
    left_over += [f"{name} is only in the checkpoint" for name in sorted(theirs - network.tensors.keys())]
    fitting = {}
    for name, tensor in network.tensors.items():
        if name not in theirs:
            continue
        shape, dtype = find_box(tensor).shape, reader.dtype((NETWORK, name))
        if shape != reader.shape((NETWORK, name)):
            left_over.append(f"{name} has shape {shape}, in the checkpoint {reader.shape((NETWORK, name))}")
        elif strict_load and tensor.dtype != dtype:
            left_over.append(f"{name} is {tensor.dtype}, in the checkpoint {dtype}")
        else:
            fitting[name] = tensor
    if left_over and strict_load:
        more = f" (and {len(left_over) - 1} more)" if len(left_over) > 1 else ""
        raise CheckpointError(
            f"checkpoint {path} is one of another network: {left_over[0]}{more}; load what fits with strict_load=False"
        )
    if left_over and get_rank() == 0:
        _log.warning(f"checkpoint {path}: {len(left_over)} tensors were not loaded: {'; '.join(left_over[:5])}")
    return fitting
