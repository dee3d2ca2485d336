"""Communication fusion: which parameters travel in one message.

`set_comm_fusion(module, id)` writes a number on the module's parameters; equal numbers travel together and 0 means
"never fuse" (MindSpore's `Cell.set_comm_fusion`). Parameters without a number are fused in order of use, by size or as
`AutoParallel.comm_fusion` says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from msrun.errors import StrategyError, near_miss
from msrun.runtime.execute.gradients import NEVER_FUSE
from msrun.runtime.execute.placement import PlacedParameter
from msrun.runtime.sharding.layout import Axes
from ranktable.bounded_text import load_json
from ranktable.files import read_text

MB = 1024 * 1024
BUCKET_BYTES = 25 * MB
"""Without `comm_fusion` a message carries at most this much; DDP's default bucket."""
ALONE_BYTES = MB
"""Without `comm_fusion` a parameter on the CPU that is this large travels alone: gloo carries 1 MB as fast per byte as
25 MB, and to join messages is to copy them there and back, at about the speed of the network."""
AUTO_BYTES = 64 * MB
"""mode "auto", as in MindSpore."""
_OPEN = "openstate"
_MODES = {"allreduce": ("auto", "size", "index"), "allgather": ("auto", "size"), "reducescatter": ("auto", "size")}


@dataclass(frozen=True)
class MessageRule:
    """Which parameters, in order of first use, share a message of one kind."""

    most_bytes: int | None = BUCKET_BYTES
    """Of parts as this rank stores them; None: no limit."""
    boundaries: tuple[int, ...] = ()
    """Numbers of messages, counted before fusion, at which a new message begins."""
    alone_bytes: int | None = None
    """Parts of this size on the CPU are not joined; None: all are."""


@dataclass(frozen=True)
class FusionConfig:
    """How messages of parameters are joined; for those without a number of their own (`set_comm_fusion`)."""

    is_open: bool = True
    """False: nothing is joined, numbers or not."""
    allreduce: MessageRule = MessageRule(alone_bytes=ALONE_BYTES)
    """Gradients of parameters that are whole on every rank."""
    allgather: MessageRule = MessageRule(alone_bytes=ALONE_BYTES)
    """Parameters that optimizer parallel has cut, before their use."""
    reducescatter: MessageRule = MessageRule(alone_bytes=ALONE_BYTES)
    """Their gradients."""


def parse_comm_fusion(config: Mapping[str, Any] | None) -> FusionConfig:
    """Return what `AutoParallel.comm_fusion(config)` asks for.

    Keys: openstate (bool, True when left out), allreduce, allgather, reducescatter; each of the three a dict of `mode`
    and `config`: auto with None (64 MB), size with MB, and for allreduce index with ascending numbers. Kinds that are
    left out are auto. None is the default: 25 MB, and on the CPU parameters of 1 MB or more travel alone.
    """
    if config is None:
        return FusionConfig()
    if not isinstance(config, Mapping):
        raise StrategyError(f"comm_fusion({config!r}): must be a dict such as {{'openstate': True}}, or None")
    for key in config:
        if key not in (_OPEN, *_MODES):
            words = ", ".join((_OPEN, *_MODES))
            raise StrategyError(f"comm_fusion: unknown key {key!r}{near_miss(str(key), (_OPEN, *_MODES))}: use {words}")
    is_open = config.get(_OPEN, True)
    if not isinstance(is_open, bool):
        raise StrategyError(f"comm_fusion: openstate={is_open!r}: must be True or False")
    rules = {kind: _parse_rule(kind, config[kind]) for kind in _MODES if kind in config}
    auto = MessageRule(AUTO_BYTES)
    return FusionConfig(is_open, *(rules.get(kind, auto) for kind in _MODES))


