"""Pipelines that must all give the numbers of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

STEPS = 4
GLOBAL_BATCH = 16
WIDTH, BLOCKS, CLASSES = 16, 4, 6

COLUMNS, ROWS = ((1, 1), (2, 1), (2,)), ((1, 2), (1, 2))
MEGATRON = {f"blocks.{block}.{layer}": COLUMNS if layer == "0" else ROWS for block in range(BLOCKS) for layer in "02"}
BY_BLOCKS = {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1}


@dataclass(frozen=True)
class Scenario:
    """One pipeline on `stages` x `stage_size` ranks."""

    name: str
    scheduler: str = "1f1b"
    interleave: bool = False
    stages: int = 2
    stage_size: int = 1
    micro_size: int = 4
    stage_config: Mapping[str, int] | None = None
    strategies: Mapping[str, Any] = field(default_factory=dict)
    hsdp: Mapping[str, Any] | None = None
    copies: int = 1
    compat: Literal["torch", "mindspore"] = "torch"
    dataset: str = "data_parallel"
    form: Literal["module", "step", "model"] = "module"
    """A module in a torch loop, a step function with value_and_grad, or Model.train."""
    optimizer: str = "momentum"
    deferred: bool = False
    tied: bool = False
    """The last layer uses the first one's weight."""
    skips: bool = False
    """Every block reads what the first layer makes."""
    float32: bool = False
    weights_late: bool = False
    """transformer_opt's grad_matmul_communication_overlap."""

    @property
    def world_size(self) -> int:
        return self.stages * self.stage_size

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float64", "float32") if self.float32 else ("float64",)

    @property
    def chunks(self) -> int:
        return 2 if self.interleave or self.scheduler in ("zbv", "dualpipev") else 1


def _hsdp(level: str = "level1", shard_size: int = -1) -> dict[str, Any]:
    return {"optimizer_level": level, "shard_size": shard_size, "threshold": 0}


SCENARIOS = [
    Scenario("gpipe", "gpipe", float32=True),
    Scenario("1f1b", form="model", stage_config=BY_BLOCKS),
    Scenario("eager", "eager_1f1b", micro_size=8, tied=True, skips=True),
    Scenario("interleaved", interleave=True, optimizer="adam", deferred=True),
    Scenario("zero-bubble", "zero_bubble", skips=True),
    Scenario("zero-bubble-interleaved", "zero_bubble", interleave=True, tied=True),
    Scenario("zbv", "zbv", tied=True, deferred=True),
    Scenario("dualpipev", "dualpipev", skips=True, form="step"),
    Scenario("tied-step-function-sums", "gpipe", micro_size=2, tied=True, compat="mindspore", form="step"),
    Scenario("one-stage", stages=1, stage_size=2, micro_size=2, hsdp=_hsdp()),
    Scenario("four-stages", stages=4, tied=True, skips=True, optimizer="adam"),
    Scenario("four-stages-eager-copies", "eager_1f1b", stages=4, micro_size=2, copies=2, form="step"),
    Scenario("four-stages-zero-bubble-copies", "zero_bubble", stages=4, copies=2, compat="mindspore"),
    Scenario("data-parallel", stage_size=2, micro_size=2, tied=True, hsdp=_hsdp("level2"), deferred=True),
    Scenario("tensor-parallel", "zbv", stage_size=2, strategies=MEGATRON, dataset="full_batch", skips=True),
    Scenario("weights-late", stage_size=2, strategies=MEGATRON, dataset="full_batch", weights_late=True),
    Scenario("zbv-weights-late", "zbv", stage_size=2, strategies=MEGATRON, dataset="full_batch", weights_late=True),
    Scenario("zero-bubble-level3-copies", "zero_bubble", stage_size=2, hsdp=_hsdp("level3"), copies=2, micro_size=2),
    Scenario("pipeline-tensor-data-hsdp", "1f1b", stage_size=4, strategies=MEGATRON, hsdp=_hsdp(), micro_size=2),
    Scenario(
        "everything",
        "zero_bubble",
        interleave=True,
        stage_size=4,
        strategies=MEGATRON,
        hsdp=_hsdp("level3", 2),
        micro_size=2,
        copies=2,
        form="step",
        optimizer="adam",
        deferred=True,
        tied=True,
    ),
]
