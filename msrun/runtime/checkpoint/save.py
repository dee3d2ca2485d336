"""save_checkpoint: network, optimizer, position and random generators of all ranks, as one file or one directory.

Everything that the ranks have to agree on is decided before a byte is written (`_prepare`); the rest (`Writing`) runs
in the training's own thread over the world's group, or in a thread beside it over a group of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrun.errors import CheckpointError, ParallelError
from msrun.runtime.agreement import Group, attempt, attempt_all, describe, gather, meetings
from msrun.runtime.checkpoint import storage
from msrun.runtime.checkpoint.directory import (
    SAVING,
    Manifest,
    PlaceOfRanks,
    Position,
    give_name,
    recover,
    remove,
    start_writing,
)
from msrun.runtime.checkpoint.index import NETWORK, TensorKey, key_of
from msrun.runtime.checkpoint.optimizer_state import complete_state, find_optimizer_state
from msrun.runtime.nn.random_stream import State, take_random_state, take_stream_state
from msrun.runtime.parallel.parameters.network_state import Chunk, NetworkState, find_chunks, find_network_state
from msrun.runtime.progress import waiting_in
from msrun.runtime.world import at_release, get_group_size, get_rank

_TIMEOUT_S = 86400.0
"""A rank that died ends its connections, so only a slow disk is ever waited for."""
VISIBLE_WITHIN_S = 10.0
"""How long a file that another host made may take to appear."""
_log = logging.getLogger("msrun.runtime")
_shared: dict[tuple[str, tuple[str, ...]], bool] = {}
"""(folder, hosts) -> whether they see the same files in it; looked at once"""


@dataclass(frozen=True)
class Place:
    """One path, and the ranks to which it is the same."""

    path: Path
    ranks: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The rank that does what is done once."""
        return self.ranks[0]


def find_places(path: str | os.PathLike[str]) -> list[Place]:
    """Return where all ranks' paths lead, the lowest rank's first. All ranks call it together."""
    own = Path(path).absolute()
    asked = gather((str(own), host()))
    together: dict[str, dict[str, list[int]]] = {}
    for rank, (text, its_host) in enumerate(asked):
        together.setdefault(text, {}).setdefault(its_host, []).append(rank)
    found = []
    for text, hosts in together.items():
        if len(hosts) == 1 or _is_shared(Path(text).parent, hosts):
            found.append(Place(Path(text), tuple(sorted(rank for ranks in hosts.values() for rank in ranks))))
        else:
            found += [Place(Path(text), tuple(ranks)) for ranks in hosts.values()]
    return sorted(found, key=lambda place: place.leader)


def own_place(places: Sequence[Place], rank: int) -> int:
    """Return the index of a rank's place."""
    return next(index for index, place in enumerate(places) if rank in place.ranks)


