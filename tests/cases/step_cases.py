"""Ways to run a training step (accumulation, copies, levels, recompute) that must give one process's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

WORLD_SIZE = 4
STEPS = 3
GLOBAL_BATCH = 32
WIDTH, HIDDEN, BLOCKS, FEATURES, CLASSES = 16, 64, 3, 12, 8

UP, DOWN = ((1, 1), (4, 1), (4,)), ((1, 4), (1, 4))
MEGATRON = {f"blocks.{i}.{name}": tuples for i in range(BLOCKS) for name, tuples in (("up", UP), ("down", DOWN))}
MIXED = {
    f"blocks.{i}.{name}": tuples
    for i in range(BLOCKS)
    for name, tuples in (("up", ((2, 1), (2, 1), (2,))), ("down", ((2, 2), (1, 2))))
}


@dataclass(frozen=True)
class StepCase:
    """One way."""

    name: str
    level: str | None = None
    shard_size: int = -1
    parts: tuple[tuple[Literal["copies", "micro"], int], ...] = ()
    """Wrappers, outermost first."""
    compat: Literal["torch", "mindspore"] = "torch"
    strategies: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = "data_parallel"
    form: Literal["module", "step", "fresh closures", "model"] = "module"
    recompute: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """module path -> settings"""
    auto_limit_mb: float | None = None
    comm_fusion: Mapping[str, Any] | None = None
    calls: Mapping[str, int] | None = None
    """Collectives of one step by operation."""
    float32: bool = False
    steps: int = STEPS
    scaled: bool = False
    """The loss is multiplied by 3 before its backward pass, and the gradients divided after it."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float64", "float32") if self.float32 else ("float64",)

    @property
    def loss_factor(self) -> int:
        """How many times the mean loss a step returns."""
        count = 1
        for _, number in self.parts:
            count *= number
        return count if self.compat == "mindspore" else 1

    @property
    def gradient_factor(self) -> int:
        """How many times the mean loss's gradient: copies add up, micro batches never do."""
        count = 1
        for kind, number in self.parts:
            count *= number if kind == "copies" else 1
        return count if self.compat == "mindspore" else 1


M2, M4, C2 = ("micro", 2), ("micro", 4), ("copies", 2)
EVERY_BLOCK: Mapping[str, Mapping[str, Any]] = {f"blocks.{i}": {} for i in range(BLOCKS)}
KEEPS_COLLECTIVES = {path: {"mp_comm_recompute": False} for path in EVERY_BLOCK}
GATHERS_AGAIN = {path: {"parallel_optimizer_comm_recompute": True} for path in EVERY_BLOCK}
SAVES = {"blocks.0": {"save": ["linear"]}, "blocks.1": {"save": "policy"}, "blocks.2": {"save": []}}

LOSS = 2
"""Messages of a cross-entropy: the number of labels that count, which leaves first, and the sum."""

CASES = [
    # accumulation: one reduction at the end, or one per micro batch at level2 and level3
    StepCase("accumulation", parts=(M4,), calls={"all_reduce": 4 * LOSS + 1}, float32=True),
    StepCase(
        "accumulation-level1",
        "level1",
        parts=(M4,),
        calls={"all_gather": 1, "reduce_scatter": 1, "all_reduce": 4 * LOSS},
    ),
    StepCase(
        "accumulation-level2",
        "level2",
        parts=(M4,),
        calls={"all_gather": 1, "reduce_scatter": 4, "all_reduce": 4 * LOSS},
    ),
    StepCase(
        "accumulation-level3",
        "level3",
        parts=(M4,),
        calls={"all_gather": 8, "reduce_scatter": 4, "all_reduce": 4 * LOSS},
        float32=True,
    ),
    StepCase("accumulation-level2-shard-size-2", "level2", 2, parts=(M2,)),
    StepCase("accumulation-of-copies", parts=(M2, C2), form="step"),
    StepCase("copies-of-accumulation-level3", "level3", parts=(C2, M2)),
    StepCase("accumulation-scaled", "level2", parts=(M2,), scaled=True, steps=2),
    StepCase("accumulation-sum", parts=(M4,), compat="mindspore", float32=True),
    StepCase("accumulation-of-copies-sum-level2", "level2", parts=(M2, C2), compat="mindspore", form="step"),
    StepCase("accumulation-tensor-parallel", parts=(M2,), strategies=MEGATRON, dataset="full_batch"),
    StepCase("accumulation-mixed-level3", "level3", parts=(M2, C2), strategies=MIXED, dataset="full_batch"),
    StepCase("accumulation-model", "level2", parts=(M2,), form="model"),
    # messages: one per parameter, or as the numbers say
    StepCase("nothing-fused", comm_fusion={"openstate": False}, calls={"all_reduce": 13 + LOSS}, steps=2),
    StepCase(
        "all-reduces-by-index",
        parts=(M2,),
        comm_fusion={"allreduce": {"mode": "index", "config": [3, 5]}},
        calls={"all_reduce": 3 + 2 * LOSS},
        steps=2,
    ),
    StepCase(
        "nothing-fused-level3-accumulation",
        "level3",
        parts=(M2,),
        comm_fusion={"openstate": False},
        calls={"all_gather": 2 * 2 * 13, "reduce_scatter": 2 * 13, "all_reduce": 2 * LOSS},
        steps=2,
    ),
    # copies: any number, and inside a step function
    StepCase("three-parts-of-copies", parts=(("copies", 2), ("copies", 2)), strategies=MEGATRON, dataset="full_batch"),
    StepCase("fresh-closures", "level1", parts=(C2,), form="fresh closures"),
    # recompute; a Megatron block has one all-reduce forward and, through its residual, one backward
    StepCase("recompute", recompute=EVERY_BLOCK, calls={"all_reduce": 1 + LOSS}, float32=True),
    StepCase("recompute-one-layer-with-copies", parts=(C2,), recompute={"blocks.1.up": {}}),
    StepCase("recompute-tensor-parallel", strategies=MEGATRON, dataset="full_batch", recompute=EVERY_BLOCK),
    StepCase("recompute-keeps-collectives", strategies=MEGATRON, dataset="full_batch", recompute=KEEPS_COLLECTIVES),
    StepCase("recompute-mixed-copies", parts=(C2,), strategies=MIXED, recompute=EVERY_BLOCK),
    StepCase("recompute-saves-linear", "level3", parts=(C2,), strategies=MIXED, recompute=SAVES),
    StepCase(
        "recompute-gathers-again",
        "level1",
        parts=(C2,),
        recompute=GATHERS_AGAIN,
        calls={"all_gather": 3, "reduce_scatter": 2, "all_reduce": 2 * LOSS},
    ),
    StepCase("recompute-everything", "level3", recompute={"": {}}),
    StepCase("recompute-level3-accumulation", "level3", parts=(M2, C2), strategies=MIXED, recompute=EVERY_BLOCK),
]
