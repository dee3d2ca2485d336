"""Overlap of computing and communicating that the user switches on: MindSpore's `transformer_opt`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msrun.errors import StrategyError, near_miss
from ranktable.bounded_text import load_json
from ranktable.files import read_text

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

    Raises:
        StrategyError: a file that cannot be read, an unknown switch, a value of the wrong type, or a switch of
            MindSpore's that does not exist here.
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
