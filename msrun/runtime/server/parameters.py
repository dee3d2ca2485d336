"""set_param_ps: which parameters of a network live on the parameter servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from msrun.errors import StrategyError, UsageError, near_miss
from msrun.runtime import world
from msrun.runtime.embedding.lookup import EmbeddingLookup
from msrun.runtime.embedding.table_cache import RowCache
from msrun.runtime.nn.deferred_init import init_parameters
from msrun.runtime.server.connection import count_servers
from msrun.runtime.server.lookup import Table, check_embedding, empty_like_nan, pull_rows
from msrun.runtime.server.remote import (
    VALUE,
    Fill,
    RemoteParameter,
    count_numbers,
    cut_rows,
    cut_table,
    divert_fills,
    find_remote,
    next_number,
    note_remote,
)
from msrun.runtime.server.stepping import send_gradients_at_steps
from msrun.runtime.tensors.plain_tensors import put_value

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
    """Let tables be made by the servers; here they have no memory. All ranks call it together.

    Raises:
        StrategyError: one has values already, or such that servers cannot make.
    """
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
    """Refuse to run inside a DDP that would average what the servers average.

    Raises:
        StrategyError: it would.
    """
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
    number, servers = next_number(), count_servers()
    pieces = cut_table(shape[0], servers) if table is not None else cut_rows(shape, dtype, servers, number % servers)
    staleness = get_ps_context("staleness")
    is_sparse = table is not None and table.sparse
    size = get_ps_context("vocab_cache_size") if table is not None else 0
    if isinstance(table, EmbeddingLookup):
        size = table.vocab_cache_size or size
    cache = RowCache(count_numbers(pieces), size) if size else None
    remote = RemoteParameter(number, label, shape, dtype, pieces, staleness, table is not None, is_sparse, cache)
    note_remote(parameter, remote)
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
