"""Engine: how an AutoParallel runs networks. It is chosen once, by its settings; nobody else asks for the mode."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from msrun.errors import CaptureError
from msrun.runtime import world
from msrun.runtime.capture.captured_graph import Target, find_target
from msrun.runtime.execute.phase import is_verifying, running_alone
from msrun.runtime.nn.deferred_init import init_parameters
from msrun.runtime.nn.random_calls import RandomCalls
from msrun.runtime.parallel.batch.parts import open_containers
from msrun.runtime.parallel.compilation.compiled import CompiledCall
from msrun.runtime.parallel.context import LayoutFiles
from msrun.runtime.parallel.gradients_in_backward import ArrivingGradients
from msrun.runtime.parallel.host_operators import moved_at_borders
from msrun.runtime.parallel.modes.replica_plan import build_lone_plan
from msrun.runtime.parallel.plan import ParallelPlan, announce, log
from msrun.runtime.parallel.precision import autocast
from msrun.runtime.parallel.recomputation import checkpointed
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.parallel.strategy_file import write_layout_files
from msrun.runtime.schedule.replay import ActivationEstimate
from msrun.runtime.sharding.layout import Box


class Engine:
    """Runs the networks of one AutoParallel. All ranks make the same calls in the same order."""

    captures = 0
    """How many times Python code has been followed."""
    has_waited = False
    """Whether gradients of this rank alone have been added up: a step that is verified would send them, too."""
    is_placed = False
    """Whether parameters have been put in place, so that nothing may be set any more."""

    def __init__(self, settings: ParallelSettings, files: LayoutFiles, arriving: ArrivingGradients) -> None:
        """Args:
        files: are written when parameters have been put in place first.
        arriving: where the gradients of captured calls go.
        """
        self.settings, self.arriving = settings, arriving
        self.plan: ParallelPlan | None = None
        """Of what was placed last."""
        self._files = files
        self._announced: set[str] = set()
        self._roots: dict[tuple[tuple[str, int], ...], nn.Module] = {}
        """modules that a step function calls -> what holds them"""

    def target(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Target:
        """Return what a call runs."""
        open_containers(args, kwargs)
        return self.target_of(function)

    def target_of(self, function: Callable[..., Any]) -> Target:
        """Return what a function calls; functions with the same modules share a root."""
        target = find_target(function)
        if target.root is function:
            return target
        modules = tuple(target.root.named_children()) if type(target.root) is nn.Module else ()
        key = tuple((name, id(module)) for name, module in modules)
        root = self._roots.setdefault(key, target.root) if key else target.root
        return Target(function, root)

    @abstractmethod
    def place(self, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Give each rank its parameters, unless it has them. Of the arguments only shapes and types count."""

    @abstractmethod
    def call(self, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a module, or a function that closes over modules; it is placed by then, or placed now."""

    def explain(self, root: nn.Module | None) -> ParallelPlan:
        """Return what was decided last.

        Args:
            root: of the call that ran last, or of the one that there may be.
        """
        del root
        if self.plan is None:
            raise CaptureError("there is no plan yet: it is made at the first call, by all ranks together")
        return self.plan

    @property
    def program(self) -> CompiledCall | None:
        """The program of the captured call that ran last, where it is no pipeline's."""
        return None

    def boxes(self, root: nn.Module, tensors: Sequence[Tensor]) -> list[Box]:
        """Return which part of each of the global batch's tensors this rank has passed. All ranks call it together."""
        raise NotImplementedError

    def activations(self) -> ActivationEstimate:
        """Return what a rank keeps between the passes of the newest capture."""
        raise CaptureError("there is no estimate yet: it is made after the first call, in a world of several ranks")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients on each rank for as long as the context lasts, where ranks reduce them apart."""
        yield

    @contextlib.contextmanager
    def syncing(self) -> Iterator[None]:
        """Reduce the gradients of every backward pass for as long as the context lasts, inside `no_sync` too."""
        yield

    def tell(self, root: nn.Module, plan: ParallelPlan) -> None:
        """Say what was decided, in files and on rank 0."""
        self.plan = plan
        files, self._files = self._files, LayoutFiles()
        if files.is_wanted:
            write_layout_files(files, root)
        if world.get_rank() == 0:
            announce(plan, self._announced)


class Alone(Engine):
    """Runs networks as they are, with nothing exchanged: of one process, or of ranks that train for themselves."""

    _is_warned = False

    def place(self, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Give parameters without values some."""
        init_parameters(target.root)

    def call(self, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run it."""
        root = target.root
        init_parameters(root)
        if self.settings.limits and not self._is_warned and not is_verifying.get():
            self._is_warned = True
            limits = ", ".join(self.settings.limits)
            log.warning("%s has no effect in one process, where nothing is captured", limits)
        precision = autocast(self.settings.precision)
        with precision, RandomCalls(), checkpointed(root), moved_at_borders(root), running_alone():
            return target.call(*args, **kwargs)

    def explain(self, root: nn.Module | None) -> ParallelPlan:
        """Return that nothing is cut."""
        if root is None:
            raise CaptureError("there is no plan yet: it is made at the first call")
        return build_lone_plan(root, self.settings)