def host() -> str:
    """Return what processes have in common that see the same files: the host, and the container on it."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/mnt').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _is_shared(folder: Path, hosts: dict[str, list[int]]) -> bool:
    """Return whether all these hosts have one folder under its name. All ranks of the world call it together."""
    key = (str(folder), tuple(sorted(hosts)))
    if key not in _shared:
        lookers = [min(ranks) for ranks in hosts.values()]
        first = min(lookers)
        name = gather(f".msrun-{uuid.uuid4().hex}")[first]

        def make() -> None:
            if get_rank() == first:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()

        def see() -> bool:
            end = time.monotonic() + VISIBLE_WITHIN_S
            while get_rank() in lookers and not (folder / name).exists():
                if time.monotonic() > end:
                    return False
                time.sleep(0.05)
            return True

        try:
            attempt(make)
            _shared[key] = all(attempt_all(see))
        finally:
            if get_rank() == first:
                (folder / name).unlink(missing_ok=True)
    return _shared[key]


@dataclass(frozen=True)
class Writing:
    """What is to be written, as this rank knows it. The parts are not copied."""

    own: Place
    leaders: list[int]
    """Of all places."""
    parts: storage.Parts
    """What this rank writes or sends."""
    state: bytes
    """`state.pt`; empty on ranks that do not write it."""
    tied: Mapping[str, str]
    """name -> name of the same tensor of the network, which is written in its stead."""
    manifest: Manifest
    is_integrated: bool
    pieces: storage.Pieces
    """Which parts of every tensor the ranks have that write together."""
    then: Callable[[], None] = lambda: None
    """What a leader does when its checkpoint has its name."""

    def run(self, group: Group) -> None:
        """Write it. All ranks call it together."""
        final = self.own.path
        temporary = final.with_name(final.name + SAVING)
        is_leader = get_rank() == self.own.leader

        def start() -> int:
            return start_writing(final, is_file=self.is_integrated)[1] if is_leader else 0

        try:
            serial = max(attempt_all(start, group))
            manifest = replace(self.manifest, serial=serial, saved_at=time.time())
            try:
                self._write(temporary, manifest, group)
                attempt(lambda: give_name(temporary, final) if is_leader else None, group)
                if is_leader:
                    self.then()
            except CheckpointError:
                if is_leader:
                    with contextlib.suppress(OSError):
                        remove(temporary)
                    recover(final)
                raise
        except CheckpointError as error:
            raise CheckpointError(explain(final, str(error))) from None

    def _write(self, temporary: Path, manifest: Manifest, group: Group) -> None:
        is_leader = get_rank() == self.own.leader
        waiting = waiting_in(lambda: f"the ranks that write {self.own.path}")
        waits = waiting if group is None else contextlib.nullcontext()
        if not self.is_integrated:
            number = self.own.ranks.index(get_rank())
            with waits:
                everyone = attempt_all(lambda: storage.write_parts(temporary, number, self.parts), group)
            files = [everyone[rank] for rank in self.own.ranks]
            attempt(
                lambda: storage.finish_directory(temporary, files, self.state, manifest) if is_leader else None, group
            )
            return
        storage.check_whole(self.pieces)
        file: storage.PlainFileWriter | None = None

        def write() -> None:
            nonlocal file
            failure: OSError | None = None
            if is_leader:
                room = [(key, owners[0][1].shape, owners[0][2]) for key, owners in self.pieces.items()]
                try:
                    file = storage.PlainFileWriter(temporary, room, self.tied)
                except OSError as error:
                    failure = error
            for key, value in storage.bring_together(self.parts, self.pieces, self.leaders, group):
                if file is not None and value is not None and failure is None:
                    try:
                        file.write(key, value)
                    except OSError as error:  # the others send on: they learn of it at the end
                        failure = error
            if failure is not None:
                raise failure

        try:
            with waits:
                attempt(write, group)
            attempt(lambda: file.finish(self.state, manifest) if file is not None else None, group)
        except BaseException:
            if file is not None:
                file.abandon()
            raise


class BackgroundWriter:
    """Writes one checkpoint at a time. Its messages go over a gloo group that nothing else uses."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._group: dist.ProcessGroup | None = None
        self._copies: dict[TensorKey, Tensor] = {}

    def start(self, writing: Writing) -> None:
        """Copy it, and write the copy while the training goes on. All ranks call it together, after `wait`."""
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_TIMEOUT_S))
        copied = replace(writing, parts={key: self._copy(key, part) for key, part in writing.parts.items()})
        # Not a daemon: the end of the process waits for it.
        self._thread = threading.Thread(target=self._write, args=(copied,), name="msrun-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if one is."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(failure)

    def forget(self) -> None:
        """Wait, and drop what belongs to the world that this process leaves."""
        try:
            self.wait()
        except CheckpointError as error:
            if threading.current_thread() is threading.main_thread():
                raise
            _log.error(str(error))  # the process is ending: nobody could catch it
        finally:
            self._group = None
            self._copies = {}

    def report(self) -> None:
        """Say at the end of a process that did not ask what has become of the last checkpoint."""
        try:
            self.wait()
        except CheckpointError as error:
            _log.error(str(error))

    def _copy(self, key: TensorKey, part: Chunk) -> Chunk:
        """Return a copy in the host's memory; memory of the save before is used again."""
        value = part.tensor.detach()
        copy = self._copies.get(key)
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = self._copies[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return Chunk(copy.copy_(value), part.box)

    def _write(self, writing: Writing) -> None:
        try:
            writing.run(self._group)
        except CheckpointError as error:
            self._failure = str(error)
        except (ParallelError, OSError, RuntimeError) as error:  # the group's: another rank has gone
            reason = (describe(error).splitlines() or [repr(error)])[0]
            self._failure = explain(writing.own.path, reason)


background = BackgroundWriter()
"""The one of this process."""
at_release(background.forget)
atexit.register(background.report)


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
    async_save: bool | str = False,
) -> Path:
    """Write a checkpoint and return its path. All ranks call it together.

    Until everything is on the disk it is called `NAME.saving`; one that was there under the name before stays until
    then. Ranks that give the same path write one checkpoint together; where they give paths of their own, or are on
    hosts that share no folder, each path gets one.

    Args:
        save_obj: the network: a module, or an AutoParallel of one.
        ckpt_file_name: of the file or directory to be made.
        optimizer: to go on training with; its state is saved in the layout of its parameters.
        epoch_num: epochs done.
        step_in_epoch: steps done in the epoch begun.
        step_num: steps done over all epochs.
        append_dict: more to be saved: numbers, strings, tensors, and lists and dicts of them; rank 0's are saved.
        integrated_save: True: one file with whole tensors, which `net.load_state_dict(torch.load(file))` reads; one
            rank for each path writes it and gets the parts of one tensor at a time. False: a directory into which every
            rank writes the parts that it holds, each part once; with paths of their own, the ranks' directories are a
            checkpoint together. Both resume on any number of ranks. A network with parameters marked
            `layerwise_parallel`, which have no whole, is always written as a directory.
        async_save: True: return as soon as this rank's share is copied to the host's memory, and write the copy beside
            the training, which may change anything meanwhile. The next save waits for this one, and so do `release()`
            and the end of the process; they also raise what went wrong. The copy's memory is kept for the next save.
            "thread" and "process", MindSpore's words, mean the same: the thread holds no lock of Python while it
            writes.

    Raises:
        CheckpointError: it could not be written, such as on a full disk; the same on every rank. Checkpoints
            written before are as they were.
    """
    position = Position(epoch_num, step_in_epoch, step_num)
    return write_checkpoint(
        save_obj,
        ckpt_file_name,
        optimizer,
        position,
        dict(append_dict or {}),
        is_integrated=integrated_save,
        is_async=check_async(async_save),
    )


def check_async(value: Any) -> bool:
    """Return whether to write beside the training."""
    if value not in (True, False, "thread", "process"):
        raise CheckpointError(f'async_save={value!r}: must be True, False, "thread" or "process"')
    return bool(value)


def write_checkpoint(
    network: Any,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None,
    position: Position,
    appended: Mapping[str, Any],
    epoch_random: State | None = None,
    *,
    is_integrated: bool = True,
    is_async: bool = False,
    then: Callable[[], None] = lambda: None,
) -> Path:
    """Do the work of `save_checkpoint`.

    Args:
        epoch_random: the random generators as they were when the current epoch began.
        then: done by the first rank of each path when the checkpoint has its name.
    """
    background.wait()
    meetings.gather("save_checkpoint()")
    places = find_places(path)
    own = places[own_place(places, get_rank())]
    try:
        writing = _prepare(network, places, optimizer, position, appended, epoch_random, is_integrated=is_integrated)
    except CheckpointError as error:
        raise CheckpointError(explain(own.path, str(error))) from None
    writing = replace(writing, then=then)
    if is_async:
        background.start(writing)
    else:
        writing.run(None)
    return own.path


def _prepare(
    network: Any,
    places: list[Place],
    optimizer: torch.optim.Optimizer | None,
    position: Position,
    appended: Mapping[str, Any],
    epoch_random: State | None,
    *,
    is_integrated: bool,
) -> Writing:
    """Decide everything that the ranks have to agree on."""
    network_state, parts, state = attempt(lambda: _collect(network, optimizer, appended))
    if state["optimizer"] is not None:
        state["optimizer"] = complete_state(network_state, state["optimizer"])
    told = gather(
        ({"now": take_random_state(), "epoch": epoch_random}, sorted(network_state.own), uuid.uuid4().hex),
    )
    state["random"] = {when: [random[when] for random, _, _ in told] for when in ("now", "epoch")}
    cut_by_hand = sorted({name for _, own_names, _ in told for name in own_names})
    if cut_by_hand and is_integrated:
        is_integrated = False
        _tell_once(
            "cut by hand",
            f"{cut_by_hand[0]} is marked layerwise_parallel, so no whole of it is known: checkpoints are directories "
            "with every rank's own part",
        )
    if len(places) > 1:
        kind = "a file with whole tensors" if is_integrated else "the parts that their ranks hold"
        _tell_once(
            kind,
            f"save_checkpoint: the ranks name {len(places)} places; each gets {kind}: "
            f"{', '.join(str(place.path.parent) for place in places[:4])}{', ...' if len(places) > 4 else ''}",
        )
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in network_state.tensors.items()}
    tied = {name: same for name, same in names.items() if name != same} if is_integrated else {}
    index = own_place(places, get_rank())
    own, is_whole = places[index], is_integrated or len(places) == 1
    parts = {key: part for key, part in parts.items() if key[0] != NETWORK or key[1] not in tied}
    together = range(get_group_size()) if is_integrated else own.ranks
    own_parts, pieces = storage.share_out(parts, together, to_first=is_integrated)
    order: dict[TensorKey, int] = {(NETWORK, name): number for number, name in enumerate(network_state.tensors)}
    return Writing(
        own,
        [place.leader for place in places],
        own_parts,
        storage.to_bytes(state) if get_rank() == own.leader else b"",
        tied,
        Manifest(
            position,
            get_group_size(),
            serial=0,
            saved_at=0.0,
            save_id=told[0][2],
            places=[]
            if is_whole
            else [PlaceOfRanks(list(place.ranks), os.path.relpath(place.path, own.path.parent)) for place in places],
            place=0 if is_whole else index,
            own=cut_by_hand,
        ),
        is_integrated,
        {key: pieces[key] for key in sorted(pieces, key=lambda key: order.get(key, len(order)))},
    )


