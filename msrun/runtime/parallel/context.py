"""set_auto_parallel_context: MindSpore's older way to say how to run in parallel.

Words set here are the defaults of every AutoParallel made afterwards, and `Model(network, loss_fn, optimizer)` runs its
network in the mode that is set. They live in a context variable: other threads and tasks have their own. Words and
ranges are those of `mindspore.context.set_auto_parallel_context`; a word that nothing here obeys is refused.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from msrun.errors import StrategyError, near_miss
from msrun.runtime import world
from msrun.runtime.parallel.parameters.fusion import parse_comm_fusion
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec
from msrun.runtime.parallel.pipeline.pipeline import PipelineSpec
from msrun.runtime.parallel.pipeline.schedule import choose_schedule
from msrun.runtime.parallel.precision import Compat, check_compat, current_compat, find_compat
from msrun.runtime.parallel.settings import RECURSIVE, ParallelSettings, SearchSettings, check_mode, check_search_mode

_SEARCH_NAMES = ("search_mode", "auto_parallel_search_mode")
"""One word and its alias."""
Check = Callable[[str, Any], object]
_chosen: ContextVar[Mapping[str, Any]] = ContextVar("auto_parallel_context", default=MappingProxyType({}))


class ParallelMode:
    """MindSpore's names of the modes, for `set_auto_parallel_context(parallel_mode=...)`."""

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"


def set_auto_parallel_context(**words: Any) -> None:
    """Set defaults for every AutoParallel and Model made afterwards; words not named stay as they are.

    Args:
        words: device_num, global_rank (checked against the world), parallel_mode, gradients_mean, gradient_fp32_sync,
            parameter_broadcast, dataset_strategy, full_batch, enable_parallel_optimizer, parallel_optimizer_config
            (gradient_accumulation_shard, parallel_optimizer_threshold, optimizer_weight_shard_size, optimizer_level),
            optimizer_weight_shard_size, force_fp32_communication, strategy_ckpt_save_file, group_ckpt_save_file (paths
            of files that are written at the first call of every AutoParallel), search_mode or its alias
            auto_parallel_search_mode and sharding_propagation (how AUTO_PARALLEL searches; recursive_programming by
            default), strategy_ckpt_load_file (how checkpoints
            given to `load_distributed_checkpoint` were cut); and our own `compat`, "torch" or "mindspore", which also
            says what datasets without `num_shards` read.

    Raises:
        StrategyError: an unknown word, a value out of its range, or a word that nothing here obeys. Then nothing is
            changed.
    """
    for word, value in words.items():
        if word in _REFUSED:
            accepted, remedy = _REFUSED[word]
            if type(value) is not type(accepted) or value != accepted:
                raise StrategyError(f"set_auto_parallel_context({word}={value!r}): {remedy}")
        elif word in _WORDS:
            _WORDS[word][0](word, value)
        else:
            known = [*_WORDS, *_REFUSED]
            raise StrategyError(
                f"set_auto_parallel_context({word}=...): unknown word{near_miss(word, known)}; "
                f"known are {', '.join(_WORDS)}"
            )
    current_compat.set(words.pop("compat", current_compat.get()))
    _chosen.set({**_chosen.get(), **words})


def get_auto_parallel_context(name: str) -> Any:
    """Return what was set for a word, or what is done when nothing was.

    Raises:
        StrategyError: an unknown word.
    """
    chosen = _chosen.get()
    if name in chosen:
        return chosen[name]
    if name in _REFUSED:
        return _REFUSED[name][0]
    if name not in _WORDS:
        raise StrategyError(
            f"get_auto_parallel_context({name!r}): unknown word{near_miss(str(name), [*_WORDS, *_REFUSED])}"
        )
    default = _WORDS[name][1]
    return default(chosen) if callable(default) else copy.copy(default)


def reset_auto_parallel_context() -> None:
    """Forget every word that was set."""
    current_compat.set(None)
    _chosen.set(MappingProxyType({}))


def default_settings(parallel_mode: str | None, compat: Compat | None) -> ParallelSettings:
    """Return the settings of a new AutoParallel: what its caller says, else the context, else the process's."""
    chosen = _chosen.get()
    _check_place(chosen)
    word = parallel_mode if parallel_mode is not None else chosen.get("parallel_mode", "semi_auto")
    settings = ParallelSettings(word, compat or find_compat(), search=_search(word, chosen))
    changes = _changes(chosen)
    for setter, values in changes.items():
        settings.check_setter(setter, values)
    return replace(settings, **{key: v for values in changes.values() for key, v in values.items()})


