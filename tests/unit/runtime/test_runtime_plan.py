"""The plan as a value: there and back through JSON, and the figures of messages told from shapes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

from msrun.errors import StrategyError
from msrun.runtime import AutoParallel, ParallelPlan
from msrun.runtime.parallel.modes.replica_plan import build_lone_plan
from msrun.runtime.parallel.plan import GroupPlan, ParameterPlan
from msrun.runtime.partition.collective_messages import (
    CollectiveTraffic,
    Message,
    Totals,
    backward_message,
    forward_message,
    result_shape,
)
from msrun.runtime.partition.program import OperatorPlan
from msrun.runtime.sharding.collective import Collective, Kind
from msrun.runtime.sharding.layout import build_mesh

GATHER = CollectiveTraffic("gather dim 0 over axes 0", Message("all_gather", 64, 2), None)
PLAN = ParallelPlan(
    mode="semi_auto",
    world_size=4,
    mesh=(2, 2),
    copies=2,
    losses="means",
    optimizer_parallel="whole",
    dataset_strategy="full_batch",
    parameters=(
        ParameterPlan("w", (8, 4), (4, 4), 64, 128, (2, 1), 1, "hsdp is off", 0, ("dp", "None")),
        ParameterPlan("b", (8,), (8,), 32, 32, (1,), 1, "hsdp is off", -1),
    ),
    operators=(
        OperatorPlan("linear", "aten.linear", "fc", ((1, 1), (2, 1)), "user", (GATHER.text,), (GATHER,), 2),
        OperatorPlan("relu", "aten.relu", "", ((1, 2),), "follows", ()),
    ),
    notes=("a note",),
    program="segment 0",
    results=(GATHER,),
    groups=(GroupPlan(("w",), (Message("all_gather", 32, 2),), (Message("reduce_scatter", 64, 2),)),),
    traffic=Totals.of([Message("all_gather", 64, 2), Message("all_gather", 32, 2), Message("reduce_scatter", 64, 2)]),
)


def test_plan_comes_back_from_json_as_it_was() -> None:
    assert ParallelPlan.from_json(PLAN.to_json()) == PLAN
    assert ParallelPlan.from_json(json.dumps(PLAN.to_json())) == PLAN
    without = dataclasses.replace(PLAN, traffic=None)
    assert ParallelPlan.from_json(json.dumps(without.to_json())) == without != PLAN


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plan: plan.pop("mesh"), "plan: the fields of ParallelPlan are mode, world_size, mesh"),
        (lambda plan: plan.update(colour=3), "found ['borders', 'colour'"),
        (lambda plan: plan["parameters"][1].pop("reason"), "plan.parameters[1]: the fields of ParameterPlan are name"),
        (lambda plan: plan.update(traffic=7), "plan.traffic: the fields of Totals are calls, bytes; found 7"),
    ],
)
def test_json_that_is_no_plan_is_refused_with_the_place(change: Any, text: str) -> None:
    value = json.loads(json.dumps(PLAN.to_json()))
    change(value)
    with pytest.raises(StrategyError) as caught:
        ParallelPlan.from_json(value)
    assert text in str(caught.value)


def test_plan_is_frozen_and_prints_its_explanation() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.copies = 3  # type: ignore[misc]
    text = str(PLAN)
    assert text == PLAN.explain()
    assert "  w  8x4 -> 4x4                   (dp, None)             64 B  message 0" in text
    assert "user, the same on 2 ranks" in text
    assert "      gather dim 0 over axes 0: forward all_gather of 64 B by 2 ranks" in text
    assert "1 parameter: forward all_gather of 32 B by 2 ranks, backward reduce_scatter of 64 B by 2 ranks" in text
    assert "what operators move, 2 times: 2 all_gather with 96 B, 1 reduce_scatter with 64 B" in text


@pytest.mark.parametrize(
    ("kind", "shape", "forward", "backward"),
    [
        ("all_reduce", (8, 6), ("all_reduce", 48), None),
        ("enter", (8, 6), None, ("all_reduce", 48)),
        ("gather", (32, 6), ("all_gather", 48), None),
        ("gather_enter", (32, 6), ("all_gather", 48), ("reduce_scatter", 192)),
        ("slice", (2, 6), None, ("all_gather", 12)),
        ("reduce_scatter", (2, 6), ("reduce_scatter", 48), ("all_gather", 12)),
        ("exchange", (2, 24), ("all_to_all", 48), ("all_to_all", 48)),
    ],
)
def test_messages_of_a_collective_follow_from_its_shapes(
    kind: Kind, shape: tuple[int, int], forward: Any, backward: Any
) -> None:
    """Of an (8, 6) part on 4 ranks; bytes of the input of each operation, in float32."""
    mesh = build_mesh(4)
    collective = Collective(kind, (0, 1), 0, 1)
    assert result_shape(collective, (8, 6), mesh) == shape
    for found, right in (
        (forward_message(collective, (8, 6), torch.float32, mesh, 0), forward),
        (backward_message(collective, (8, 6), torch.float32, mesh, 0), backward),
    ):
        assert found == (None if right is None else Message(right[0], right[1] * 4, 4))


@pytest.mark.parametrize(("rows", "words"), [(2500, "2500 KB"), (91908, "89.8 MB"), (2**24 + 2**21, "18.0 GB")])
def test_plan_gives_sizes_in_units_of_few_digits(rows: int, words: str) -> None:
    net = nn.Linear(256, rows, bias=False, device="meta")
    plan = build_lone_plan(net, AutoParallel(net, "stand_alone").settings)
    assert plan.summary().endswith(f"parameters whole on every rank, {words}")