def _collect(
    network: Any, optimizer: torch.optim.Optimizer | None, appended: Mapping[str, Any]
) -> tuple[NetworkState, dict[TensorKey, Chunk], dict[str, Any]]:
    network_state = find_network_state(network)
    parts = {key_of(network_state, name): part for name, part in find_chunks(network_state).items()}
    state: dict[str, Any] = {"extra": network_state.extra, "appended": dict(appended), "optimizer": None}
    state["dropout"] = take_stream_state(network_state.tensors.values())
    if optimizer is not None:
        more, state["optimizer"] = find_optimizer_state(optimizer, network_state)
        parts |= more
    _check_plain(state, "")
    return network_state, parts, state


_told: set[str] = set()


def _tell_once(what: str, text: str) -> None:
    if get_rank() == 0 and what not in _told:
        _told.add(what)
        _log.warning(text)


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


_REMEDIES: Sequence[tuple[str, str]] = (
    ("No space left on device", "free some space, or keep fewer checkpoints (keep_checkpoint_max)"),
    ("Disk quota exceeded", "free some space, or keep fewer checkpoints (keep_checkpoint_max)"),
    ("Permission denied", "give a directory that this user may write to"),
    ("Read-only file system", "give a directory that can be written to"),
)


def explain(final: Path, failure: str) -> str:
    """Return why a checkpoint was not written, and what to do."""
    remedy = next((remedy for text, remedy in _REMEDIES if text in failure), "")
    return f"checkpoint {final} was not saved, earlier ones are untouched: {failure}" + (
        f"; {remedy}" if remedy else ""
    )
