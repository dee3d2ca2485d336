"""The plan of a mode without capture: what is stored where, and who reduces the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from msrun.runtime import world
from msrun.runtime.execute.placement import Placement
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.modes.fsdp import local_shape
from msrun.runtime.parallel.modes.own_gradients import ON_SERVERS, is_layerwise
from msrun.runtime.parallel.parameters.hsdp import ZERO_WORDS
from msrun.runtime.parallel.plan import HSDP_OFF, OWN_PART, ParallelPlan, ParameterPlan
from msrun.runtime.parallel.precision import describe_replicas
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.partition.collective_messages import Totals
from msrun.runtime.parts.on_servers import find_remote


def build_replica_plan(
    root: nn.Module, settings: ParallelSettings, decisions: Mapping[int, Placement], notes: Sequence[str]
) -> ParallelPlan:
    """Return the plan of a network that runs as it is.

    Args:
        decisions: of FSDP2, by id of the parameter; empty without hsdp.
    """
    ranks = world.get_group_size()
    level = settings.hsdp.optimizer_level if settings.hsdp else None
    return ParallelPlan(
        mode=settings.parallel_mode,
        world_size=ranks,
        mesh=(ranks,),
        copies=1,
        losses=describe_replicas(settings.averages_gradients),
        optimizer_parallel=f"hsdp {level}: {ZERO_WORDS[level]}" if level else HSDP_OFF,
        dataset_strategy="data_parallel",
        parameters=tuple(_parameter(name, p, decisions.get(id(p))) for name, p in root.named_parameters()),
        operators=(),
        notes=tuple(notes),
        program="the network as it is, under torch's " + ("FSDP2" if level else "DistributedDataParallel"),
    )


def build_lone_plan(root: nn.Module, settings: ParallelSettings) -> ParallelPlan:
    """Return the plan of a network that one process trains for itself: nothing is cut, nothing travels."""
    return ParallelPlan(
        mode=settings.parallel_mode,
        world_size=1,
        mesh=(),
        copies=1,
        losses="losses are this process' own",
        optimizer_parallel=HSDP_OFF,
        dataset_strategy=str(settings.dataset_strategy),
        parameters=tuple(
            replace(_parameter(name, p, None), reason="one process trains it") for name, p in root.named_parameters()
        ),
        operators=(),
        notes=("one process runs the network as it is: nothing is captured, cut or sent",),
        program="the network as it is",
        traffic=Totals({}, {}),
    )


def _parameter(name: str, parameter: nn.Parameter, decision: Placement | None) -> ParameterPlan:
    shape, local = tuple(parameter.shape), local_shape(parameter)
    item = parameter.element_size()
    reason = decision.reason if decision else OWN_PART if is_layerwise(parameter) else HSDP_OFF
    remote = find_remote(parameter)
    if remote is not None:
        reason = ON_SERVERS
        local = (0, *shape[1:]) if remote.is_table else local
    ranks = decision.mesh.extent(decision.shard_axes) if decision else 1
    count = 1
    for size in local:
        count *= size
    return ParameterPlan(
        name=user_name(name),
        global_shape=shape,
        local_shape=local,
        local_bytes=count * item,
        global_bytes=parameter.numel() * item,
        layout=(ranks, *(1,) * (len(shape) - 1)) if shape else (),
        shard_ranks=ranks,
        reason=reason,
        group=0,
    )
