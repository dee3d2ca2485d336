"""set_param_ps: which parameters of a network live on the parameter servers, and where a worker's optimizer steps them.

Gradients of these go to the servers, and are gone for the optimizer. One message to every server brings all gradients
of a step; its reply brings the new values of parameters that every worker has whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from msrun.errors import ParallelError, StrategyError, UsageError, near_miss
from msrun.runtime import world
from msrun.runtime.embedding.lookup import EmbeddingLookup
from msrun.runtime.embedding.table_cache import RowCache
from msrun.runtime.execute.gradients import summed_rows
from msrun.runtime.nn.deferred_init import init_parameters
from msrun.runtime.parts.on_servers import VALUE, before_remote_steps, find_remote, find_remotes, on_servers
from msrun.runtime.tensors.plain_tensors import put_value
from msrun.server.connection import MAX_BODY_BYTES, Message, ask, count_servers
from msrun.server.remote import (
    Fill,
    Piece,
    RemoteParameter,
    Table,
    check_embedding,
    count_numbers,
    cut_rows,
    cut_table,
    divert_fills,
    empty_like_nan,
    number_rows,
    numbers,
    pull_rows,
    split_numbers,
)
from msrun.server.shard import describe_group, name_optimizer

_BATCH_BYTES = MAX_BODY_BYTES // 2
_told: WeakSet[torch.optim.Optimizer] = WeakSet()


@functools.cache
def send_gradients_at_steps() -> None:
    """Do so from now on, with all optimizers; once in a process."""
    register_optimizer_step_pre_hook(_before_step)


@dataclass
class _Batch:
    """One request to one server."""

    pushes: list[list[Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    pulls: list[tuple[RemoteParameter, Piece, Tensor]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    size: int = 0

    def message(self) -> Message:
        pulls = [remote.key(piece) for remote, piece, _ in self.pulls]
        return Message("step", {"pushes": self.pushes, "groups": self.groups, "pulls": pulls}, self.tensors)

    def add(
        self, remote: RemoteParameter, piece: Piece, group: dict[str, Any], tensors: list[Tensor], how: str
    ) -> None:
        if not self.groups or self.groups[-1] != group:
            self.groups.append(group)
        self.pushes.append([remote.key(piece), how, len(self.groups) - 1])
        self.tensors += tensors


@torch.no_grad()
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    groups = [(group, list(find_remotes(group["params"]))) for group in optimizer.param_groups]
    if not any(found for _, found in groups):
        return
    if any(callable(value) for value in [*args[1:], *kwargs.values()]):  # args[0] is the optimizer
        raise ParallelError("optimizer.step(closure) with parameters on servers: compute the loss before step()")
    name = name_optimizer(optimizer)
    described = [(describe_group(group), found) for group, found in groups]
    for group, found in described:
        for parameter, remote in found:
            _introduce(optimizer, parameter, remote, name, group)
    for prepare in before_remote_steps:
        prepare(optimizer)
    for _, found in described:
        for parameter, remote in found:
            if optimizer.state.get(parameter):  # loaded with load_state_dict
                _give_state(optimizer, parameter, remote)
    _exchange(described)


def _introduce(
    optimizer: torch.optim.Optimizer, parameter: Tensor, remote: RemoteParameter, name: str, group: dict[str, Any]
) -> None:
    if not remote.is_placed:
        remote.place(parameter.detach())
        if remote.is_table:
            parameter.data = empty_like_nan(parameter)
    if not remote.optimizer:
        remote.configure(name, group)
        _tell_of_state(optimizer)


def _give_state(optimizer: torch.optim.Optimizer, parameter: Tensor, remote: RemoteParameter) -> None:
    """Send what the optimizer here knows of a parameter, rank 0's, and forget it."""
    state = optimizer.state.pop(parameter)
    if world.get_rank() != 0:
        return
    shaped = {key: value for key, value in state.items() if _has_shape(value, parameter, key)}
    for key, value in shaped.items():
        remote.write(key, 0, remote.rows_of(value))
    remote.write_numbers({key: value for key, value in state.items() if key not in shaped})


def _has_shape(value: Any, parameter: Tensor, key: str) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and (value.dim() > 0 or key != "step")


