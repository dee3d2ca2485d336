"""Which modules to recompute so that the activations of a step fit into a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msrun.errors import StrategyError
from msrun.runtime.partition.program import MODULE_PATH, LocalProgram
from msrun.runtime.schedule.activations import ActivationEstimate
from msrun.runtime.schedule.regions import RecomputeSpec

Specs = Mapping[str, RecomputeSpec]
MB = 2**20


def check_limit(mode: str, memory_limit_mb: Any) -> int:
    """Return the limit in bytes.

    Raises:
        StrategyError: another word than "auto", or no limit above 0.
    """
    if mode != "auto":
        raise StrategyError(f'AutoParallel.recompute({mode!r}): must be "auto"; for one module use recompute(module)')
    is_number = isinstance(memory_limit_mb, int | float) and not isinstance(memory_limit_mb, bool)
    if not is_number or not memory_limit_mb > 0:
        raise StrategyError(f"recompute(memory_limit_mb={memory_limit_mb!r}): must be a number of MB above 0")
    return int(memory_limit_mb * MB)


def choose_recomputed(
    program: LocalProgram, fixed: Specs, limit_bytes: int, estimate: Callable[[Specs], ActivationEstimate]
) -> Specs:
    """Return `fixed` and the fewest further modules with which the activations of a rank fit.

    Modules of one depth of the network are tried together, the outermost first: they lie beside each other and are
    mostly the layers of a stack. Of the first depth that can fit, as few as need be are taken, in order of execution,
    because what the first layers keep is kept longest.

    Raises:
        StrategyError: nothing fits; says how much is needed at the least.
    """
    whole = estimate(fixed)
    if whole.peak_bytes <= limit_bytes:
        return fixed
    least = whole
    for paths in _by_depth(program, fixed):
        found = estimate(_with(fixed, paths))
        least = min(least, found, key=lambda each: each.peak_bytes)
        if found.peak_bytes <= limit_bytes:
            return _with(fixed, _fewest(paths, lambda chosen: estimate(_with(fixed, chosen)).peak_bytes <= limit_bytes))
    raise StrategyError(
        f"recompute: activations of {whole.peak_bytes / MB:.2f} MB on this rank cannot be brought under "
        f"{limit_bytes / MB:.2f} MB: recomputing whole modules needs {least.peak_bytes / MB:.2f} MB at the least; give "
        "more, or smaller micro batches (GradAccumulation)"
    )


def _with(fixed: Specs, paths: Iterable[str]) -> Specs:
    return {**fixed, **dict.fromkeys(paths, RecomputeSpec())}


def _by_depth(program: LocalProgram, fixed: Specs) -> list[list[str]]:
    """Return the modules that compute something, by depth, each in order of execution."""
    depths: dict[int, dict[str, None]] = {}
    for node in program.graph.nodes:
        parts = str(node.meta.get(MODULE_PATH, "")).split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path and not any(_overlap(path, other) for other in fixed):
                depths.setdefault(depth, {})[path] = None
    return [list(depths[depth]) for depth in sorted(depths)]


def _overlap(one: str, other: str) -> bool:
    return one == other or not other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _fewest(paths: list[str], fits: Callable[[list[str]], bool]) -> list[str]:
    """Return the shortest beginning of `paths` that fits; all of them do."""
    too_few, enough = 0, len(paths)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(paths[:middle]):
            enough = middle
        else:
            too_few = middle
    return paths[:enough]
