"""FusionConfig: how `AutoParallel.comm_fusion` lets messages be joined, in MindSpore's words.

    comm_fusion({"openstate": True,
                 "allreduce": {"mode": "index", "config": [20, 35]},
                 "allgather": {"mode": "size", "config": 32},
                 "reducescatter": {"mode": "auto", "config": None}})

Why: a message of m bytes takes about alpha + beta * m; few big messages beat many small ones, but one giant message
hides behind no computing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msrun.errors import StrategyError, near_miss

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

    Raises:
        StrategyError: an unknown key or mode, a missing config, or one of another type.
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