def _exchange(described: list[tuple[dict[str, Any], list[tuple[Tensor, RemoteParameter]]]]) -> None:
    """Send all gradients, and take new values for the parameters that are whole here."""
    rounds: dict[int, list[_Batch]] = {}
    for group, found in described:
        for parameter, remote in found:
            for piece, tensors, how in _cut_gradient(parameter.grad, remote):
                batches = rounds.setdefault(piece.server, [_Batch()])
                size = sum(tensor.nbytes for tensor in tensors) + remote.pulled_bytes(piece)
                if batches[-1].pushes and batches[-1].size + size > _BATCH_BYTES:
                    batches.append(_Batch())
                batches[-1].add(remote, piece, group, tensors, how)
                batches[-1].size += size
                if not remote.is_table:
                    batches[-1].pulls.append((remote, piece, parameter))
            parameter.grad = None
            remote.pushed += 1
    for number in range(max(map(len, rounds.values()))):
        batches_now = {server: batches[number] for server, batches in rounds.items() if number < len(batches)}
        replies = ask({server: batch.message() for server, batch in batches_now.items()})
        for server, batch in batches_now.items():
            for (remote, piece, parameter), values in zip(batch.pulls, replies[server].tensors, strict=True):
                piece.of(remote.rows_of(parameter.detach())).copy_(values)


def _cut_gradient(gradient: Tensor | None, remote: RemoteParameter) -> Iterator[tuple[Piece, list[Tensor], str]]:
    """Yield for every piece what is sent of a gradient, and how."""
    if gradient is None:
        yield from ((piece, [], "none") for piece in remote.pieces)
    elif gradient.is_sparse:
        numbers = number_rows(remote.pieces, gradient._indices()[0].to("cpu"))
        numbers, values = summed_rows(numbers, gradient._values().to("cpu"))
        for piece, part, own in split_numbers(remote.pieces, numbers):
            yield piece, [own, values[part]], "sparse" if remote.is_sparse else "rows"
    else:
        gradient = remote.rows_of(gradient)
        yield from ((piece, [piece.of(gradient)], "dense") for piece in remote.pieces)


