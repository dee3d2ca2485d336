"""AutoParallel: a network, or a step function, on all ranks as if on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import progress, world
from msrun.runtime.capture.target import Target, find_target
from msrun.runtime.graph.activations import ActivationEstimate
from msrun.runtime.layout import build_mesh
from msrun.runtime.nn.deferred_init import init_parameters
from msrun.runtime.nn.random_calls import RandomCalls
from msrun.runtime.nn.random_stream import drawing, part_of_batch
from msrun.runtime.parallel.batch.parts import describe_batch, find_tensors
from msrun.runtime.parallel.compilation.agreement import agreement, answer_of_rank_0, own_answer
from msrun.runtime.parallel.compilation.announcement import announce, log
from msrun.runtime.parallel.compilation.captured_call import CapturedCall, ParameterChanged
from msrun.runtime.parallel.compilation.compilation import Compilation
from msrun.runtime.parallel.compile_call import compile_call
from msrun.runtime.parallel.context import default_settings
from msrun.runtime.parallel.modes.data_parallel import Replicas
from msrun.runtime.parallel.modes.fsdp import Decision
from msrun.runtime.parallel.modes.hybrid import check_no_layerwise
from msrun.runtime.parallel.modes.replica_plan import build_replica_plan
from msrun.runtime.parallel.overlap import parse_transformer_opt
from msrun.runtime.parallel.parameters.fusion_config import parse_comm_fusion
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec, Level
from msrun.runtime.parallel.parameters.storage import ParameterStorage
from msrun.runtime.parallel.pipeline.pipeline import PipelineSpec
from msrun.runtime.parallel.pipeline.pipelined import PipelinedCall
from msrun.runtime.parallel.plan import ParallelPlan
from msrun.runtime.parallel.precision import LossScale, PrecisionSpec, autocast
from msrun.runtime.parallel.recompute import checkpointed
from msrun.runtime.parallel.recompute_search import check_limit
from msrun.runtime.parallel.scaling import Compat, current_compat, current_loss_scale
from msrun.runtime.parallel.settings import REPLICA_MODES, DatasetStrategy, ParallelSettings
from msrun.runtime.parallel.user_name import user_name

current_parallel: ContextVar[AutoParallel | None] = ContextVar("current_parallel", default=None)
"""The AutoParallel whose step function is running: `value_and_grad` asks it to run the network."""


class AutoParallel:
    """Run `network` in parallel over the world.

    `network` is a module (with its loss), used like any module in an ordinary torch loop; or a step function that
    calls `value_and_grad`. The first call captures it, decides every operator's strategy and gives each rank its part
    of the parameters; the parameter objects and their names stay the user's. In a world of one process the network
    runs as it is.

    Args:
        parallel_mode: "semi_auto": strategies set with `shard`; the rest keeps its input's cut or runs data-parallel.
            "data_parallel": every rank runs the network as it is, without capture: torch's DDP, with hsdp its FSDP2.
            "hybrid_parallel": the same around parts cut by hand (`layerwise_parallel`, `all_reduce`, ...).
            "stand_alone": every rank trains for itself, nothing is exchanged.
            None: what `set_auto_parallel_context` says, else "semi_auto".
        compat: "torch", the default: losses of copies, and without capture gradients of ranks, are averaged;
            "mindspore": they are added up.

    Every setter returns self and must come before the first call.

    Raises:
        StrategyError: unknown mode or word, illegal strategy.
        CaptureError: at the first call, when the network cannot be captured.
    """

    def __init__(
        self, network: Callable[..., Any], parallel_mode: str | None = None, *, compat: Compat | None = None
    ) -> None:
        self.network = network
        self.settings: ParallelSettings = default_settings(parallel_mode, compat)
        self._compilations: dict[int, Compilation] = {}
        """id of the root module -> what compiles its calls"""
        self._captured: list[CapturedCall] = []
        """Calls that were captured, the one that ran last first."""
        self._roots: dict[tuple[tuple[str, int], ...], nn.Module] = {}
        """modules that a step function calls -> what holds them"""
        self._plan: ParallelPlan | None = None
        self._replicas: Replicas | None = None
        self._loss_scale: LossScale | None = None
        self._watched: dict[int, nn.Module] = {}
        """id of the root -> a network whose gradients come without the loss scale"""
        self._is_warned = False
        self._has_run = False

    # -- settings -----------------------------------------------------------------------------------------------

    def hsdp(self, shard_size: int = -1, threshold: int = 64, optimizer_level: Level = "level1") -> AutoParallel:
        """Turn optimizer parallel on: parameters of `threshold` KB or more, and their optimizer state, are stored cut.

        Args:
            shard_size: ranks that share one parameter; -1 = all that hold copies of it.
            optimizer_level: level1 weights and state; level2 also gradients; level3 also gathers weights again for
                the backward pass.
        """
        return self._set("hsdp", hsdp=HsdpSpec(shard_size, threshold, optimizer_level))

    def dataset_strategy(self, config: DatasetStrategy) -> AutoParallel:
        """Say what each rank passes: "data_parallel" its own part of the batch, "full_batch" all of it, or for each
        input a tuple of parts per dimension or a Layout."""
        return self._set("dataset_strategy", dataset_strategy=config)

    def enable_gradients_mean(self) -> AutoParallel:
        """Average the gradients of the ranks in the modes without capture, also with compat="mindspore".

        In semi_auto they are those of the global loss already, and stay so.
        """
        return self._set("enable_gradients_mean", gradients_mean=True)

    def parameter_broadcast(self, is_on: bool = True) -> AutoParallel:
        """Say whether the modes without capture start every rank from rank 0's values.

        The default is yes, and with compat="mindspore" no. Captured networks always start from equal values.
        """
        return self._set("parameter_broadcast", parameter_broadcast=is_on)

    def enable_fp32_communication(self) -> AutoParallel:
        """Add up gradients of 16-bit parameters in float32, which is the default (MindSpore's gradient_fp32_sync)."""
        return self._set("enable_fp32_communication", gradient_fp32_sync=True)

    def disable_gradient_fp32_sync(self) -> AutoParallel:
        """Let gradients of 16 bits travel, and be added up, in 16 bits."""
        return self._set("disable_gradient_fp32_sync", gradient_fp32_sync=False)

    def mixed_precision(self, dtype: str = "bfloat16", loss_scale: float | str | None = None) -> AutoParallel:
        """Compute in 16 bits where torch's autocast does; weights, gradients and optimizer stay in float32.

        Args:
            dtype: "bfloat16" or "float16".
            loss_scale: factor of the backward pass, or "dynamic"; gradients come out without it. A step whose
                gradients are not finite on any rank is skipped by every optimizer on all ranks.
        """
        return self._set("mixed_precision", precision=PrecisionSpec(dtype, loss_scale))

    def comm_fusion(self, config: Mapping[str, Any] | None) -> AutoParallel:
        """Say which messages of parameters and gradients are joined; see `fusion_config.parse_comm_fusion`.

        Parameters with a number of their own (`set_comm_fusion`) keep to it, unless openstate is False: then nothing is
        joined.
        """
        return self._set("comm_fusion", comm_fusion=parse_comm_fusion(config))

    def transformer_opt(self, config: Mapping[str, Any] | str | Path | None) -> AutoParallel:
        """Switch overlaps on: a dict, or the path of a JSON file, with MindSpore's switches; all are off by default.

        grad_matmul_communication_overlap: the gradients of linear layers' weights are computed while those of their
        inputs travel to the other ranks of an operator strategy.
        """
        return self._set("transformer_opt", overlaps_weights=parse_transformer_opt(config))

    def recompute(self, mode: str, *, memory_limit_mb: float) -> AutoParallel:
        """Recompute modules, chosen at capture, so that a rank's activations take at most `memory_limit_mb`.

        Args:
            mode: "auto"; single modules are named with `recompute(module)`, and stay.

        Raises:
            StrategyError: at capture, when nothing fits; with the bytes that are needed.
        """
        return self._set("recompute", activation_limit_bytes=check_limit(mode, memory_limit_mb))

    def pipeline(
        self, stages: int = 1, scheduler: str = "1f1b", interleave: bool = False, output_broadcast: bool = False
    ) -> AutoParallel:
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

    def strict(self, value: bool = True) -> AutoParallel:
        """Refuse, at capture, every redistribution that was not asked for with out_strategy or dataset_strategy.

        The error names the operators on both sides, their layouts, the bytes, and what to write.
        """
        return self._set("strict", is_strict=value)

    def _set(self, name: str, **changes: Any) -> AutoParallel:
        self.settings.check_setter(name, changes)
        if self._captured or self._replicas is not None:
            raise StrategyError(f"{name}() came after the first call: the parameters are placed already; set it before")
        self.settings = replace(self.settings, **changes)
        return self

    # -- calling ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step function, or the network on this rank's part."""
        compat = current_compat.set(self.settings.compat)
        try:
            if isinstance(self.network, nn.Module):
                return self.run(self.network, args, kwargs)
            token = current_parallel.set(self)
            try:
                result = self.network(*args, **kwargs)
            finally:
                current_parallel.reset(token)
            if not self._has_run:
                raise CaptureError(
                    "the step function called no function of value_and_grad, so nothing ran in parallel: take the "
                    "gradients with value_and_grad, or give AutoParallel the network"
                )
            return result
        finally:
            current_compat.reset(compat)

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function of tensors in parallel; used by `value_and_grad`."""
        self._has_run = True
        known = self._find_captured(function, args, kwargs) if self._captured else None
        target = self._target(function) if known is None else Target(function, known.root)
        if torch.is_grad_enabled():
            progress.begin_step()
        answer = own_answer if self.settings.parallel_mode == "stand_alone" else answer_of_rank_0
        with drawing(target.root, answer, self.settings.batch_parts(world.get_group_size())):
            if self._loss_scale is None and self.settings.precision and self.settings.precision.loss_scale is not None:
                is_shared = self.settings.parallel_mode != "stand_alone"
                self._loss_scale = LossScale(self.settings.precision, is_shared=is_shared)
            if self._loss_scale is None or not torch.is_grad_enabled():
                return self._run(known, target, args, kwargs)
            args, kwargs = self._loss_scale.enter((tuple(args), dict(kwargs)))
            token = current_loss_scale.set(self._loss_scale.value)
            try:
                result = self._run(known, target, args, kwargs)
            finally:
                current_loss_scale.reset(token)
            if id(target.root) not in self._watched:
                self._watched[id(target.root)] = target.root
                self._loss_scale.watch(target.root.parameters())
            return self._loss_scale.leave(result)

    def _find_captured(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> CapturedCall | None:
        """Return a captured call that does the same; the newest one stands first."""
        args, tensors = tuple(args), find_tensors(args, kwargs)
        with autocast(self.settings.precision):
            for index, call in enumerate(self._captured):
                if call.holds(function, args, kwargs, tensors):
                    if index:
                        self._captured.insert(0, self._captured.pop(index))
                    return call
        return None

    def _run(self, known: CapturedCall | None, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if world.get_group_size() == 1 or self.settings.parallel_mode == "stand_alone":
            init_parameters(target.root)
            self._warn_of_one_process()
            with autocast(self.settings.precision), RandomCalls(), checkpointed(target.root):
                return target.call(*args, **kwargs)
        if self.settings.parallel_mode in REPLICA_MODES:
            if self._replicas is None:
                self._replicas = Replicas(self.settings, self._note_placed)
            with (
                RandomCalls(),
                part_of_batch(world.get_rank(), world.get_group_size(), pytree.tree_leaves((args, kwargs))),
                checkpointed(target.root),
            ):
                return self._replicas.call(target, args, kwargs)
        agreement.begin_call()
        args, kwargs = tuple(args), dict(kwargs)
        tensors = find_tensors(args, kwargs)
        if known is not None:
            with contextlib.suppress(ParameterChanged):
                return known.run(target.call, args, kwargs, tensors)
        return self._capture(target, args, kwargs, tensors).run(target.call, args, kwargs, tensors)

    def _warn_of_one_process(self) -> None:
        if self.settings.activation_limit_bytes is not None and not self._is_warned:
            self._is_warned = True
            log.warning('recompute("auto") has no effect in one process, where nothing is captured')

    def _note_placed(self, root: nn.Module, decisions: Mapping[int, Decision], notes: list[str]) -> None:
        self._plan = build_replica_plan(root, self.settings, decisions, notes)
        if world.get_rank() == 0:
            announce(self._plan)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients of several backward passes before the ranks reduce them, in the modes without capture.

        As in torch's DDP: the backward pass after the context reduces the sum. With hsdp only level1 waits; level2 and
        level3 reduce every time, which is what they are for.

        Raises:
            StrategyError: before the first call, or for a captured network.
        """
        if self._replicas is None:
            raise StrategyError(
                f"no_sync() with parallel_mode={self.settings.parallel_mode!r}: it is for data_parallel and "
                "hybrid_parallel, after the first call"
            )
        with self._replicas.no_sync():
            yield

    def _target(self, function: Callable[..., Any]) -> Target:
        """Return what a function that was not captured before calls; functions with the same modules share a root."""
        target = find_target(function)
        if target.root is function:
            return target
        modules = tuple(target.root.named_children()) if type(target.root) is nn.Module else ()
        key = tuple((name, id(module)) for name, module in modules)
        root = self._roots.setdefault(key, target.root) if key else target.root
        return Target(function, root)

    def _capture(
        self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> CapturedCall:
        compilation = self._compilations.get(id(target.root))
        if compilation is None:
            check_no_layerwise(target.root, self.settings.parallel_mode)
            rank = world.get_rank()
            size = self.settings.pipeline.ranks_per_stage(world.get_group_size())
            mesh = build_mesh(size, rank // size * size)
            if self.settings.hsdp is not None:
                self.settings.hsdp.check_world(mesh.size)
            storage = ParameterStorage(target.root, mesh, rank, self.settings.hsdp)
            compilation = Compilation(target, self.settings, mesh, rank, storage)
            self._compilations[id(target.root)] = compilation
        compilation.target = target
        reason = self._captured[0].why_not(target.call, args, kwargs, tensors) if self._captured else ""
        agreement.meet(world.get_rank(), world.get_group_size(), describe_batch(args, kwargs))
        captured, compiled, self._plan = compile_call(compilation, args, kwargs)
        call = CapturedCall(target, tensors, captured, compiled)
        self._captured.insert(0, call)
        if world.get_rank() == 0:
            announce(self._plan)
            if (count := len(self._captured)) in (8, 64, 512):
                log.warning(
                    "captured %d times, the last time because of %s: keep what changes from call to call out of the "
                    "network's attributes and shapes, or make it a tensor",
                    count,
                    reason or "a parameter that was assigned, frozen or trained again",
                )
        return call

    # -- telling ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ParallelPlan:
        """What was decided at the newest capture.

        Raises:
            CaptureError: before the first call, or in a world of one process.
        """
        if self._plan is None:
            raise CaptureError(
                "there is no plan yet: it is made at the first call, in a world of several ranks that work together"
            )
        return self._plan

    @property
    def loss_scale(self) -> float | None:
        """The present factor of the backward pass in mixed precision; None without one."""
        return None if self._loss_scale is None else self._loss_scale.value

    @property
    def activations(self) -> ActivationEstimate:
        """What a rank keeps between the forward and the backward pass, of the newest capture; see also `recompute`.

        Raises:
            CaptureError: before the first call, or in a world of one process.
        """
        if not self._captured:
            raise CaptureError("there is no estimate yet: it is made after the first call, in a world of several ranks")
        newest = self._captured[0].compiled
        if isinstance(newest, PipelinedCall):
            raise CaptureError("there is no estimate for a pipeline, whose stages hold several micro batches at once")
        return newest.activations()

    # -- as a module --------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the network's parameters under the user's names; after the first call each holds this rank's part."""
        if not isinstance(self.network, nn.Module):
            raise StrategyError("AutoParallel of a step function has no parameters of its own: ask the network")
        for name, parameter in self.network.named_parameters():
            yield user_name(name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the network's parameters."""
        for _, parameter in self.named_parameters():
            yield parameter

    def train(self, mode: bool = True) -> AutoParallel:
        """Set the network's training mode."""
        if isinstance(self.network, nn.Module):
            self.network.train(mode)
        return self

    def eval(self) -> AutoParallel:
        """Set the network to evaluation."""
        return self.train(mode=False)