def _search(word: str, chosen: Mapping[str, Any]) -> SearchSettings | None:
    """Return how AUTO_PARALLEL searches: as the context says, else by recursive programming."""
    given = {name: chosen[name] for name in _SEARCH_NAMES if name in chosen}
    if chosen.get("sharding_propagation"):
        given["sharding_propagation"] = "sharding_propagation"
    if len(set(given.values())) > 1:
        raise StrategyError(f"{' and '.join(f'{name}={mode!r}' for name, mode in given.items())}: set one of them")
    return SearchSettings(next(iter(given.values()))) if given and word == ParallelMode.AUTO_PARALLEL else None


@dataclass(frozen=True)
class LayoutFiles:
    """Files that tell how a network was cut; "" for those that nobody wants."""

    strategy: str = ""
    group: str = ""

    @property
    def is_wanted(self) -> bool:
        """Whether there is something to write."""
        return bool(self.strategy or self.group)


def layout_files() -> LayoutFiles:
    """Return the files that a new AutoParallel is to write."""
    chosen = _chosen.get()
    return LayoutFiles(str(chosen.get("strategy_ckpt_save_file", "")), str(chosen.get("group_ckpt_save_file", "")))


def has_parallel_mode() -> bool:
    """Return whether the context wants networks to run in parallel."""
    return check_mode(_chosen.get().get("parallel_mode", "stand_alone")) != "stand_alone"