def _tell_of_state(optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer.state_dict()` hold the state that the servers have."""
    if optimizer not in _told:
        _told.add(optimizer)
        optimizer.register_state_dict_post_hook(_add_state)


def _add_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        remote = find_remote(parameter)
        if remote is not None and remote.optimizer and not optimizer.state.get(parameter):
            numbers, dtypes = remote.describe_state()
            state_dict["state"][number] = {**numbers, **{key: remote.read_all(key, dtypes[key]) for key in dtypes}}


_DEFAULTS: dict[str, Any] = {"enable_ps": False, "staleness": 0, "vocab_cache_size": 0}
_ELSEWHERE = {
    "config_file_path": "msrun's options take its place",
    "scheduler_manage_port": "msrun --status shows the job",
    "enable_ssl": "connections to parameter servers are not encrypted",
    "client_password": "servers and workers prove with a token of the job who they are",
    "server_password": "servers and workers prove with a token of the job who they are",
}
"""MindSpore's other words -> why they are not needed."""
_chosen: dict[str, Any] = {}


def set_ps_context(**words: Any) -> None:
    """Say that parameters may live on parameter servers. Every rank calls it before `set_param_ps`.

    Args:
        words: `enable_ps`, True or False. `staleness` (not in MindSpore): how many steps a worker may be ahead of the
            slowest one; 0, the default, trains as one process does. `vocab_cache_size` (in MindSpore a setting of its
            EmbeddingLookup): how many rows of each table a worker keeps beside its device, those looked up last; it
            pulls a row again when steps that it may not lack have been made since. 0, the default: none. The last two
            hold for the `set_param_ps` that follow.

    Raises:
        UsageError: an unknown word, or a value out of its range.
    """
    for word, value in words.items():
        if word in _ELSEWHERE:
            raise UsageError(f"set_ps_context({word}=...): leave it out; {_ELSEWHERE[word]}")
        _check_word("set_ps_context", word)
        if word == "enable_ps" and not isinstance(value, bool):
            raise UsageError(f"set_ps_context(enable_ps={value!r}): must be True or False")
        if word in ("staleness", "vocab_cache_size") and (type(value) is not int or value < 0):
            raise UsageError(f"set_ps_context({word}={value!r}): must be a whole number, 0 or more")
    _chosen.update(words)


def get_ps_context(attr_key: str) -> Any:
    """Return what was set for a word, or its default.

    Raises:
        UsageError: an unknown word.
    """
    _check_word("get_ps_context", attr_key)
    return _chosen.get(attr_key, _DEFAULTS[attr_key])


def reset_ps_context() -> None:
    """Put every word back to its default; parameters on servers stay there."""
    _chosen.clear()


def _check_word(function: str, word: str) -> None:
    if word not in _DEFAULTS:
        raise UsageError(
            f"{function}({word!r}): unknown word{near_miss(word, _DEFAULTS)}; known are {', '.join(_DEFAULTS)}"
        )


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def set_param_ps(
    module_or_parameter: nn.Module | nn.Parameter, recurse: bool = True, init_in_server: bool = False
) -> None:
    """Let parameters live on the servers of the job (`msrun --server_num N`), and be stepped there.

    Every rank calls it after `init()` and `set_ps_context(enable_ps=True)`, for the same modules in the same order, and
    then trains as always: `optimizer.step()` sends gradients to the servers, which average them over all ranks and
    step with the optimizer's settings of this moment. The table of an `nn.Embedding` is pulled row by row, those rows
    that a batch names; its weight keeps shape and type but no memory from its first call on. Other parameters are
    whole on every rank, and have their new values when `step()` returns. Until the first call or step the values are
    the rank's own, to be initialised and loaded as others are; rank 0's go to the servers. The same holds for the
    table of an `EmbeddingLookup`.

    Args:
        module_or_parameter: all parameters of a module, or one parameter, which is then pulled whole.
        recurse: also those of modules below.
        init_in_server: the servers make the tables at this call, and no worker ever has one whole: those of modules
            that were built inside `no_init_parameters()`. The values are the ones that the same lines would have made
            on a worker. Parameters that are pulled whole are made as without it.

    Raises:
        UsageError: called before `init()` or `set_ps_context`, or in a job without servers.
        StrategyError: not a module or parameter, a parameter that is not floating-point, an embedding with max_norm or
            scale_grad_by_freq, an EmbeddingLookup that the ranks share out, or with init_in_server a table that has
            values already, or is initialised in a way that servers do not know.
    """
    _check_job()
    if isinstance(module_or_parameter, nn.Parameter):
        _add(module_or_parameter, "a parameter", None)
    elif isinstance(module_or_parameter, nn.Module):
        modules = list(module_or_parameter.modules()) if recurse else [module_or_parameter]
        owned = _owners(modules)
        fills = _make_in_servers(owned) if init_in_server else {}
        init_parameters(module_or_parameter)
        for parameter, owners in owned.items():
            _add_owned(parameter, owners, fills.get(parameter))
    else:
        raise StrategyError(f"set_param_ps({type(module_or_parameter).__name__}): give a module or an nn.Parameter")
    send_gradients_at_steps()


def _check_job() -> None:
    if not world.is_initialized():
        raise UsageError("set_param_ps before init(): call init() first")
    if not get_ps_context("enable_ps"):
        raise UsageError("set_param_ps without set_ps_context(enable_ps=True): call that first")
    if not count_servers():
        raise UsageError("set_param_ps in a job without parameter servers: start it with msrun --server_num 1 or more")


def _owners(modules: Iterable[nn.Module]) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return parameter -> the modules that have it themselves, and its name there."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    return owners


def _is_looked_up(module: nn.Module, name: str) -> TypeGuard[Table]:
    return any(
        isinstance(module, kind) and type(module).forward is kind.forward and name == own
        for kind, own in ((nn.Embedding, "weight"), (EmbeddingLookup, "embedding_table"))
    )


def _tables(owners: list[tuple[nn.Module, str]]) -> list[Table]:
    """Return the modules that look rows up in a parameter; none where others need all of it."""
    tables = [module for module, name in owners if _is_looked_up(module, name)]
    return tables if len(tables) == len(owners) else []


def _label(owners: list[tuple[nn.Module, str]]) -> str:
    first, name = owners[0]
    return f"{type(first).__name__}.{name}"


def _make_in_servers(owned: dict[nn.Parameter, list[tuple[nn.Module, str]]]) -> dict[nn.Parameter, list[Fill]]:
    """Let tables be made by the servers; here they have no memory. All ranks call it together."""
    labels = {p: _label(owners) for p, owners in owned.items() if _tables(owners) and find_remote(p) is None}
    for parameter, label in labels.items():
        if not parameter.is_meta:
            raise StrategyError(
                f"set_param_ps(init_in_server=True): {label} has values on this worker already: build the network "
                "inside no_init_parameters()"
            )
    fills = divert_fills(labels)
    for parameter in labels:
        put_value(parameter, empty_like_nan(parameter.detach(), torch.device("cpu")))
    return fills


def _add_owned(parameter: nn.Parameter, owners: list[tuple[nn.Module, str]], fills: list[Fill] | None) -> None:
    tables = _tables(owners)
    for table in tables:
        check_embedding(table)
    remote = _add(parameter, _label(owners), tables[0] if tables else None)
    if remote is None:
        return
    if fills is not None:
        remote.place(None, fills)
    for table in tables:
        pull_rows(table, remote)
    for module, own_name in owners:
        _tell_state_dicts(module, own_name, remote)
        module.register_forward_pre_hook(_refuse_ddp)


_seen: WeakSet[DistributedDataParallel] = WeakSet()
"""That leave parameters on servers alone: msrun's own."""


def _refuse_ddp(module: nn.Module, _: Any) -> None:
    """Refuse to run inside a DDP that would average what the servers average."""
    ddp = DistributedDataParallel._active_ddp_module  # a test looks after this name
    if ddp is None or ddp in _seen:
        return
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ddp.parameters_to_ignore and find_remote(parameter) is not None:
            raise StrategyError(
                f"DistributedDataParallel around {type(module).__name__} with {name} on parameter servers, which "
                'average its gradients: use AutoParallel(net, "data_parallel")'
            )
    _seen.add(ddp)


def _add(parameter: nn.Parameter, label: str, table: Table | None) -> RemoteParameter | None:
    """Note a parameter; None when it was already."""
    if find_remote(parameter) is not None:
        return None
    shape, dtype = tuple(parameter.shape), parameter.dtype
    label = f"{label} of shape {shape}"
    if dtype not in _DTYPES or parameter.numel() == 0:
        raise StrategyError(f"set_param_ps: {label} and {dtype}: only floating-point values can be on servers")
    number, servers = next(numbers), count_servers()
    pieces = cut_table(shape[0], servers) if table is not None else cut_rows(shape, dtype, servers, number % servers)
    staleness = get_ps_context("staleness")
    is_sparse = table is not None and table.sparse
    size = get_ps_context("vocab_cache_size") if table is not None else 0
    if isinstance(table, EmbeddingLookup):
        size = table.vocab_cache_size or size
    cache = RowCache(count_numbers(pieces), size) if size else None
    remote = RemoteParameter(number, label, shape, dtype, pieces, staleness, table is not None, is_sparse, cache)
    on_servers[parameter] = remote
    return remote


def _tell_state_dicts(module: nn.Module, name: str, remote: RemoteParameter) -> None:
    """Let `state_dict()` hold a table that the servers have, and refuse or pass on what `load_state_dict` brings."""

    def fill(_module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        value = state_dict.get(prefix + name)
        if remote.is_table and remote.is_placed and not isinstance(value, nn.Parameter):  # else keep_vars=True
            state_dict[prefix + name] = remote.read_all(VALUE, remote.dtype)

    def load(_module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        value, errors = state_dict.get(prefix + name), others[-1]
        if not remote.is_placed or not isinstance(value, Tensor):
            return
        if remote.is_table:
            errors.append(
                f"{prefix}{name} is on the servers already: load before the first step, or with load_checkpoint"
            )
        elif world.get_rank() == 0 and value.shape == remote.shape:
            remote.write(VALUE, 0, remote.rows_of(value.to(remote.dtype)))

    module.register_state_dict_post_hook(fill)
    module.register_load_state_dict_pre_hook(load)
