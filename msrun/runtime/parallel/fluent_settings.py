"""Settings of AutoParallel that are written one after the other: `AutoParallel(net).hsdp().pipeline(2)`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from msrun.errors import StrategyError
from msrun.runtime.cost.devices import DeviceProfile
from msrun.runtime.parallel.host_operators import DeviceLimit
from msrun.runtime.parallel.operator_strategies import check_path
from msrun.runtime.parallel.overlap import parse_transformer_opt
from msrun.runtime.parallel.parameters.fusion import parse_comm_fusion
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec, Level
from msrun.runtime.parallel.pipeline.pipeline import PipelineSpec
from msrun.runtime.parallel.precision import PrecisionSpec
from msrun.runtime.parallel.recomputation import check_limit
from msrun.runtime.parallel.settings import SEARCH_WORDS, DatasetStrategy, ParallelSettings, SearchSettings, profile_of
from msrun.runtime.schedule.compiled_segments import CompileSpec
from msrun.runtime.search.search import TIME_LIMIT_S


class FluentSettings:
    """Setters that return the object itself; they come before its first call."""

    settings: ParallelSettings

    @property
    def _is_placed(self) -> bool:
        """True after the first call: nothing may be set any more."""
        return False

    def hsdp(self, shard_size: int = -1, threshold: int = 64, optimizer_level: Level = "level1") -> Self:
        """Turn optimizer parallel on: parameters of `threshold` KB or more, and their optimizer state, are stored cut.

        Args:
            shard_size: ranks that share one parameter; -1 = all that hold copies of it.
            optimizer_level: level1 weights and state; level2 also gradients; level3 also gathers weights again for
                the backward pass.
        """
        return self._set("hsdp", hsdp=HsdpSpec(shard_size, threshold, optimizer_level))

    def dataset_strategy(self, config: DatasetStrategy) -> Self:
        """Say what each rank passes: "data_parallel" its own part of the batch, "full_batch" all of it, or for each
        input a tuple of parts per dimension or a Layout."""
        return self._set("dataset_strategy", dataset_strategy=config)

    def enable_gradients_mean(self) -> Self:
        """Average the gradients of the ranks in the modes without capture, also with compat="mindspore".

        In semi_auto they are those of the global loss already, and stay so.
        """
        return self._set("enable_gradients_mean", gradients_mean=True)

    def parameter_broadcast(self, is_on: bool = True) -> Self:
        """Say whether the modes without capture start every rank from rank 0's values.

        The default is yes, and with compat="mindspore" no. Captured networks always start from equal values.
        """
        return self._set("parameter_broadcast", parameter_broadcast=is_on)

    def enable_fp32_communication(self) -> Self:
        """Add up gradients of 16-bit parameters in float32, which is the default (MindSpore's gradient_fp32_sync)."""
        return self._set("enable_fp32_communication", gradient_fp32_sync=True)

    def disable_gradient_fp32_sync(self) -> Self:
        """Let gradients of 16 bits travel, and be added up, in 16 bits."""
        return self._set("disable_gradient_fp32_sync", gradient_fp32_sync=False)

    def mixed_precision(self, dtype: str = "bfloat16", loss_scale: float | str | None = None) -> Self:
        """Compute in 16 bits where torch's autocast does; weights, gradients and optimizer stay in float32.

        Args:
            dtype: "bfloat16" or "float16".
            loss_scale: factor of the backward pass, or "dynamic"; gradients come out without it. A step whose
                gradients are not finite on any rank is skipped by every optimizer on all ranks.
        """
        return self._set("mixed_precision", precision=PrecisionSpec(dtype, loss_scale))

    def comm_fusion(self, config: Mapping[str, Any] | None) -> Self:
        """Say which messages of parameters and gradients are joined; see `fusion_config.parse_comm_fusion`.

        Parameters with a number of their own (`set_comm_fusion`) keep to it, unless openstate is False: then nothing is
        joined.
        """
        return self._set("comm_fusion", comm_fusion=parse_comm_fusion(config))

    def transformer_opt(self, config: Mapping[str, Any] | str | Path | None) -> Self:
        """Switch overlaps on: a dict, or the path of a JSON file, with MindSpore's switches; all are off by default.

        grad_matmul_communication_overlap: the gradients of linear layers' weights are computed while those of their
        inputs travel to the other ranks of an operator strategy.
        """
        return self._set("transformer_opt", overlaps_weights=parse_transformer_opt(config))

    def recompute(self, mode: str, *, memory_limit_mb: float) -> Self:
        """Recompute modules, chosen at capture, so that a rank's activations take at most `memory_limit_mb`.

        Args:
            mode: "auto"; single modules are named with `recompute(module)`, and stay.

        Raises:
            StrategyError: at capture, when nothing fits; with the bytes that are needed.
        """
        return self._set("recompute", activation_limit_bytes=check_limit(mode, memory_limit_mb))

    def device_memory_limit(self, limit_mb: float, optimizer_states: int = 2) -> Self:
        """Move operators and their parameters to the host, chosen at the first capture, until a step fits.

        Counted are, for this rank, parameters, what is gathered of them, their gradients and optimizer states, and the
        activations of one micro batch. Those operators go first that save most bytes for each byte that a step copies;
        operators with a target (`set_target`) stay where they are. The plan's notes say what was moved.

        Args:
            optimizer_states: tensors of a weight's size that the optimizer keeps for it: Adam 2, momentum 1, SGD 0.

        Raises:
            StrategyError: at the first capture, when nothing fits; with the bytes that are missing.
        """
        return self._set("device_memory_limit", device_limit=DeviceLimit(limit_mb, optimizer_states))

    def pipeline(
        self, stages: int = 1, scheduler: str = "1f1b", interleave: bool = False, output_broadcast: bool = False
    ) -> Self:
        """Divide the ranks into `stages` groups of consecutive ranks; each runs one part of a `Pipeline` network.

        Inside a stage everything works as in a world of its ranks. Ranks of equal place in their stages pass the same
        part of the batch.

        Args:
            scheduler: gpipe, 1f1b, eager_1f1b, zero_bubble, zbv or dualpipev. eager_1f1b gives every message a micro
                batch's time to travel and holds up to 2 * stages - 1 micro batches; the others' order is torch's.
            interleave: let each rank hold several parts of the network (with 1f1b and zero_bubble); zbv and dualpipev
                always hold two.
            output_broadcast: give results that are no scalars to every rank; without it, ranks of other stages than
                the one that makes them get None.
        """
        return self._set("pipeline", pipeline=PipelineSpec(stages, scheduler, interleave, output_broadcast))

    def search(
        self,
        device: str | os.PathLike[str] | DeviceProfile | None = None,
        *,
        memory_limit_mb: float | None = None,
        optimizer_states: int = 2,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> Self:
        """Say what a search of strategies reckons with; of the modes that search.

        Args:
            device: a named profile (ascend910a, ascend910b, a100, h100, h200, cpu), a `DeviceProfile`, or the JSON file
                of one. None: cpu, a100 or ascend910b, as this process computes.
            memory_limit_mb: what a step may take of a device; None: what the profile has.
            optimizer_states: tensors of a weight's size that the optimizer keeps for it: Adam 2, momentum 1, SGD 0.
            time_limit_s: no further plan is looked for afterwards, on any rank; the first one always is. The plan's
                notes say so.

        Raises:
            StrategyError: an unknown device, a value out of its range, or a mode that does not search.
        """
        if self.settings.search is None:
            raise StrategyError(
                f"search() with parallel_mode={self.settings.parallel_mode!r}, which searches nothing: use one of "
                f"{', '.join(SEARCH_WORDS)}"
            )
        mode = self.settings.search.mode
        settings = SearchSettings(mode, profile_of(device), memory_limit_mb, optimizer_states, time_limit_s)
        return self._set("search", search=settings)

    def compile(self, backend: str | Callable[..., Any] = "inductor", mode: str | None = None) -> Self:
        """Run the segments between collectives compiled by torch.compile; meant for accelerators.

        Results differ from those without it as those of torch.compile do: by rounding. Recomputed modules, operators
        of the host and layers with deferred weight gradients run as without it.

        Args:
            backend: of torch.compile.
            mode: "default" or "max-autotune-no-cudagraphs", of inductor.

        Raises:
            StrategyError: a backend or mode that there is not.
            CaptureError: at the first call, the backend fails, as for lack of a C++ compiler.
        """
        return self._set("compile", compiler=CompileSpec(backend, mode))

    def save_operator_strategy_file(self, path: str | os.PathLike[str]) -> Self:
        """Write how every operator is cut to a JSON file at the first call; see `ParallelPlan.strategies`."""
        return self._set("save_operator_strategy_file", strategies_to=check_path(path))

    def load_operator_strategy_file(self, path: str | os.PathLike[str]) -> Self:
        """Cut every operator as a JSON file says, instead of searching.

        Raises:
            StrategyError: at the first call, a file of another network or number of ranks.
        """
        return self._set("load_operator_strategy_file", strategies_from=check_path(path))

    def check_first_step(self, value: bool = True) -> Self:
        """Always compare the first training step with that of one process before it counts, or never.

        The default is to do so where it is cheap. The variable MSRUN_VERIFY, 1 or 0, decides over this.
        """
        return self._set("check_first_step", checks_first_step=value)

    def keep_captures(self, count: int) -> Self:
        """Keep the programs of at most `count` kinds of calls, by default 64: tensors of other shapes, other flags.

        The one that ran longest ago is let go, with its memory, and captured again when it is needed.

        Raises:
            StrategyError: not a whole number above 0.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise StrategyError(f"keep_captures({count!r}): give a whole number above 0")
        return self._set("keep_captures", kept_captures=count)

    def strict(self, value: bool = True) -> Self:
        """Refuse, at capture, every redistribution that was not asked for with out_strategy or dataset_strategy.

        The error names the operators on both sides, their layouts, the bytes, and what to write.
        """
        return self._set("strict", is_strict=value)

    def _set(self, name: str, **changes: Any) -> Self:
        self.settings.check_setter(name, changes)
        if self._is_placed:
            raise StrategyError(f"{name}() came after the first call: the parameters are placed already; set it before")
        self.settings = replace(self.settings, **changes)
        return self
