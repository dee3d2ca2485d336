"""AutoParallel: a network, or a step function, on all ranks as if on one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from msrun.errors import CaptureError, ParallelError, StrategyError
from msrun.runtime import progress, world
from msrun.runtime.capture import marked_calls
from msrun.runtime.capture.capture import forget_shapes
from msrun.runtime.capture.captured_graph import Target, find_target
from msrun.runtime.execute.phase import is_verifying, running_alone, runs_alone
from msrun.runtime.execute.placement import Placement
from msrun.runtime.nn.deferred_init import init_parameters
from msrun.runtime.nn.random_calls import RandomCalls
from msrun.runtime.nn.random_stream import drawing, part_of_batch
from msrun.runtime.optim.of_parts import watch_optimizers
from msrun.runtime.parallel.batch.parts import describe_batch, find_tensors, open_containers
from msrun.runtime.parallel.batch.same_batch import SameBatch
from msrun.runtime.parallel.compilation.agreement import agreement, answer_of_rank_0, own_answer
from msrun.runtime.parallel.compilation.captured_call import CapturedCall, ParameterChanged
from msrun.runtime.parallel.compilation.compilation import Compilation
from msrun.runtime.parallel.compilation.compiled import CompiledCall
from msrun.runtime.parallel.compile_call import compile_call, has_no_values, look_at_dry_run
from msrun.runtime.parallel.context import LayoutFiles, default_settings, layout_files
from msrun.runtime.parallel.fluent_settings import FluentSettings
from msrun.runtime.parallel.gradients_in_backward import ArrivingGradients, GradientsInBackward
from msrun.runtime.parallel.host_operators import moved_at_borders
from msrun.runtime.parallel.modes.data_parallel import Replicas
from msrun.runtime.parallel.modes.own_gradients import check_captured
from msrun.runtime.parallel.modes.replica_plan import build_lone_plan, build_replica_plan
from msrun.runtime.parallel.network_module import ForwardOf, NetworkModule
from msrun.runtime.parallel.outside import watch_trained
from msrun.runtime.parallel.parameters.storage import ParameterStorage
from msrun.runtime.parallel.parameters.whole import holds_wholes, whole_parameters
from msrun.runtime.parallel.pipeline.pipelined import PipelinedCall
from msrun.runtime.parallel.plan import ParallelPlan, announce, log
from msrun.runtime.parallel.precision import LossScale, autocast
from msrun.runtime.parallel.recomputation import checkpointed
from msrun.runtime.parallel.scaling import Compat, current_compat, current_loss_scale
from msrun.runtime.parallel.settings import REPLICA_MODES, ParallelSettings
from msrun.runtime.parallel.strategy_file import write_layout_files, write_operator_strategies
from msrun.runtime.parallel.verification.first_step import check_first_call
from msrun.runtime.parallel.verification.report import VerificationReport
from msrun.runtime.parallel.verification.verify import verify_step
from msrun.runtime.schedule.activations import ActivationEstimate
from msrun.runtime.sharding.layout import build_mesh
from msrun.runtime.tensors.plain_tensors import watch_constructors

_NOTHING_PARALLEL = (
    "the step function called no function of value_and_grad, so nothing ran in parallel: take the gradients with "
    "value_and_grad, or give AutoParallel the network"
)
current_parallel: ContextVar[AutoParallel | None] = ContextVar("current_parallel", default=None)
"""The AutoParallel whose step function is running: `value_and_grad` asks it to run the network."""


class AutoParallel(GradientsInBackward, FluentSettings, NetworkModule):  # type: ignore[misc]  # whose compile() takes anything
    """Run `network` in parallel over the world.

    `network` is a module (with its loss), used like any module in an ordinary torch loop; or a step function that
    calls `value_and_grad`. The first call captures it, decides every operator's strategy and gives each rank its part
    of the parameters; the parameter objects and their names stay the user's. In a world of one process the network
    runs as it is.

    Of a module it is an `nn.Module` with the network's own submodules, names and training flag: `parameters()`,
    `named_modules()`, `state_dict()`, `load_state_dict()`, `to()`, `zero_grad()`, `train()`, hooks and `copy.deepcopy`
    work as on the network itself. `state_dict()` gives whole tensors and is called by all ranks together;
    `load_state_dict` takes whole ones.

    Args:
        parallel_mode: "semi_auto": strategies set with `shard`; the rest keeps its input's cut or runs data-parallel.
            "data_parallel": every rank runs the network as it is, without capture: torch's DDP, with hsdp its FSDP2.
            "hybrid_parallel": the same around parts cut by hand (`layerwise_parallel`, `all_reduce`, ...).
            "stand_alone": every rank trains for itself, nothing is exchanged.
            "dynamic_programming", "recursive_programming", "sharding_propagation", "exact" or "auto": semi_auto whose
            strategies are searched for, see `search`; "auto_parallel" is recursive_programming.
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
        super().__init__(network)
        watch_trained()
        watch_constructors()
        self.settings: ParallelSettings = default_settings(parallel_mode, compat)
        self._compilations: dict[int, Compilation] = {}
        """id of the root module -> what compiles its calls"""
        self._captured: list[CapturedCall] = []
        """Calls that were captured, the one that ran last first; no more than the settings say."""
        self._capture_count = 0
        self._roots: dict[tuple[tuple[str, int], ...], nn.Module] = {}
        """modules that a step function calls -> what holds them"""
        self._plan: ParallelPlan | None = None
        self._replicas: Replicas | None = None
        self._loss_scale: LossScale | None = None
        self._watched: dict[int, nn.Module] = {}
        """id of the root -> a network whose gradients come without the loss scale"""
        self._arriving = ArrivingGradients()
        self._layout_files = layout_files()
        self._is_warned = False
        self._announced: set[str] = set()
        self._same_batch = SameBatch()
        self._root: nn.Module | None = None
        """of the call that ran last"""
        watch_optimizers()

    # -- calling ------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # what it captures is compiled by compile(); torch.compile around it runs it as it is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step function, or the network on this rank's part."""
        return super().__call__(*args, **kwargs)

    @ForwardOf
    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step function, or the network on this rank's part."""
        if marked_calls.MSRUN_CAPTURING:
            raise marked_calls.NotWhileCapturing(
                "AutoParallel is called inside a network that is captured: call the network itself there"
            )
        if holds_wholes.get():
            raise ParallelError(
                "AutoParallel is called inside whole_parameters(), where nothing is cut: call it after the block, or "
                "call the network itself"
            )
        if torch.is_inference_mode_enabled():  # what a call makes and keeps could not be trained with outside that mode
            with torch.inference_mode(mode=False), torch.no_grad():
                return self.forward(*args, **kwargs)
        if isinstance(self.network, nn.Module):
            check_first_call(self, self.network, args, kwargs)
        compat = current_compat.set(self.settings.compat)
        try:
            if isinstance(self.network, nn.Module):
                return self.run(self.network, args, kwargs)
            token = current_parallel.set(self)
            try:
                result = self.network(*args, **kwargs)
            except RuntimeError as error:
                if self._root is None and has_no_values():
                    raise CaptureError(_NOTHING_PARALLEL) from error
                raise
            finally:
                current_parallel.reset(token)
            if self._root is None:
                raise CaptureError(_NOTHING_PARALLEL)
            return result
        finally:
            current_compat.reset(compat)

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function of tensors in parallel; used by `value_and_grad`."""
        known = self._find_captured(function, args, kwargs) if self._captured else None
        if known is None:
            open_containers(args, kwargs)
        target = self._target(function) if known is None else Target(function, known.root)
        vars(self)["_root"] = target.root  # no submodule
        if torch.is_grad_enabled() and not is_verifying.get():
            progress.begin_step()
            if not runs_alone.get():
                self._same_batch.look(self.settings, args, kwargs)
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

    def build_plan(self, *args: Any, **kwargs: Any) -> ParallelPlan:
        """Capture and cut the network for arguments like these, without running it, and return what was decided.

        Of the arguments only shapes and types count. Afterwards each rank holds its parts of the parameters. All ranks
        call it together.

        Raises:
            StrategyError: of a step function, which is captured while it runs; an illegal strategy.
            CaptureError: the network cannot be captured.
        """
        if not isinstance(self.network, nn.Module):
            raise StrategyError("build_plan of a step function, which is captured while it runs: call it once")
        target = Target(self.network, self.network)
        if world.get_group_size() == 1 or self.settings.parallel_mode == "stand_alone":
            init_parameters(self.network)
        elif self.settings.parallel_mode in REPLICA_MODES:
            self._replicas_of().place(target)
        elif self._find_captured(self.network, args, kwargs) is None:
            agreement.begin_call()
            self._capture(target, args, kwargs, find_tensors(args, kwargs))
        return self.plan

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
        look_at_dry_run(self.settings, target, args, kwargs)
        if world.get_group_size() == 1 or self.settings.parallel_mode == "stand_alone" or runs_alone.get():
            root = target.root
            init_parameters(root)
            self._warn_of_one_process()
            precision = autocast(self.settings.precision)
            with precision, RandomCalls(), checkpointed(root), moved_at_borders(root), running_alone():
                return target.call(*args, **kwargs)
        if self.settings.parallel_mode in REPLICA_MODES:
            replicas = self._replicas_of()
            with (
                RandomCalls(),
                part_of_batch(world.get_rank(), world.get_group_size(), pytree.tree_leaves((args, kwargs))),
                checkpointed(target.root),
            ):
                return replicas.call(target, args, kwargs)
        agreement.begin_call()
        args, kwargs, tensors = tuple(args), dict(kwargs), find_tensors(args, kwargs)
        if known is not None:
            if known.is_of_new_sizes(tensors):
                batch = describe_batch(args, kwargs)
                agreement.meet(world.get_rank(), world.get_group_size(), batch)
                self._compilations[id(target.root)].check_ranks_agree(batch, batch=batch)
            with contextlib.suppress(ParameterChanged):
                return known.run(target.call, args, kwargs, tensors)
        call = self._capture(target, args, kwargs, tensors)
        result = call.run(target.call, args, kwargs, tensors)
        with autocast(self.settings.precision):
            call.check_parts(target.call, args, kwargs)
        return result

    def _warn_of_one_process(self) -> None:
        if self.settings.limits and not self._is_warned:
            self._is_warned = True
            log.warning("%s has no effect in one process, where nothing is captured", ", ".join(self.settings.limits))

    def _note_placed(self, root: nn.Module, decisions: Mapping[int, Placement], notes: list[str]) -> None:
        self._plan = build_replica_plan(root, self.settings, decisions, notes)
        self._write_layouts(root)
        if world.get_rank() == 0:
            announce(self._plan, self._announced)

    def _write_layouts(self, root: nn.Module) -> None:
        """Write the strategy file that was asked for when this AutoParallel was made, at the first call."""
        files, self._layout_files = self._layout_files, LayoutFiles()
        if files.is_wanted:
            write_layout_files(files, root)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients of several backward passes before the ranks reduce them, in the modes without capture.

        As in torch's DDP: the backward pass after the context reduces the sum. With hsdp only level1 waits; level2 and
        level3 reduce every time, which is what they are for. A captured network's gradients are reduced in every
        backward pass and add up in `.grad`, so there, as in one process, the context changes nothing.
        """
        self.check_gradients_stay("no_sync()")
        if self.settings.parallel_mode not in REPLICA_MODES or world.get_group_size() == 1:
            yield
            return
        with self._replicas_of().no_sync():
            yield

    def _replicas_of(self) -> Replicas:
        if self._replicas is None:
            self._replicas = Replicas(self.settings, self._note_placed)
        return self._replicas

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
            check_captured(target.root, self.settings.parallel_mode)
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
        before = compilation.trace_count
        captured, compiled, self._plan = compile_call(compilation, args, kwargs)
        self._capture_count += compilation.trace_count - before
        if isinstance(compiled, CompiledCall):
            compiled.arriving = self._arriving
        call = CapturedCall(target, tensors, captured, compiled, partial(compilation.shapes_of, parts=compiled.parts))
        self._captured.insert(0, call)
        if len(self._captured) > self.settings.kept_captures:
            self._captured.pop()
            forget_shapes()
        self._write_layouts(target.root)
        if world.get_rank() == 0:
            if self.settings.strategies_to is not None and self._capture_count == 1:
                write_operator_strategies(self.settings.strategies_to, self._plan.strategies())
            announce(self._plan, self._announced)
            if (count := self._capture_count) in (8, 64, 512) and compilation.trace_count > before:
                log.warning(
                    "captured %d times, the last time because of %s: keep what changes from call to call out of the "
                    "network's attributes and shapes, or make it a tensor",
                    count,
                    reason or "a parameter that was assigned, frozen or trained again",
                )
        return call

    def verify(
        self, *batch: Any, raises: bool = True, tolerance: float | None = None, **kwargs: Any
    ) -> VerificationReport:
        """Run one training step in parallel, and again as one process would; compare loss, gradients and buffers.

        All ranks call it together, with what they would pass to the network or the step function. It leaves no trace:
        nothing is trained, and parameters, gradients, buffers and random streams are as before; a first call places
        the parameters. Every rank needs the memory of the whole network and of its step on the global batch.

        Args:
            raises: raise when a difference is above its tolerance; else only the report says so.
            tolerance: largest difference allowed, relative to the largest element of each value; None: one for each
                type (`verification/distance.py`).

        Returns:
            The largest difference of every value; `print` shows it as a table.

        Raises:
            VerificationError: a value differs; the same on every rank.
            UnverifiableError: this network has no step of one process to compare with.
        """
        return verify_step(self, batch, kwargs, raises=raises, tolerance=tolerance)

    @property
    def captures(self) -> int:
        """How many times the network's Python code has been followed: not again for batches of other sizes, unless it
        does something else for them."""
        return self._capture_count

    # -- telling ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ParallelPlan:
        """What was decided at the newest capture; in a world of one process, that nothing is cut.

        Raises:
            CaptureError: before the first call in a world of several ranks, or of a step function that was not called.
        """
        alone = world.get_group_size() == 1 or self.settings.parallel_mode == "stand_alone"
        if self._plan is None and alone:
            root = self.network if isinstance(self.network, nn.Module) else self._root
            if root is not None:
                return build_lone_plan(root, self.settings)
        if self._plan is None:
            raise CaptureError(
                "there is no plan yet: it is made at the first call" + ("" if alone else ", by all ranks together")
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

    @property
    def _is_placed(self) -> bool:
        return bool(self._captured) or self._replicas is not None

    def _call_whole(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if method.__name__ == "save_pretrained":
            kwargs.setdefault("is_main_process", world.get_rank() == 0)
        with whole_parameters(self):
            return method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoParallel:
        """Return a copy with a copied network and equal settings, which captures for itself."""
        copied = AutoParallel(copy.deepcopy(self.network, memo), compat=self.settings.compat)
        copied.settings = self.settings
        memo[id(self)] = copied
        vars(copied).update({name: copy.copy(value) for name, value in vars(self).items() if name.endswith("_hooks")})
        if isinstance(self.network, nn.Module):
            for old, new in zip(self.parameters(), copied.parameters(), strict=True):
                vars(new).update({name: mark for name, mark in vars(old).items() if name not in vars(new)})
        return copied
