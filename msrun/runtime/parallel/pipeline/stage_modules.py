"""Which operators `Pipeline(stage_config=...)` and parameters that are placed already pin to which stage."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from msrun.errors import StrategyError, near_miss
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.nn.with_loss import WithLoss
from msrun.runtime.parallel.batch.micro_batch import MicroBatchInterleaved
from msrun.runtime.parallel.pipeline.pipeline import Pipeline


def pin_modules(
    captured: CapturedGraph, root: nn.Module, pipeline: Pipeline, count: int
) -> tuple[dict[fx.Node, tuple[int, ...]], list[str]]:
    """Return the stage of every operator in a module of `stage_config`, and notes on modules without operators.

    The innermost module that is named decides.

    Raises:
        StrategyError: a module or a stage that does not exist.
    """
    stage_of = _find_modules(pipeline, count)
    pins: dict[fx.Node, tuple[int, ...]] = {}
    called: set[int] = set()
    for node in captured.graph.nodes:
        stack = node.meta.get("nn_module_stack", {}) if node.op == "call_function" else {}
        around = [module for path, _ in reversed(list(stack.values())) for module in _modules_around(root, path)]
        for module in map(id, around):
            if module in stage_of:
                pins[node] = (stage_of[module][1],)
                called.add(module)
                break
    silent = [name for module, (name, _) in stage_of.items() if module not in called]
    notes = [f"modules of stage_config that compute nothing: {', '.join(silent)}"] if silent else []
    return pins, notes


def _find_modules(pipeline: Pipeline, count: int) -> dict[int, tuple[str, int]]:
    """Return id of a module -> its name and stage."""
    network = pipeline.network
    modules = dict(network.named_modules())
    while isinstance(network, WithLoss | MicroBatchInterleaved):
        network = network.network
        modules |= dict(network.named_modules())
    del modules[""]
    found = {}
    for name, stage in pipeline.stage_config.items():
        if name not in modules:
            available = ", ".join(child for child, _ in network.named_children()) or "none"
            raise StrategyError(
                f"stage_config: no module {name!r}{near_miss(name, modules)}; the network's modules are {available}"
            )
        if stage >= count:
            raise StrategyError(
                f"stage_config[{name!r}] = {stage}: there are {count} stages, numbered from 0 to {count - 1}"
            )
        found[id(modules[name])] = (name, stage)
    return found


def _modules_around(root: nn.Module, path: str) -> list[nn.Module]:
    """Return the module at a path and those that contain it, innermost first; a list of modules is one, too."""
    found = [root]
    for name in path.split("."):
        inner = getattr(found[0], name, None)
        if isinstance(inner, nn.Module):
            found.insert(0, inner)
    return found


def pin_parameters(captured: CapturedGraph, holders: Mapping[str, tuple[int, ...]]) -> dict[fx.Node, tuple[int, ...]]:
    """Return the stages of every operator that reads a placed parameter.

    Args:
        holders: parameter name -> stages that hold it.
    """
    pins: dict[fx.Node, tuple[int, ...]] = {}
    for node in captured.graph.nodes:
        if node.op != "placeholder" or not holders.get(captured.parameters.get(node.name, "")):
            continue
        stages = holders[captured.parameters[node.name]]
        for reader in node.users:
            if reader.op == "call_function":
                both = tuple(stage for stage in pins.get(reader, stages) if stage in stages)
                if not both:
                    raise StrategyError(
                        f"{reader.target} reads parameters of different stages, {pins[reader]} and {stages}: "
                        "use the network as in its first call"
                    )
                pins[reader] = both
    return pins
