"""Pipeline: a network whose batch goes through it in micro batches, from stage to stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from msrun.errors import StrategyError, near_miss
from msrun.runtime.capture.captured_graph import CapturedGraph
from msrun.runtime.nn.with_loss import WithLoss
from msrun.runtime.parallel.batch.divided_batch import DividedBatch, GradAccumulation, MicroBatchInterleaved
from msrun.runtime.parallel.pipeline.schedule import choose_schedule


@dataclass(frozen=True)
class PipelineSpec:
    """Settings of `AutoParallel.pipeline`."""

    stages: int = 1
    """Parts of the world, each of consecutive ranks."""
    scheduler: str = "1f1b"
    interleave: bool = False
    output_broadcast: bool = False
    """Whether results that are no scalars come back on every rank, or only where they are made."""

    def __post_init__(self) -> None:
        if isinstance(self.stages, bool) or not isinstance(self.stages, int) or self.stages < 1:
            raise StrategyError(f"pipeline(stages={self.stages!r}): must be a whole number above 0")
        for name in ("interleave", "output_broadcast"):
            if not isinstance(getattr(self, name), bool):
                raise StrategyError(f"pipeline({name}={getattr(self, name)!r}): must be True or False")
        choose_schedule(self.scheduler, self.interleave)

    def ranks_per_stage(self, world_size: int) -> int:
        """Return the number of ranks of one stage."""
        if world_size % self.stages:
            raise StrategyError(
                f"pipeline(stages={self.stages}): {world_size} ranks cannot be divided into {self.stages} equal stages"
            )
        return world_size // self.stages


class Pipeline(GradAccumulation):
    """Run `network` (with its loss) on `micro_size` equal slices of the batch, which follow each other through stages.

    Slice i of every tensor is rows [i * B / n, (i + 1) * B / n) of dimension 0. The result is the mean of the slices'
    losses, or with AutoParallel(compat="mindspore") their sum, whose gradient is that of the mean. Inside
    `AutoParallel(...).pipeline(stages=...)` each part of the ranks runs one stage; alone the slices run one after the
    other as those of GradAccumulation, with the same result. Parameter names are those of `network`.
    `Pipeline(WithLoss(net, loss_fn), 4)`, `Pipeline(MicroBatchInterleaved(WithLoss(net, loss_fn), 2), 4)`.

    Args:
        micro_size: number of slices.
        stage_config: module name -> stage, from 0; modules that are not named follow what they read. None cuts the
            network into stages of equal cost.

    Raises:
        StrategyError: a number that is not whole or not above 0, or that does not divide the batch.
    """

    def __init__(self, network: nn.Module, micro_size: int, stage_config: Mapping[str, int] | None = None) -> None:
        super().__init__(network, micro_size)
        for name, stage in (stage_config or {}).items():
            if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
                raise StrategyError(f"stage_config[{name!r}] = {stage!r}: must be a whole number, 0 or more")
        self._stage_config = dict(stage_config or {})

    @property
    def stage_config(self) -> dict[str, int]:
        """Module name -> stage, of a plan by names and of its own."""
        _, modules = _modules_of(self)
        given = {name: vars(module)[_ATTRIBUTE] for name, module in modules.items() if _ATTRIBUTE in vars(module)}
        return {**given, **self._stage_config}


_ATTRIBUTE = "_msrun_stage"


def give_stage(module: nn.Module, stage: int) -> None:
    """Let a module lie in a stage, as one that `stage_config` names."""
    vars(module)[_ATTRIBUTE] = stage


def find_pipeline(wrappers: Sequence[DividedBatch], stages: int) -> Pipeline:
    """Return the Pipeline among the wrappers of a network, outermost first."""
    found = [wrapper for wrapper in wrappers if isinstance(wrapper, Pipeline)]
    if len(found) > 1:
        raise StrategyError(f"{len(found)} Pipelines in one network: wrap the whole network, with its loss, in one")
    if not found:
        raise StrategyError(
            f"pipeline(stages={stages}) needs a network that says how its batch is divided: "
            "wrap it in Pipeline(net_with_loss, micro_size)"
        )
    return found[0]


def pin_modules(
    captured: CapturedGraph, root: nn.Module, pipeline: Pipeline, count: int
) -> tuple[dict[fx.Node, tuple[int, ...]], list[str]]:
    """Return the stage of every operator in a module of `stage_config`, and notes on modules without operators.

    The innermost module that is named decides.
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


def _modules_of(pipeline: Pipeline) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Return the network without wrappers, and all modules by their names: with the wrappers in them and without."""
    network = pipeline.network
    modules = dict(network.named_modules())
    while isinstance(network, WithLoss | MicroBatchInterleaved):
        network = network.network
        modules |= dict(network.named_modules())
    del modules[""]
    return network, modules


def _find_modules(pipeline: Pipeline, count: int) -> dict[int, tuple[str, int]]:
    """Return id of a module -> its name and stage."""
    network, modules = _modules_of(pipeline)
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