def _parse_rule(kind: str, rule: Any) -> MessageRule:
    if not isinstance(rule, Mapping):
        raise StrategyError(f"comm_fusion: {kind}={rule!r}: must be a dict of mode and config")
    for key in ("mode", "config"):
        if key not in rule:
            raise StrategyError(f"comm_fusion: {kind} has no {key!r}: give {{'mode': ..., 'config': ...}}")
    unknown = [key for key in rule if key not in ("mode", "config")]
    if unknown:
        raise StrategyError(f"comm_fusion: unknown key {unknown[0]!r} of {kind}: give mode and config only")
    mode, value = rule["mode"], rule["config"]
    if mode not in _MODES[kind]:
        raise StrategyError(f"comm_fusion: mode {mode!r} of {kind}: must be {' or '.join(_MODES[kind])}")
    if mode == "auto":
        if value is not None:
            raise StrategyError(f"comm_fusion: config {value!r} of {kind}: must be None with mode auto")
        return MessageRule(AUTO_BYTES)
    if mode == "size":
        if not _is_whole(value):
            raise StrategyError(f"comm_fusion: config {value!r} of {kind}: must be a whole number of MB above 0")
        return MessageRule(value * MB)
    is_list = isinstance(value, list | tuple) and bool(value) and all(_is_whole(number) for number in value)
    if not is_list or list(value) != sorted(set(value)):
        raise StrategyError(
            f"comm_fusion: config {value!r} of {kind}: must be ascending whole numbers above 0, such as [20, 35]"
        )
    return MessageRule(None, tuple(value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


Way = Literal["gather", "reduce"]
"""To the use of parameters, or their gradients back from it."""
_ATTRIBUTE = "comm_fusion"


def set_comm_fusion(module: nn.Module, fusion_id: int, recurse: bool = True) -> nn.Module:
    """Let the trainable parameters of `module` travel with those of equal `fusion_id`; 0 = each alone.

    Later calls win. Returns the module.

    Raises:
        StrategyError: not a whole number of 0 or more.
    """
    if isinstance(fusion_id, bool) or not isinstance(fusion_id, int) or fusion_id < 0:
        raise StrategyError(f"set_comm_fusion({fusion_id!r}): must be a whole number, 0 or more; 0 never fuses")
    for parameter in module.parameters(recurse):
        if parameter.requires_grad:
            setattr(parameter, _ATTRIBUTE, fusion_id)
    return module


def fusion_id_of(parameter: nn.Parameter) -> int | None:
    """Return a parameter's number, or None when it has none."""
    return getattr(parameter, _ATTRIBUTE, None)


def group_parameters(
    parameters: Sequence[tuple[PlacedParameter, Axes]],
    way: Way = "gather",
    config: FusionConfig | None = None,
    *,
    regathered: Collection[str] = (),
    alone: Collection[str] = (),
) -> list[list[int]]:
    """Return lists of indexes that travel together, in order of first use.

    Only parameters that are cut alike, summed alike and of one type can share a message.

    Args:
        parameters: in order of use, each with the axes along which its gradient is a partial sum.
        way: to their use, or their gradients back from it.
        regathered: names of those whose gathered parts are freed and gathered again.
        alone: names of those that share no message.
    """
    config = config or FusionConfig()
    groups: list[list[int]] = []
    open_groups: dict[tuple[object, ...], int] = {}
    sizes: dict[int, int] = {}
    reduced = 0
    for index, (stored, partial_axes) in enumerate(parameters):
        value, is_trained = stored.part, stored.parameter.requires_grad
        size = stored.sent_numel * value.element_size()
        rule = _rule_of(stored, way, config)
        is_large = stored.name in alone or (stored.fusion_id is None and _is_large(value, size, rule))
        is_alone = not config.is_open or stored.fusion_id == NEVER_FUSE or is_large
        fused_by = bisect_right(rule.boundaries, reduced) if stored.fusion_id is None else ("id", stored.fusion_id)
        placed = stored.placement
        if not placed.shard_axes and partial_axes and is_trained:
            reduced += 1
        is_regathered = stored.name in regathered
        key = (placed.shard_axes, partial_axes, value.dtype, is_trained, fused_by, is_regathered, placed.on_host)
        number = open_groups.get(key)
        is_small = number is not None and (rule.most_bytes is None or sizes[number] + size <= rule.most_bytes)
        if number is None or is_alone or not (is_small or stored.fusion_id is not None):
            number = len(groups)
            groups.append([])
            sizes[number] = 0
            if not is_large:
                open_groups[key] = number
        groups[number].append(index)
        sizes[number] += size
    return groups


def _is_large(value: Tensor, size: int, rule: MessageRule) -> bool:
    return rule.alone_bytes is not None and size >= rule.alone_bytes and value.device.type == "cpu"


def _rule_of(stored: PlacedParameter, way: Way, config: FusionConfig) -> MessageRule:
    if not stored.placement.shard_axes:
        return config.allreduce
    return config.allgather if way == "gather" else config.reducescatter


GRAD_MATMUL = "grad_matmul_communication_overlap"
_NOT_HERE = (
    "recomputation_communication_overlap",
    "grad_fa_allgather_overlap",
    "enable_communication_fusion",
    "grad_computation_allreduce_overlap",
    "computation_allgather_overlap",
    "computation_communication_fusion_level",
    "dataset_broadcast_opt_level",
    "allreduce_and_biasadd_swap",
    "enable_allreduce_slice_to_reducescatter",
    "enable_interleave_split_concat_branch",
    "enable_interleave_parallel_branch",
)
"""Switches of MindSpore's that are accepted while they are off."""


def parse_transformer_opt(config: Mapping[str, Any] | str | Path | None) -> bool:
    """Return whether weights' gradients are computed while those of inputs travel.

    Args:
        config: switch -> value, the path of a JSON file with them, None or "": all off.
    """
    switches = _read(config) if config and isinstance(config, (str, Path)) else config or {}
    if not isinstance(switches, Mapping):
        raise StrategyError(f"transformer_opt({switches!r}): give a dict of switches or the path of a JSON file")
    known = (GRAD_MATMUL, *_NOT_HERE)
    for name, value in switches.items():
        if name not in known:
            raise StrategyError(
                f"transformer_opt: {name!r}{near_miss(str(name), known)}: the switch here is {GRAD_MATMUL}"
            )
        if name in _NOT_HERE and value:
            raise StrategyError(
                f"transformer_opt: {name}={value!r} does not exist here: leave it out or set it to false"
            )
    value = switches.get(GRAD_MATMUL, False)
    if not isinstance(value, bool):
        raise StrategyError(f"transformer_opt: {GRAD_MATMUL}={value!r}: must be true or false")
    return value


def describe_overlap(layers: int) -> str:
    """Return what a plan says about so many layers."""
    return f"the gradients of {layers} linear layers' weights are computed while those of their inputs travel"


def _read(path: str | Path) -> Any:
    try:
        return load_json(read_text(path))
    except OSError as error:
        raise StrategyError(f"transformer_opt({str(path)!r}): {error.strerror}: give the path of a JSON file") from None
    except ValueError as error:
        raise StrategyError(f"transformer_opt({str(path)!r}) is not JSON: {error}") from None
