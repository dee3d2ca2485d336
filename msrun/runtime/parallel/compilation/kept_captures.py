"""Captures that one rank makes for all others, or that are kept for the next start of a job.

What is handed on was made of one call before any parameter was placed, for all ranks alike: the guards, the graph and
the local program. Its name is a digest of whatever a capture depends on and no guard looks at. Files of it are in a
folder of the user's alone; one that is damaged, somebody else's, of other versions or of another call is not read, and
the call is captured.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from msrun import contract
from msrun.runtime import world
from msrun.runtime.agreement import decide
from msrun.runtime.capture.dynamo import given_to
from msrun.runtime.capture.graph_pickle import dump, load
from msrun.runtime.capture.marked_calls import find_marked
from msrun.runtime.capture.portable import UnportableError, hash_of, text_of, text_of_modules
from msrun.runtime.capture.portable_trace import PortableTrace
from msrun.runtime.parallel.batch.divided_batch import DividedBatch, find_parts
from msrun.runtime.parallel.batch.parts import find_tensors
from msrun.runtime.parallel.compilation.compilation import Compilation, Draft
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.parallel.host_operators import targets_in
from msrun.runtime.parallel.plan import READ
from msrun.runtime.parallel.precision import autocast
from msrun.runtime.parallel.recomputation import recomputed_in

_MAGIC = b"msrun capture 1\n"
_OFF = ("off", "0", "no", "false")
_SHARE = "share"
_NOWHERE = ("", _SHARE, *_OFF)
"""Settings with which nothing is kept."""
_ON = ("on", "1", "yes", "true")
_MOST_BYTES = 256 << 20
"""Of all files; the ones that were used longest ago go."""
_MOST_ALIKE = 8
"""Files of one name that are looked at: calls that differ only in what guards look at."""
_SUFFIX = ".capture"
"""Of files of this module: what else lies in a folder that the user names is nobody's business here."""
_ABANDONED_S = 3600
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def find_folder() -> Path | None:
    """Return where captures are kept; None: they are not.

    Raises:
        RuntimeError: the user has no home.
    """
    given = os.environ.get(contract.MSRUN_CAPTURE_CACHE, "")
    if given.lower() in _NOWHERE:
        return None
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "msrun" / "captures"
    return own if given.lower() in _ON else Path(given)


# -- files -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder that is the user's alone; it is made if it is not there.

    Raises:
        OSError: it cannot be made, is a link, or others may write into it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, _FOLDER)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{folder} is not of this user alone")
        yield descriptor
    finally:
        os.close(descriptor)


def _read_file(folder: int, name: str) -> bytes:
    """Return what was written under a name.

    Raises:
        OSError: it is no file of this user's.
        ValueError: it is damaged.
    """
    descriptor = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{name} is no file of this user's")
        content = file.read()
    size = len(_MAGIC) + hashlib.sha256().digest_size
    if not content.startswith(_MAGIC) or hashlib.sha256(content[size:]).digest() != content[len(_MAGIC) : size]:
        raise ValueError(f"{name} is damaged")
    with contextlib.suppress(OSError):
        os.utime(name, dir_fd=folder, follow_symlinks=False)
    return content[size:]


def _write_file(folder: int, name: str, content: bytes) -> None:
    """Write a file at once: who reads it meanwhile finds the old one, or none."""
    new = f".{os.getpid()}.{secrets.token_hex(8)}{_SUFFIX}"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(content).digest() + content)
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(new, dir_fd=folder)
        raise


def _names(folder: int) -> list[tuple[float, int, str]]:
    """Return when each capture was used last, its bytes and its file's name, the newest first."""
    found = []
    for name in filter(lambda name: name.endswith(_SUFFIX), os.listdir(folder)):
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            found.append((status.st_mtime, status.st_size, name))
    return sorted(found, reverse=True)


def _drop_oldest(folder: int) -> None:
    total = 0
    for used_s, size, name in _names(folder):
        total += size
        is_abandoned = name.startswith(".") and time.time() - used_s > _ABANDONED_S
        if is_abandoned or total > _MOST_BYTES:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)


# -- what is in them ---------------------------------------------------------------------------------------------------


