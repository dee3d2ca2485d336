"""The order of actions of torch's pipeline schedules. The one place that reads private names of its schedules.

Nothing is run by torch: its schedule classes are made with stand-ins for stages and asked which rank does what in which
order, and where sends and receives stand so that no two ranks wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

RawAction = tuple[str, int, int]
"""(one of _KINDS; stage; micro batch)"""
_KINDS = frozenset({"F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"})
"""What torch's schedules have beside these is for its own FSDP and its own sends: reductions, and waits for them."""


def map_stages(ranks: int, stages: int, *, is_v: bool) -> tuple[int, ...]:
    """Return which pipeline rank holds each stage: round after round, or down and up again (V)."""
    mapping = generate_stage_to_rank_mapping(ranks, stages, style="v" if is_v else "loop")
    return tuple(mapping[stage] for stage in range(stages))


def read_order(class_name: str, ranks: int, stages: int, micro_size: int) -> list[list[RawAction]]:
    """Return what every pipeline rank computes, in order.

    Args:
        class_name: what `torch.distributed.pipelining.schedules.get_schedule_class` knows.
    """
    schedule_class = torch_schedules.get_schedule_class(class_name)
    stand_ins = [_stand_in(ranks, stages, index) for index in range(stages // ranks)]
    orders: Mapping[int, Sequence[Any]]
    if issubclass(schedule_class, torch_schedules.PipelineScheduleMulti):
        orders = schedule_class(stand_ins, micro_size).pipeline_order
    else:
        orders = schedule_class(stand_ins[0], micro_size)._get_pipeline_order()
    return [_raw(_number_forwards(_flatten(orders[rank]))) for rank in range(ranks)]


def add_messages(order: Sequence[Sequence[RawAction]], holder: Sequence[int]) -> list[list[RawAction]]:
    """Return the same actions with sends and receives, as torch places them.

    Args:
        order: per pipeline rank, what it computes.
        holder: stage -> pipeline rank.
    """
    computing = {rank: [_torch_action(*action) for action in row] for rank, row in enumerate(order)}
    ordered: Mapping[int, Sequence[Any]] = torch_schedules._add_send_recv(
        computing, lambda stage: holder[stage], len(holder)
    )
    return [_raw(ordered[rank]) for rank in range(len(order))]


def _raw(actions: Sequence[Any]) -> list[RawAction]:
    kinds = [str(action.computation_type.value) for action in actions]
    return [
        (kind, int(action.stage_index), int(action.microbatch_index))
        for kind, action in zip(kinds, actions, strict=True)
        if kind in _KINDS
    ]


def _torch_action(kind: str, stage: int, micro_batch: int) -> Any:
    return torch_schedules._Action(stage, torch_schedules._ComputationType(kind), micro_batch)


def _stand_in(ranks: int, stages: int, index: int) -> Any:
    return SimpleNamespace(
        group_size=ranks, group_rank=0, num_stages=stages, stage_index=index, submod=None, has_backward=True
    )


def _flatten(actions: Sequence[Any]) -> list[Any]:
    """Leave out pauses; take overlapped pairs apart."""
    flat: list[Any] = []
    for action in actions:
        if action is None:
            continue
        flat += action.sub_actions if action.sub_actions is not None else [action]
    return flat


def _number_forwards(actions: Sequence[Any]) -> list[Any]:
    """Number the forward passes of each stage from 0: torch 2.13 begins with 1 on the last rank of 1F1B."""
    counts: Counter[int] = Counter()
    numbered = []
    for action in actions:
        if action.computation_type is torch_schedules.FORWARD:
            action = action._replace(microbatch_index=counts[action.stage_index])
            counts[action.stage_index] += 1
        numbered.append(action)
    return numbered
