"""Ways to train one network on several ranks that must all give the numbers of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

WORLD_SIZE = 8
STEPS = 4
GLOBAL_BATCH = 32
SIZES = (196, 128, 128, 10)
"""Widths of the three layers. In float32 the first two weights have 98 KB and exactly 64 KB, the last one 5 KB."""

COLUMNS = ((1, 1), (8, 1), (8,))
ROWS = ((1, 8), (1, 8))
MEGATRON = {"layer1": COLUMNS, "layer2": ROWS}
MIXED = {"layer1": ((2, 1), (4, 1), (4,)), "layer2": ((2, 4), (1, 4)), "layer3": ((4, 2), (1, 2))}
HALF_BATCH = {"layer1": ((2, 1), (1, 1), (1,)), "layer2": ((4, 1), (2, 1), (2,)), "layer3": ((1, 2), (1, 2), (1,))}


@dataclass(frozen=True)
class Scenario:
    """One way."""

    name: str
    hsdp: Mapping[str, Any] | None = None
    strategies: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1
    compat: Literal["torch", "mindspore"] = "torch"
    dataset: Any = "data_parallel"
    form: Literal["module", "step"] = "module"
    """A module in a torch loop, or a step function with value_and_grad."""
    optimizer: str = "momentum"
    fusion: Mapping[str, int] = field(default_factory=dict)
    """layer -> fusion id"""
    deferred: bool = False
    mode: str = "semi_auto"
    weights_late: bool = False
    """transformer_opt's grad_matmul_communication_overlap."""
    traffic: Mapping[str, int] | None = None
    """Collectives of one step; None: not known by hand."""
    steps: int = STEPS
    float32: bool = False
    """Run in float32 too; the rule is the same, only the rounding differs."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float64", "float32") if self.float32 else ("float64",)


def _hsdp(level: str = "level1", shard_size: int = -1, threshold: int = 64) -> dict[str, Any]:
    return {"optimizer_level": level, "shard_size": shard_size, "threshold": threshold}


LOSS = 2
"""Messages of a cross-entropy: the number of labels that count, which leaves first, and the sum."""
ONE_MESSAGE = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1 + LOSS}
"""hsdp: the cut weights in one message each way, the whole parameters in one, and the loss."""

SCENARIOS = [
    Scenario("plain", traffic={"all_reduce": 1 + LOSS}, float32=True),
    Scenario("plain-full-batch", dataset="full_batch", traffic={"all_reduce": 1 + LOSS}),
    Scenario("plain-step-function", form="step", traffic={"all_reduce": 1 + LOSS}),
    Scenario("data-parallel-mode", mode="data_parallel", float32=True),
    Scenario("batch-cut-in-four", dataset=((4, 1), (4,))),
    Scenario("hsdp-level1", _hsdp(), traffic=ONE_MESSAGE, float32=True),
    Scenario("hsdp-level2", _hsdp("level2"), traffic=ONE_MESSAGE, float32=True),
    Scenario("hsdp-level3", _hsdp("level3"), traffic={**ONE_MESSAGE, "all_gather": 2}, float32=True),
    Scenario("hsdp-shard-size-2", _hsdp(shard_size=2), traffic={**ONE_MESSAGE, "all_reduce": 2 + LOSS}, float32=True),
    Scenario("hsdp-shard-size-4", _hsdp(shard_size=4), traffic={**ONE_MESSAGE, "all_reduce": 2 + LOSS}),
    Scenario("hsdp-threshold-0", _hsdp(threshold=0)),
    Scenario("hsdp-full-batch", _hsdp(), dataset="full_batch", traffic=ONE_MESSAGE),
    Scenario("hsdp-step-function", _hsdp(), form="step", traffic=ONE_MESSAGE, float32=True),
    Scenario("hsdp-level3-step-function", _hsdp("level3"), form="step", traffic={**ONE_MESSAGE, "all_gather": 2}),
    Scenario("hsdp-deferred", _hsdp(), deferred=True, traffic=ONE_MESSAGE),
    Scenario("hsdp-adam", _hsdp(), optimizer="adam", traffic=ONE_MESSAGE, float32=True),
    Scenario("hsdp-torch-adam", _hsdp("level3"), optimizer="torch-adam"),
    Scenario("hsdp-torch-sgd", _hsdp(), optimizer="torch-sgd"),
    Scenario("hsdp-deferred-torch-adamw", _hsdp(), optimizer="torch-adamw", deferred=True),
    Scenario(
        "fusion-never",
        _hsdp(),
        fusion={"layer1": 0, "layer2": 0, "layer3": 0},
        traffic={"all_gather": 2, "reduce_scatter": 2, "all_reduce": 4 + LOSS},
    ),
    Scenario(
        "fusion-two-messages",
        _hsdp(),
        fusion={"layer1": 1, "layer2": 2, "layer3": 2},
        traffic={"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2 + LOSS},
    ),
    Scenario("fusion-one-message", _hsdp(), fusion={"layer1": 1, "layer2": 1, "layer3": 1}, traffic=ONE_MESSAGE),
    Scenario("two-copies", copies=2, traffic={"all_reduce": 1 + 2 * LOSS}),
    Scenario("four-copies", copies=4, traffic={"all_reduce": 1 + 4 * LOSS}, float32=True),
    Scenario("two-copies-sum", copies=2, compat="mindspore", traffic={"all_reduce": 1 + 2 * LOSS}, float32=True),
    Scenario("four-copies-sum-step-function", copies=4, compat="mindspore", form="step"),
    Scenario("two-copies-hsdp", _hsdp(), copies=2, traffic={**ONE_MESSAGE, "all_reduce": 1 + 2 * LOSS}),
    Scenario("two-copies-hsdp-level3-sum", _hsdp("level3"), copies=2, compat="mindspore"),
    Scenario("two-copies-full-batch-step-function", copies=2, dataset="full_batch", form="step"),
    # layer2's partial sums are scattered, for layer3 is data-parallel; gathered on the way back; loss and gradients.
    Scenario(
        "tensor-parallel",
        strategies=MEGATRON,
        dataset="full_batch",
        traffic={"all_reduce": 1 + LOSS, "reduce_scatter": 1, "all_gather": 1},
    ),
    Scenario(
        "tensor-parallel-two-copies",
        strategies=MEGATRON,
        dataset="full_batch",
        copies=2,
        traffic={"all_reduce": 1 + 2 * LOSS, "reduce_scatter": 2, "all_gather": 2},
        float32=True,
    ),
    Scenario(
        "tensor-parallel-weights-late",
        strategies=MEGATRON,
        dataset="full_batch",
        weights_late=True,
        traffic={"all_reduce": 1 + LOSS, "reduce_scatter": 1, "all_gather": 1},
        float32=True,
    ),
    Scenario("tensor-parallel-own-batches", strategies=MEGATRON),
    Scenario("tensor-parallel-adam-deferred", strategies=MEGATRON, optimizer="adam", deferred=True),
    Scenario("mixed-strategies", strategies=MIXED, dataset="full_batch"),
    Scenario("mixed-strategies-step-function", strategies=MIXED, form="step"),
    Scenario("mixed-strategies-hsdp", _hsdp(threshold=0), MIXED, dataset="full_batch"),
    Scenario("mixed-strategies-hsdp-level3-two-copies", _hsdp("level3", threshold=0), MIXED, copies=2, float32=True),
    Scenario("mixed-strategies-hsdp-level3-weights-late", _hsdp("level3", threshold=0), MIXED, 2, weights_late=True),
    Scenario("half-batch-hsdp", _hsdp(threshold=0), HALF_BATCH),
    Scenario(
        "half-batch-hsdp-level3", _hsdp("level3", threshold=0), HALF_BATCH, dataset="full_batch", copies=2, float32=True
    ),
    Scenario("half-batch-hsdp-shard-size-2", _hsdp("level2", 2, 0), HALF_BATCH, form="step"),
    Scenario(
        "everything",
        _hsdp("level3", 2, 0),
        MIXED,
        2,
        "mindspore",
        form="step",
        optimizer="adam",
        deferred=True,
        float32=True,
    ),
]
