"""AutoParallel: a network, or a step function, on all ranks as if on one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from msrun.errors import CaptureError, ParallelError, StrategyError
from msrun.runtime import progress, world
from msrun.runtime.agreement import meetings
from msrun.runtime.capture import marked_calls
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.execute.phase import is_verifying, runs_alone
from msrun.runtime.joining.launchers import REAL_VALUES
from msrun.runtime.nn.random_stream import drawing
from msrun.runtime.optim.of_parts import watch_optimizers
from msrun.runtime.parallel.compilation.agreement import SameBatch, answer_of_rank_0, own_answer
from msrun.runtime.parallel.compilation.captured_call import Captured
from msrun.runtime.parallel.context import LayoutFiles, default_settings, layout_files
from msrun.runtime.parallel.engine import Alone, Engine
from msrun.runtime.parallel.gradients_in_backward import ArrivingGradients, GradientsInBackward
from msrun.runtime.parallel.modes.data_parallel import Replicas
from msrun.runtime.parallel.named_plan import plans_of
from msrun.runtime.parallel.network_module import ForwardOf, NetworkModule, holds_whole
from msrun.runtime.parallel.outside import watch_trained
from msrun.runtime.parallel.parameters.whole import holds_wholes, whole_parameters
from msrun.runtime.parallel.plan import ParallelPlan
from msrun.runtime.parallel.precision import Compat, LossScale, current_compat, current_loss_scale
from msrun.runtime.parallel.settings import FluentSettings, ParallelSettings
from msrun.runtime.parallel.verification.report import VerificationReport
from msrun.runtime.parallel.verification.verify import check_first_call, verify_step
from msrun.runtime.schedule.replay import ActivationEstimate
from msrun.runtime.tensors.plain_tensors import watch_constructors

_NOTHING_PARALLEL = (
    "the step function called no function of value_and_grad, so nothing ran in parallel: take the gradients with "
    "value_and_grad, or give AutoParallel the network"
)


def has_no_values() -> bool:
    """Return whether this is a dry run in which parameters have no values."""
    level = world.simulation_level()
    return level is not None and level < REAL_VALUES


def look_at_dry_run(settings: ParallelSettings, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """In a dry run, report what this call would do and end the process; at level 3 after some steps."""
    if world.simulation_level() is not None:
        from msrun.runtime.simulate.report import begin_step

        begin_step(settings, target, args, kwargs)


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
        plans = plans_of(network)
        modes = [plan.parallel_mode for plan in plans if plan.parallel_mode]
        self.settings: ParallelSettings = default_settings(parallel_mode or next(iter(modes), None), compat)
        self._engine: Engine | None = None
        self._loss_scale: LossScale | None = None
        self._watched: dict[int, nn.Module] = {}
        """id of the root -> a network whose gradients come without the loss scale"""
        self._arriving = ArrivingGradients()
        self._layout_files = layout_files()
        self._same_batch = SameBatch()
        self._root: nn.Module | None = None
        """of the call that ran last"""
        watch_optimizers()
        for plan in plans:
            plan.set(self)

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
        engine = self.engine
        target = engine.target(function, args, kwargs)
        if runs_alone.get():  # it is verified, as one process would run it
            engine = Alone(self.settings, LayoutFiles(), self._arriving)
        vars(self)["_root"] = target.root  # no submodule
        if torch.is_grad_enabled() and not is_verifying.get():
            progress.begin_step()
            if not runs_alone.get():
                self._same_batch.look(self.settings, args, kwargs)
        answer = own_answer if self.settings.is_lone else answer_of_rank_0
        with drawing(target.root, answer, self.settings.batch_parts(world.get_group_size())):
            look_at_dry_run(self.settings, target, args, kwargs)
            if self._loss_scale is None and self.settings.precision and self.settings.precision.loss_scale is not None:
                self._loss_scale = LossScale(self.settings.precision, is_shared=not self.settings.is_lone)
            if self._loss_scale is None or not torch.is_grad_enabled():
                return engine.call(target, args, kwargs)
            args, kwargs = self._loss_scale.enter((tuple(args), dict(kwargs)))
            token = current_loss_scale.set(self._loss_scale.value)
            try:
                result = engine.call(target, args, kwargs)
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
        self.engine.place(Target(self.network, self.network), args, kwargs)
        return self.plan

    @property
    def engine(self) -> Engine:
        """How this AutoParallel runs networks; chosen at its first call."""
        if world.get_group_size() == 1 or self.settings.is_lone:
            kind: type[Engine] = Alone
        else:
            kind = Captured if self.settings.is_captured else Replicas
        known = self._engine
        if type(known) is not kind or not (known.settings is self.settings or known.is_placed):
            self._engine = known = kind(self.settings, self._layout_files, self._arriving)
        return known

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients of several backward passes before the ranks reduce them, in the modes without capture.

        As in torch's DDP: the backward pass after the context reduces the sum. With hsdp only level1 waits; level2 and
        level3 reduce every time, which is what they are for. A captured network's gradients are reduced in every
        backward pass and add up in `.grad`, so there, as in one process, the context changes nothing.
        """
        self.check_gradients_stay("no_sync()")
        with self.engine.no_sync():
            yield

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
        return 0 if self._engine is None else self._engine.captures

    # -- telling ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ParallelPlan:
        """What was decided at the newest capture; in a world of one process, that nothing is cut.

        Raises:
            CaptureError: before the first call in a world of several ranks, or of a step function that was not called.
        """
        return self.engine.explain(self.network if isinstance(self.network, nn.Module) else self._root)

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
        return self.engine.activations()

    # -- as a module --------------------------------------------------------------------------------------------

    @property
    def _is_placed(self) -> bool:
        return self._engine is not None and self._engine.is_placed

    def _call_whole(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if method.__name__ == "save_pretrained":
            kwargs.setdefault("is_main_process", world.get_rank() == 0)
        if holds_whole(self.parameters()):
            return method(*args, **kwargs)
        meetings.gather(f"{method.__name__}()")
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