def _changes(chosen: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return setter of AutoParallel -> what it would change."""
    changes: dict[str, dict[str, Any]] = {}
    if "gradients_mean" in chosen:
        changes["enable_gradients_mean"] = {"gradients_mean": chosen["gradients_mean"]}
    if "parameter_broadcast" in chosen:
        changes["parameter_broadcast"] = {"parameter_broadcast": chosen["parameter_broadcast"]}
    if "gradient_fp32_sync" in chosen or "force_fp32_communication" in chosen:
        wide = chosen.get("gradient_fp32_sync", True) or chosen.get("force_fp32_communication", False)
        changes["enable_fp32_communication"] = {"gradient_fp32_sync": wide}
    if "dataset_strategy" in chosen or chosen.get("full_batch"):
        strategy = chosen.get("dataset_strategy", "full_batch")
        if chosen.get("full_batch") and strategy != "full_batch":
            raise StrategyError(f"full_batch=True and dataset_strategy={strategy!r}: set one of them")
        changes["dataset_strategy"] = {"dataset_strategy": strategy}
    if chosen.get("enable_parallel_optimizer"):
        changes["hsdp"] = {"hsdp": _hsdp(chosen)}
    if "comm_fusion" in chosen:
        changes["comm_fusion"] = {"comm_fusion": parse_comm_fusion(chosen["comm_fusion"])}
    if chosen.get("pipeline_stages", 1) > 1:
        changes["pipeline"] = {"pipeline": _pipeline(chosen)}
    return changes


def _pipeline(chosen: Mapping[str, Any]) -> PipelineSpec:
    return PipelineSpec(
        chosen["pipeline_stages"],
        chosen.get("pipeline_scheduler", "1f1b"),
        chosen.get("pipeline_interleave", False),
        chosen.get("pipeline_result_broadcast", False),
    )


def _hsdp(chosen: Mapping[str, Any]) -> HsdpSpec:
    config = chosen.get("parallel_optimizer_config", {})
    level = "level2" if config.get("gradient_accumulation_shard") else "level1"
    size = config.get("optimizer_weight_shard_size", chosen.get("optimizer_weight_shard_size", -1))
    return HsdpSpec(size, config.get("parallel_optimizer_threshold", 64), config.get("optimizer_level", level))


def _check_place(chosen: Mapping[str, Any]) -> None:
    for word, actual in (("device_num", world.get_group_size()), ("global_rank", world.get_rank())):
        if word not in chosen:
            continue
        if not world.is_initialized():
            raise StrategyError(f"{word}={chosen[word]} is checked against the world: call init() before AutoParallel")
        if chosen[word] != actual:
            raise StrategyError(f"{word}={chosen[word]}, but in this process it is {actual}: leave it out")


# -- words and their ranges ---------------------------------------------------------------------------------------


def _refuse(word: str, value: Any, constraint: str) -> StrategyError:
    return StrategyError(f"set_auto_parallel_context({word}={value!r}): must be {constraint}")


def _is_switch(word: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(word, value, "True or False")


def _is_number(low: int, high: int) -> Callable[[str, Any], None]:
    def check(word: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _refuse(word, value, f"a whole number from {low} to {high}")

    return check


def _is_shard_size(word: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise _refuse(word, value, "a whole number above 0, or -1 for all ranks")


def _is_optimizer_config(word: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise _refuse(word, value, f"a dict with some of {', '.join(_OPTIMIZER_CONFIG)}")
    for key, entry in value.items():
        if key not in _OPTIMIZER_CONFIG:
            raise _refuse(
                f"{word}[{key!r}]", entry, f"one of {', '.join(_OPTIMIZER_CONFIG)}{near_miss(key, _OPTIMIZER_CONFIG)}"
            )
        _OPTIMIZER_CONFIG[key](f"{word}[{key!r}]", entry)


_OPTIMIZER_CONFIG: dict[str, Check] = {
    "gradient_accumulation_shard": _is_switch,
    "parallel_optimizer_threshold": _is_number(0, 2**31),
    "optimizer_weight_shard_size": _is_shard_size,
    "optimizer_level": lambda _, value: HsdpSpec(optimizer_level=value),
}


def _is_path(word: str, value: Any) -> None:
    if not isinstance(value, str | os.PathLike):
        raise _refuse(word, value, "the path of a file")


def _is_scheduler(word: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _refuse(word, value, "a word such as 1f1b")
    choose_schedule(value, interleave=False)


_WORDS: dict[str, tuple[Check, Any]] = {
    "device_num": (_is_number(1, 4096), lambda _: world.get_group_size()),
    "global_rank": (_is_number(0, 4095), lambda _: world.get_rank()),
    "parallel_mode": (lambda _, value: check_mode(value), ParallelMode.STAND_ALONE),
    "compat": (lambda _, value: check_compat(value), lambda _: find_compat()),
    "gradients_mean": (_is_switch, lambda _: find_compat() == "torch"),
    "gradient_fp32_sync": (_is_switch, True),
    "parameter_broadcast": (_is_switch, lambda _: find_compat() == "torch"),
    "dataset_strategy": (
        lambda _, value: ParallelSettings(dataset_strategy=value),
        lambda chosen: "full_batch" if chosen.get("full_batch") else "data_parallel",
    ),
    "full_batch": (_is_switch, lambda chosen: chosen.get("dataset_strategy") == "full_batch"),
    "enable_parallel_optimizer": (_is_switch, False),
    "parallel_optimizer_config": (_is_optimizer_config, {}),
    "optimizer_weight_shard_size": (_is_shard_size, -1),
    "force_fp32_communication": (_is_switch, False),
    "comm_fusion": (lambda _, value: parse_comm_fusion(value), {}),
    "pipeline_stages": (_is_number(1, 4096), 1),
    "pipeline_scheduler": (_is_scheduler, "1f1b"),
    "pipeline_interleave": (_is_switch, False),
    "pipeline_result_broadcast": (_is_switch, False),
    "strategy_ckpt_save_file": (_is_path, ""),
    "strategy_ckpt_load_file": (_is_path, ""),
    "group_ckpt_save_file": (_is_path, ""),
    "sharding_propagation": (_is_switch, False),
    **{
        name: (check_search_mode, lambda chosen, other=other: chosen.get(other, RECURSIVE))
        for name, other in zip(_SEARCH_NAMES, reversed(_SEARCH_NAMES), strict=True)
    },
}
"""word -> what refuses a value out of its range, and what is done when nothing was set: a value, or what tells it from
the words that were"""
_PIPELINE = "say it with pipeline_stages, pipeline_scheduler, ..., or to AutoParallel"
_FUSION = "say it with set_comm_fusion(module, id), or to AutoParallel"
_STRATEGY_FILE = "say it with strategy_ckpt_save_file and strategy_ckpt_load_file"
_REFUSED: dict[str, tuple[Any, str]] = {
    "pipeline_config": ({}, _PIPELINE),
    "auto_pipeline": (False, _PIPELINE),
    "grad_accumulation_step": (1, "the context accumulates nothing: say it to the network's wrapper"),
    "all_reduce_fusion_config": ([], _FUSION),
    "strategy_ckpt_config": ({}, _STRATEGY_FILE),
    "loss_repeated_mean": (True, "must be True: a loss that several ranks compute counts once"),
    "enable_alltoall": (True, "must be True: layouts are changed with all-to-all"),
    "communi_parallel_mode": ("all_group_parallel", "must be all_group_parallel"),
}
"""word -> (the one value that is as things are, what to do instead of another)"""