@functools.cache
def _versions() -> str:
    """Return what tells apart the programs that make captures: versions, and what is in the files of this package."""
    own = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        own.update(f"{path} {path.stat().st_size}\n".encode() + path.read_bytes())
    return f"{sys.version} {os.uname().machine} {torch.__version__} {torch.version.git_version} {own.hexdigest()}"


@dataclass
class KeptCapture:
    """The place of one call among the captures that are kept."""

    compilation: Compilation
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
    folder: Path | None
    """Where it is kept; None: nowhere, it is for the other ranks alone."""
    name: str
    """Digest of what a capture depends on, beside what is guarded."""
    known: dict[int, str] = field(default_factory=dict)
    """id of an object of the process -> its name in every process"""
    named: dict[str, Any] = field(default_factory=dict)
    _state: tuple[Any, ...] = ()
    """What the call that was read has left to later ones."""

    @classmethod
    def of(
        cls,
        compilation: Compilation,
        wrappers: Sequence[DividedBatch],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        is_shared: bool,
    ) -> KeptCapture | None:
        """Return that of a call; None where captures are neither kept nor, as far as this rank knows, shared.

        Raises:
            UnportableError: it is not that of a call of another process.
            RuntimeError: the user has no home.
        """
        folder = find_folder()
        if world.simulation_level() is not None or (folder is None and not is_shared):
            return None
        call = compilation.target.call, tuple(args), dict(kwargs)
        made = cls(compilation, call, folder, "")
        root = compilation.target.root
        named = {
            **{f"module {name}": value for name, value in root.named_modules()},
            **{f"parameter {name}": value for name, value in root.named_parameters()},
            **{f"buffer {name}": value for name, value in root.named_buffers()},
            "settings": compilation.settings,
        }
        made.named, made.known = named, {id(value): name for name, value in named.items()}
        state = compilation.state_for(find_tensors(args, kwargs), find_parts(wrappers))
        made.name = hash_of(made._text(wrappers, state))
        return made

    def _text(self, wrappers: Sequence[DividedBatch], state: tuple[Any, ...]) -> str:
        compilation, root = self.compilation, self.compilation.target.root
        function, args, kwargs = self.call
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if compilation.settings.strategies_from is not None:
            raise UnportableError("a file of strategies")
        process = world.get_group_size(), world.device().type, torch.get_default_dtype()
        parts = [
            process,
            [_of_leaf(leaf) for leaf in leaves],
            state,
            (strategies_of(root), targets_in(root), recomputed_in(root)),
            [(wrapper.kind, wrapper.parts, vars(wrapper).get("stage_config")) for wrapper in wrappers],
            None if function is root else function,
        ]
        known = {key: name for key, name in self.known.items() if name != "settings"}
        return "\n".join([_versions(), str(spec), text_of_modules(root), text_of(parts, known)])

    def read(self) -> Draft | None:
        """Return what is kept of the call, if it does the same here; nothing is exchanged."""
        if self.folder is None:
            return None
        try:
            with _opened(self.folder) as folder:
                names = [name for *_, name in _names(folder) if name.startswith(f"{self.name}.")][:_MOST_ALIKE]
                for name in names:
                    with contextlib.suppress(Exception):  # it is damaged, or not of this call
                        return self._load(_read_file(folder, name))
        except OSError:
            pass
        return None

    def take(self, name: str, content: bytes) -> Draft | None:
        """Return what rank 0 made of its call, if that is this one and does the same here."""
        if name.startswith(f"{self.name}."):
            with contextlib.suppress(Exception):
                return self._load(content)
        return None

    def _load(self, content: bytes) -> Draft:
        root = self.compilation.target.root
        trace, draft, constants = load(content, {})
        portable: PortableTrace = load(trace, self.named)
        traced = portable.load(self.call, self.known, find_marked(root, strategies_of(root)))
        given = given_to(traced, *self.call) if constants else []
        named = self.named | {f"constant {name}": given[index] for name, index in constants.items()}
        found, state = load(draft, named)
        captured = replace(found.captured, traced=traced)
        found = replace(found, captured=captured, recompute=recomputed_in(root))
        self._state = state
        return found

    def use(self, draft: Draft) -> None:
        """Go on with what was read, as all ranks do."""
        self.compilation.go_on_from(draft, find_tensors(*self.call[1:]), self._state)

    def pack(self, draft: Draft) -> tuple[str, bytes]:
        """Return what was made of the call under its name.

        Raises:
            Exception: it is of this process alone.
        """
        captured = draft.captured
        portable = PortableTrace.of(captured.traced, self.call, self.known)
        places = {name: index for index, name in enumerate(captured.placeholders) if name is not None}
        constants = {name: places[name] for name in captured.constants if name in places}
        known = self.known | {id(captured.constants[name]): f"constant {name}" for name in constants}
        nothing: Any = None
        plain = replace(draft, captured=replace(captured, traced=nothing), recompute={})
        state = self.compilation.state_for(find_tensors(*self.call[1:]), draft.parts)
        content = dump((dump(portable, self.known), dump((plain, state), known), constants), {})
        return f"{self.name}.{portable.guards.text[:16]}{_SUFFIX}", content

    def write(self, name: str, content: bytes) -> str:
        """Keep what was made of the call, where that is wanted; returns where.

        Raises:
            OSError: it cannot be written.
        """
        if self.folder is None:
            return ""
        with _opened(self.folder) as folder:
            _write_file(folder, name, content)
            _drop_oldest(folder)
        return f"kept in {self.folder}"


