"""recompute: modules whose activations are not remembered but computed again before their backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from msrun.errors import StrategyError
from msrun.runtime.nn.random_calls import RandomCalls
from msrun.runtime.nn.random_stream import Draw, current_draw
from msrun.runtime.partition.program import MODULE_PATH, LocalProgram
from msrun.runtime.schedule.replay import ActivationEstimate, RecomputeSpec, SavePolicy

_ATTRIBUTE = "_msrun_recompute"


def recompute(
    module: nn.Module,
    mp_comm_recompute: bool = True,
    parallel_optimizer_comm_recompute: bool = False,
    save: Sequence[Any] | Callable[[Any], bool] | None = None,
) -> nn.Module:
    """Do not remember what `module` computes; compute it again before its backward pass. MindSpore's Cell.recompute.

    Between the passes only what the module reads and its results are kept. Numbers do not change. It takes effect under
    AutoParallel: at its capture, or, where nothing is captured (one process, parallel_mode="data_parallel"), through
    torch's checkpointing, without `save`. Returns the module.

    Args:
        mp_comm_recompute: collectives in the module run again too; False keeps their results, which takes memory and
            saves traffic.
        parallel_optimizer_comm_recompute: parameters that optimizer parallel has cut and that only recomputed modules
            read are freed after the forward pass and gathered again; level3 does so for all.
        save: operators whose results are kept, such as `[torch.ops.aten.linear]`, or a function that takes an operator
            (`torch._ops.OpOverload`) and says whether; None keeps none.

    Raises:
        StrategyError: the module, one in it, or (at capture) one around it is recomputed already; `save` is neither.
    """
    if not isinstance(module, nn.Module):
        raise StrategyError(f"recompute({module!r}): a torch module is expected")
    for path, inner in module.named_modules():
        if _ATTRIBUTE in vars(inner):
            which = f"{type(inner).__name__} {path} in it" if path else "it"
            raise StrategyError(
                f"recompute({type(module).__name__}): {which} is recomputed already; configure one of them, once"
            )
    vars(module)[_ATTRIBUTE] = RecomputeSpec(mp_comm_recompute, parallel_optimizer_comm_recompute, _policy(save))
    return module


def blocks_of(root: nn.Module) -> list[nn.Module]:
    """Return the modules of the longest ModuleList or Sequential: the blocks of a network. None that is recomputed."""
    if recomputed_in(root):
        return []
    lists = [module for module in root.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    longest = max(lists, key=len, default=None)
    if longest is None or len(longest) < 2:
        return []
    return [block for block in longest if next(block.parameters(), None) is not None]


@contextmanager
def recomputed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Recompute modules for as long as the context lasts."""
    try:
        for module in modules:
            recompute(module)
        yield
    finally:
        for module in modules:
            vars(module).pop(_ATTRIBUTE, None)


def _policy(save: Any) -> SavePolicy | None:
    if save is None or (callable(save) and not isinstance(save, Sequence)):
        return save
    operators = list(save) if isinstance(save, Sequence) else [save]
    known = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    for operator in operators:
        if not isinstance(operator, known):
            raise StrategyError(
                f"recompute(save={operator!r}): give operators such as torch.ops.aten.linear, or a function of one"
            )
    overloads = {o for o in operators if isinstance(o, torch._ops.OpOverload)}
    packets = {o for o in operators if isinstance(o, torch._ops.OpOverloadPacket)}
    return lambda target: target in overloads or getattr(target, "overloadpacket", None) in packets


@contextmanager
def checkpointed(root: nn.Module) -> Iterator[None]:
    """Let recomputed modules run under torch's checkpointing for as long as the context lasts: without capture."""
    modules = [root.get_submodule(path) for path in recomputed_in(root)] if torch.is_grad_enabled() else []
    for module in modules:
        vars(module)["forward"] = partial(
            checkpoint, _call_of(module.forward), use_reentrant=False, context_fn=partial(_same_numbers_again, module)
        )
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["forward"]


def _call_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of this module, by which dropouts see that they get their masks again (`nn.random_calls`)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return call


def _same_numbers_again(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts in which a module runs first and again: the same masks, and its buffers change once."""
    draw = current_draw.get()
    return nullcontext(), _again(module, None if draw is None else replace(draw, stream=replace(draw.stream)))


@contextmanager
def _again(module: nn.Module, draw: Draw | None) -> Iterator[None]:
    token = current_draw.set(draw)
    before = [(holder, name, buffer, buffer.clone()) for holder, name, buffer in _buffers(module)]
    try:
        with RandomCalls() if draw is not None else nullcontext():
            yield
    finally:
        current_draw.reset(token)
        with torch.no_grad():
            for holder, name, buffer, value in before:
                holder._buffers[name] = buffer
                # what autograd has saved of them is not looked at: statistics are written by the forward pass alone
                with torch.autograd._unsafe_preserve_version_counter(buffer):  # type: ignore[attr-defined]
                    buffer.copy_(value)


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for holder in module.modules():
        for name, buffer in holder._buffers.items():
            if buffer is not None:
                yield holder, name, buffer


def recomputed_in(root: nn.Module) -> dict[str, RecomputeSpec]:
    """Return module path -> how it is recomputed, for every module of a network that is."""
    found = {path: vars(module)[_ATTRIBUTE] for path, module in root.named_modules() if _ATTRIBUTE in vars(module)}
    for path in found:
        around = next((other for other in found if other != path and (not other or path.startswith(f"{other}."))), None)
        if around is not None:
            raise StrategyError(f"recompute: {path} lies in {around or 'the network'}, which is recomputed already")
    return found


Specs = Mapping[str, RecomputeSpec]
MB = 2**20


def check_limit(mode: str, memory_limit_mb: Any) -> int:
    """Return the limit in bytes."""
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
