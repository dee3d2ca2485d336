"""save_checkpoint: network, optimizer, position and random generators, written by all ranks as one directory."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.runtime.checkpoint.agreement import attempt, decide, gather
from msrun.runtime.checkpoint.directory import Position, finish_writing, recover, start_writing
from msrun.runtime.checkpoint.optimizer_state import complete_state, find_optimizer_state
from msrun.runtime.checkpoint.parts import Part, find_network_state, find_parts
from msrun.runtime.checkpoint.random_state import State, take_random_state
from msrun.runtime.checkpoint.tensor_files import NETWORK, TensorKey, write_tensors
from msrun.runtime.nn.random_stream import take_stream_state
from msrun.runtime.world import get_group_size, get_rank

STATE_FILE = "state.pt"
VISIBLE_WITHIN_S = 10.0
"""How long a directory that rank 0 made may take to appear on another host."""


def save_checkpoint(
    save_obj: Any,
    ckpt_file_name: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    epoch_num: int = 0,
    step_in_epoch: int = 0,
    step_num: int = 0,
    append_dict: Mapping[str, Any] | None = None,
    integrated_save: bool = True,
) -> Path:
    """Write a checkpoint and return its path. All ranks call it together; rank 0's path is used.

    Every part of every tensor is written once, by one of the ranks that hold it. Until everything is on the disk the
    directory is called `NAME.saving`; one that was there under the name before stays until then.

    Args:
        save_obj: the network: a module, or an AutoParallel of one.
        ckpt_file_name: of the directory to be made, on a file system that all hosts of the job share.
        optimizer: to go on training with; its state is saved in the layout of its parameters.
        epoch_num: epochs done.
        step_in_epoch: steps done in the epoch begun.
        step_num: steps done over all epochs.
        append_dict: more to be saved: numbers, strings, tensors, and lists and dicts of them; rank 0's are saved.
        integrated_save: MindSpore's word; the checkpoint is the same either way, it loads whole and in any layout.

    Raises:
        CheckpointError: it could not be written, such as on a full disk; the same on every rank. Checkpoints
            written before are as they were.
    """
    del integrated_save
    position = Position(epoch_num, step_in_epoch, step_num)
    return write_checkpoint(save_obj, ckpt_file_name, optimizer, position, dict(append_dict or {}))


def write_checkpoint(
    network: Any,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None,
    position: Position,
    appended: Mapping[str, Any],
    epoch_random: State | None = None,
) -> Path:
    """Do the work of `save_checkpoint`.

    Args:
        epoch_random: the random generators as they were when the current epoch began.
    """
    parts, state = attempt(lambda: _collect(network, optimizer, appended))
    if state["optimizer"] is not None:
        state["optimizer"] = complete_state(find_network_state(network), state["optimizer"])
    random = gather({"now": take_random_state(), "epoch": epoch_random})
    state["random"] = {when: [of_rank[when] for of_rank in random] for when in ("now", "epoch")}
    final = decide(lambda: Path(path).absolute())
    temporary = _explained(final, lambda: decide(lambda: start_writing(final)))
    try:
        attempt(lambda: _see(temporary))
        write_tensors(temporary, parts)
        decide(lambda: _finish(temporary, final, state, position))
    except CheckpointError as error:
        if get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            recover(final)
        raise CheckpointError(_explain(final, str(error))) from None
    return final


def _collect(
    network: Any, optimizer: torch.optim.Optimizer | None, appended: Mapping[str, Any]
) -> tuple[dict[TensorKey, Part], dict[str, Any]]:
    network_state = find_network_state(network)
    parts: dict[TensorKey, Part] = {(NETWORK, name): part for name, part in find_parts(network_state).items()}
    state: dict[str, Any] = {"extra": network_state.extra, "appended": dict(appended), "optimizer": None}
    state["dropout"] = take_stream_state(network_state.tensors.values())
    if optimizer is not None:
        more, state["optimizer"] = find_optimizer_state(optimizer, network_state)
        parts |= more
    _check_plain(state, "")
    return parts, state


def _check_plain(value: Any, where: str) -> None:
    """Refuse what could only be read back by running code from the file."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_plain(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif not isinstance(value, Tensor | int | float | complex | str | bytes | None | torch.dtype | torch.Size):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which a checkpoint does not hold: give numbers, strings, tensors, "
            "and lists and dicts of them"
        )


def _see(temporary: Path) -> None:
    end = time.monotonic() + VISIBLE_WITHIN_S
    while not temporary.is_dir():
        if time.monotonic() > end:
            raise CheckpointError(
                f"{temporary} is there for rank 0 but not here: give a directory on a file system that all hosts share"
            )
        time.sleep(0.05)


def _finish(temporary: Path, final: Path, state: Mapping[str, Any], position: Position) -> None:
    """Rank 0: write what is no part, then let the checkpoint have its name."""
    with (temporary / STATE_FILE).open("wb") as stream:
        try:
            torch.save(state, stream)
        except RuntimeError as error:  # torch's words for a full disk; the system's own are below
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        stream.flush()
        os.fsync(stream.fileno())
    finish_writing(temporary, final, position, get_group_size())


def _explained(final: Path, work: Any) -> Any:
    try:
        return work()
    except CheckpointError as error:
        raise CheckpointError(_explain(final, str(error))) from None


_REMEDIES: Sequence[tuple[str, str]] = (
    ("No space left on device", "free some space, or keep fewer checkpoints (keep_checkpoint_max)"),
    ("Disk quota exceeded", "free some space, or keep fewer checkpoints (keep_checkpoint_max)"),
    ("Permission denied", "give a directory that this user may write to"),
    ("Read-only file system", "give a directory that can be written to"),
)


def _explain(final: Path, failure: str) -> str:
    remedy = next((remedy for text, remedy in _REMEDIES if text in failure), "")
    return f"checkpoint {final} was not saved, earlier ones are untouched: {failure}" + (
        f"; {remedy}" if remedy else ""
    )