def _of_leaf(leaf: Any) -> Any:
    """Return what of an argument makes a call another one, whatever is read of it."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, type(leaf)
    return leaf if type(leaf) in (int, float, bool, str, type(None)) else type(leaf)


def _not_kept(error: Exception) -> str:
    """Say why a capture is not kept, where that is wanted: it trains all the same, and is made again next time."""
    if os.environ.get(contract.MSRUN_CAPTURE_CACHE, "").lower() in _NOWHERE:
        return ""
    is_told = isinstance(error, UnportableError)
    return f"not kept: {error} is of this process alone" if is_told else f"not kept: {type(error).__name__}: {error}"


def _is_shared(compilation: Compilation) -> bool:
    """Return whether rank 0 could capture for this rank: where each has a core for itself, nothing would be gained."""
    given = os.environ.get(contract.MSRUN_CAPTURE_CACHE, "").lower()
    is_crowded = world.get_local_rank_size() > len(os.sched_getaffinity(0))
    return given not in _OFF and (is_crowded or given == _SHARE) and compilation.settings.search is None


def find_or_make(
    compilation: Compilation,
    wrappers: list[DividedBatch],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    make: Callable[..., Draft],
    *,
    is_divided: bool,
) -> tuple[Draft, str]:
    """Return what is kept of a call, if it is so on all ranks, or what is made of it; and where it was or is kept.

    All ranks call it together. Where all hosts have fewer cores than ranks, or where it is asked for, rank 0 captures
    for the others.

    Args:
        is_divided: into stages; such a call is captured by every rank.
    """
    place, draft, kept = None, None, ""
    is_shared = _is_shared(compilation) and not is_divided
    with autocast(compilation.settings.precision):
        try:
            if is_divided and find_folder() is not None:
                raise UnportableError("the division of a pipeline")
            place = KeptCapture.of(compilation, wrappers, args, kwargs, is_shared=is_shared)
            draft = None if place is None else place.read()
        except Exception as error:  # noqa: BLE001  # whatever it is, the call is captured as ever
            kept = _not_kept(error)
    everyone = compilation.exchange((draft is not None, is_shared and place is not None))
    if place is not None and draft is not None and all(is_there for is_there, _ in everyone):
        place.use(draft)
        return draft, f"{READ}{place.folder}"
    is_shared = all(is_shared for _, is_shared in everyone)
    is_first = not world.get_rank()
    packed = "", b""
    if is_shared and not is_first:
        assert place is not None
        packed = decide(lambda: packed)
        with autocast(compilation.settings.precision):
            draft = place.take(*packed)
        if draft is not None:
            if not world.get_local_rank():
                with contextlib.suppress(OSError):
                    place.write(*packed)
            place.use(draft)
            return draft, f"{READ}rank 0"
    try:
        draft = make(compilation, wrappers, args, kwargs)
        if place is not None and (is_first or not world.get_local_rank()):
            try:
                with autocast(compilation.settings.precision):
                    packed = place.pack(draft)
                    kept = place.write(*packed)
            except Exception as error:  # noqa: BLE001
                kept = _not_kept(error)
        draft.captured.traced.output = None
    finally:
        if is_shared and is_first:  # also when there is no capture, which the others find out, too
            decide(lambda: packed)
    return draft, kept
