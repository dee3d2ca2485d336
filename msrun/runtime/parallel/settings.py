"""ParallelSettings: everything the user has asked of one AutoParallel. Frozen; each setter makes a new one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from msrun import contract
from msrun.errors import StrategyError, near_miss
from msrun.runtime import world
from msrun.runtime.cost.devices import DeviceProfile, find_profile
from msrun.runtime.parallel.host_operators import DeviceLimit
from msrun.runtime.parallel.parameters.fusion import FusionConfig, parse_comm_fusion, parse_transformer_opt
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec, Level
from msrun.runtime.parallel.pipeline.pipeline import PipelineSpec
from msrun.runtime.parallel.precision import Compat, PrecisionSpec, check_compat
from msrun.runtime.parallel.recomputation import check_limit
from msrun.runtime.schedule.deferred_weights import CompileSpec
from msrun.runtime.search.search import SEARCH_MODES, TIME_LIMIT_S, SearchSpec, Splits
from msrun.runtime.sharding.named_layout import Layout

RECURSIVE = "recursive_programming"
SEARCH_WORDS = {"auto_parallel": RECURSIVE} | {mode: mode for mode in SEARCH_MODES}
"""Word of `parallel_mode` -> how strategies are searched; AUTO_PARALLEL searches as MindSpore does by default."""
_PROFILE_OF_DEVICE = {"cpu": "cpu", "cuda": "a100", "npu": "ascend910b"}
_KNOWN_GPUS = ("h200", "h100", "a100")
"""Profiles that are found by the name that CUDA gives the device."""
MB = 2**20


@dataclass(frozen=True)
class SearchSettings:
    """What `AutoParallel.search` asks for."""

    mode: str
    device: DeviceProfile | None = None
    """None: the profile of the device that this process computes on, in a dry run of the one that it stands for."""
    memory_limit_mb: float | None = None
    optimizer_states: int = 2
    time_limit_s: float = TIME_LIMIT_S

    def __post_init__(self) -> None:
        limit, states = self.memory_limit_mb, self.optimizer_states
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (is_number and limit > 0):
            raise StrategyError(f"search(memory_limit_mb={limit!r}): must be a number of MB above 0")
        if not isinstance(states, int) or isinstance(states, bool) or states < 0:
            raise StrategyError(f"search(optimizer_states={states!r}): must be a whole number, 0 or more")
        seconds = self.time_limit_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise StrategyError(f"search(time_limit_s={seconds!r}): must be a number of seconds above 0")

    def spec(self) -> SearchSpec:
        """Return what is searched for in this process."""
        device = self.device or own_profile()
        limit = None if self.memory_limit_mb is None else int(self.memory_limit_mb * MB)
        return SearchSpec(self.mode, device, limit, self.optimizer_states, self.time_limit_s)


def own_profile() -> DeviceProfile:
    """Return the profile of the device that this process computes on, or in a dry run stands for."""
    if contract.MSRUN_SIM_LEVEL in os.environ:
        return find_profile(os.environ.get(contract.MSRUN_SIM_DEVICE, "cpu"))
    kind = world.device().type
    name = torch.cuda.get_device_name(world.device()).lower() if kind == "cuda" else ""
    known = next((word for word in _KNOWN_GPUS if word in name), "")
    return find_profile(known or _PROFILE_OF_DEVICE.get(kind, "cpu"))


def check_search_mode(word: str, value: Any) -> str:
    """Return a way to search."""
    if value not in SEARCH_MODES:
        raise StrategyError(f"{word}={value!r}: must be one of {', '.join(SEARCH_MODES)}")
    return str(value)


def profile_of(device: str | os.PathLike[str] | DeviceProfile | None) -> DeviceProfile | None:
    """Return the profile that a user names; None for None."""
    return None if device is None else find_profile(device)


MODES = ("semi_auto", "data_parallel", "hybrid_parallel", "stand_alone")
_REPLICA_MODES = ("data_parallel", "hybrid_parallel")
_OLD_NAMES = {"semi_auto_parallel": "semi_auto"}
_SETTERS_OF_ANY_MODE = ("mixed_precision", "check_first_step")
_REPLICA_SETTERS = (
    "enable_gradients_mean",
    "parameter_broadcast",
    "enable_fp32_communication",
    "disable_gradient_fp32_sync",
)
DATASET_WORDS = ("data_parallel", "full_batch")
DatasetStrategy = str | tuple[tuple[int, ...] | Layout, ...]


KEPT_CAPTURES = 64
"""Kinds of calls, such as batches of different lengths, whose programs stay in memory."""


@dataclass(frozen=True)
class ParallelSettings:
    """What was asked."""

    parallel_mode: str = "semi_auto"
    compat: Compat = "torch"
    hsdp: HsdpSpec | None = None
    dataset_strategy: DatasetStrategy = "data_parallel"
    """What each rank passes: its own part of the batch, all of it, or parts per dimension for each input."""
    gradients_mean: bool | None = None
    """Gradients of whole parameters: mean over the ranks, or sum. None: what `compat` means by default."""
    parameter_broadcast: bool | None = None
    """Start every rank from rank 0's values, in the modes without capture. None: what `compat` means by default."""
    gradient_fp32_sync: bool = True
    """Gradients of 16 bits travel and are added up in float32."""
    precision: PrecisionSpec | None = None
    """Mixed precision; None: everything as the network has it."""
    comm_fusion: FusionConfig = field(default_factory=FusionConfig)
    activation_limit_bytes: int | None = None
    """Modules are recomputed until a rank's activations fit; None: only those that the user names."""
    device_limit: DeviceLimit | None = None
    """Operators are moved to the host until a step fits into the device; None: only those that the user names."""
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    overlaps_weights: bool = False
    """Gradients of linear layers' weights are computed while those of their inputs travel."""
    compiler: CompileSpec | None = None
    """What compiles the segments of the local program; None: they run operator by operator."""
    checks_first_step: bool | None = None
    """Compare the first training step with that of one process; None: where that is cheap."""
    kept_captures: int = KEPT_CAPTURES
    """Captured calls that are kept; the one that ran longest ago goes first."""
    is_strict: bool = False
    """Refuse traffic between layouts that the user did not ask for."""
    search: SearchSettings | None = None
    """How strategies are searched for; None: they are not."""
    strategies_from: Path | None = None
    """File of operator strategies that are taken as they are."""
    splits: Splits | None = None
    """Strategies that are taken as they are, of a search of degrees."""
    strategies_to: Path | None = None
    """File that gets the operator strategies of the first call."""

    def __post_init__(self) -> None:
        if self.parallel_mode in SEARCH_WORDS and self.search is None:
            object.__setattr__(self, "search", SearchSettings(SEARCH_WORDS[self.parallel_mode]))
        object.__setattr__(self, "parallel_mode", check_mode(self.parallel_mode))
        check_compat(self.compat)
        scale = self.precision.loss_scale if self.precision else None
        if scale is not None and self.hsdp is not None and self.is_replicated:
            raise StrategyError(
                f"mixed_precision(loss_scale={scale!r}) with hsdp in {self.parallel_mode}: FSDP2 hands out gradients "
                'that no scale can be taken off; use bfloat16, which needs none, or parallel_mode="semi_auto"'
            )
        config = self.dataset_strategy
        if isinstance(config, str) and config not in DATASET_WORDS:
            raise StrategyError(
                f"dataset_strategy({config!r}){near_miss(config, DATASET_WORDS)}: "
                "must be data_parallel, full_batch or a tuple of tuples"
            )
        if not isinstance(config, str):
            wrong = [entry for entry in config if isinstance(entry, Layout) and entry.tensor_map is None]
            if wrong:
                raise StrategyError(f"dataset_strategy: call {wrong[0]} with axis names, e.g. layout('dp', 'None')")

    def batch_parts(self, ranks: int) -> int:
        """Return how many parts the rows of the global batch are cut into over `ranks` ranks, as they come in.

        Of the network that runs as it is, rows are cut outside: the part of each rank is said where it is run.
        """
        if ranks == 1 or not self.is_captured or self.dataset_strategy == "full_batch":
            return 1
        if isinstance(self.dataset_strategy, str):
            return self.pipeline.ranks_per_stage(ranks)
        first = self.dataset_strategy[0]
        return first.numbers[0] if isinstance(first, Layout) else first[0]

    def check_setter(self, name: str, changes: Mapping[str, Any]) -> None:
        """Refuse a setter that the mode cannot obey."""
        if self.is_captured or name in _SETTERS_OF_ANY_MODE:
            return
        if self.is_replicated:
            if name in _REPLICA_SETTERS or (name == "hsdp" and self.parallel_mode == "data_parallel"):
                return
            if changes == {"dataset_strategy": "data_parallel"}:
                return
        elif self.is_lone:
            raise StrategyError(f'{name}() with parallel_mode="stand_alone": its ranks exchange nothing; leave it out')
        raise StrategyError(f'{name}() needs a captured graph: use parallel_mode="semi_auto"')

    @property
    def is_captured(self) -> bool:
        """Whether networks are captured and cut operator by operator."""
        return self.parallel_mode == "semi_auto"

    @property
    def is_replicated(self) -> bool:
        """Whether every rank runs the network as it is, on its own part of the batch."""
        return self.parallel_mode in _REPLICA_MODES

    @property
    def is_cut_by_hand(self) -> bool:
        """Whether parameters may be marked as this rank's own parts."""
        return self.parallel_mode == "hybrid_parallel"

    @property
    def is_lone(self) -> bool:
        """Whether every rank trains for itself, so that nothing is exchanged."""
        return self.parallel_mode == "stand_alone"

    @property
    def takes_parts(self) -> bool:
        """Whether the ranks should pass different batches; those of a hybrid network may need the same."""
        ranks = world.get_group_size()
        if ranks == 1 or not self.is_captured:
            return ranks > 1 and self.parallel_mode == "data_parallel"
        return self.dataset_strategy == "data_parallel" and self.pipeline.ranks_per_stage(ranks) > 1

    @property
    def level(self) -> Level:
        """Of optimizer parallel."""
        return self.hsdp.optimizer_level if self.hsdp else "level1"

    @property
    def mode_text(self) -> str:
        """The mode as a plan names it."""
        return self.parallel_mode if self.search is None else self.search.mode

    @property
    def limits(self) -> list[str]:
        """Setters of limits that are met at capture."""
        limits = {'recompute("auto")': self.activation_limit_bytes, "device_memory_limit": self.device_limit}
        return [name for name, limit in limits.items() if limit is not None]

    @property
    def notes(self) -> list[str]:
        """What the plan of a captured network must say about these settings."""
        notes = list(self.precision.notes) if self.precision else []
        if self.gradients_mean:
            notes.append("gradients_mean changes nothing: gradients in semi_auto are those of the global mean loss")
        return notes

    @property
    def averages_gradients(self) -> bool:
        """Whether the modes without capture take the mean of the ranks' gradients; else their sum."""
        return self.gradients_mean if self.gradients_mean is not None else self.compat == "torch"

    @property
    def has_own_results(self) -> bool:
        """Whether every rank's numbers are those of its own rows, as MindSpore's are without capture; else the mean."""
        return self.is_replicated and self.compat == "mindspore"

    @property
    def broadcasts_parameters(self) -> bool:
        """Whether the modes without capture start from rank 0's values; MindSpore does not by default."""
        return self.parameter_broadcast if self.parameter_broadcast is not None else self.compat == "torch"


def check_mode(word: str) -> str:
    """Return the mode that a word means; MindSpore's old names mean what they meant.

    A word for a search means semi_auto, whose strategies are then searched for.
    """
    mode = "semi_auto" if word in SEARCH_WORDS else _OLD_NAMES.get(word, word)
    if mode not in MODES:
        known = [*MODES, *SEARCH_WORDS]
        raise StrategyError(
            f"parallel_mode={word!r}{near_miss(str(word), known)}: must be {', '.join(known[:-1])} or {known[-1]}"
        )
    return mode


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a strategy file."""
    if Path(path).suffix != ".json":
        raise StrategyError(f"operator strategy file {str(path)!r}: its name must end in .json")
    return Path(path)


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
