"""RunSpec: how a local program is run, apart from what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msrun.runtime import world
from msrun.runtime.parallel.batch.parts import BatchParts
from msrun.runtime.parallel.parameters.fusion_config import FusionConfig
from msrun.runtime.parallel.parameters.hsdp import Level
from msrun.runtime.parallel.scaling import Scales, scales
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.schedule.compiled_segments import CompileSpec
from msrun.runtime.schedule.regions import RecomputeSpec


@dataclass(frozen=True)
class RunSpec:
    """What the user's settings and wrappers ask of the run."""

    parts: BatchParts = field(default_factory=BatchParts)
    """Copies and micro batches."""
    scales: Scales = Scales(1.0, 1.0)  # noqa: RUF009 - frozen
    """Factors of every part's scalar results and of its gradient; they differ only with micro batches."""
    level: Level = "level1"
    """Of optimizer parallel."""
    fusion: FusionConfig | None = None
    """Which parameters share a message; None: by size."""
    recompute: Mapping[str, RecomputeSpec] = field(default_factory=dict)
    """Module path -> how it is recomputed."""
    sums_wide: bool = True
    """Gradients of 16 bits travel and are added up in float32."""
    overlaps_weights: bool = False
    """Weights' gradients are computed while inputs' gradients travel."""
    defers_weights: bool = False
    """Weights' gradients are computed when the schedule of a pipeline says."""
    compiler: CompileSpec | None = None
    """What compiles segments; None: they run operator by operator."""

    @classmethod
    def of(
        cls,
        settings: ParallelSettings,
        parts: BatchParts,
        recompute: Mapping[str, RecomputeSpec],
        *,
        defers_weights: bool = False,
    ) -> RunSpec:
        """Return what the settings ask for; weights that a schedule defers are not computed in between too."""
        return cls(
            parts,
            scales(settings.compat, parts.copies, parts.micro_batches),
            settings.hsdp.optimizer_level if settings.hsdp else "level1",
            settings.comm_fusion,
            recompute,
            settings.gradient_fp32_sync,
            settings.overlaps_weights and not defers_weights,
            defers_weights,
            settings.compiler if world.simulation_level() is None else None,
        )

    @property
    def regathers(self) -> bool:
        """True when cut parameters are gathered again for the backward pass."""
        return self.level == "level3"

    @property
    def scatters(self) -> bool:
        """True when between micro batches only the gradients of stored parts are kept."""
        return self.level != "level1"
