"""AutoParallel: a network, or a step function, on all ranks as if on one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from msrun.errors import CaptureError, ParallelError, StrategyError, near_miss
from msrun.runtime import progress, world
from msrun.runtime.graph.capture import CapturedGraph, Target, capture, find_target
from msrun.runtime.graph.partition import LocalProgram, partition
from msrun.runtime.layout import Layout, assign_axes, build_mesh
from msrun.runtime.nn.deferred_init import init_parameters
from msrun.runtime.parallel.compiled import CompiledCall, build_compiled_call
from msrun.runtime.parallel.data_parallel import DataParallelCall
from msrun.runtime.parallel.hsdp import HsdpSpec, Level
from msrun.runtime.parallel.micro_batch import MicroBatchInterleaved, current_compat
from msrun.runtime.parallel.plan import ParallelPlan, build_parallel_plan, user_name
from msrun.runtime.parallel.scaling import Compat, check_compat, part_scale
from msrun.runtime.parallel.shard import strategies_of
from msrun.runtime.parallel.storage import ParameterStorage

MODES = ("semi_auto", "data_parallel")
DatasetStrategy = str | tuple[tuple[int, ...], ...]

current_parallel: ContextVar[AutoParallel | None] = ContextVar("current_parallel", default=None)
"""The AutoParallel whose step function is running: `value_and_grad` asks it to run the network."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_log = logging.getLogger("msrun.runtime")


class AutoParallel:
    """Run `network` in parallel over the world.

    `network` is a module (with its loss), used like any module in an ordinary torch loop; or a step function that
    calls `value_and_grad`. The first call captures it, decides every operator's strategy and gives each rank its part
    of the parameters; the parameter objects and their names stay the user's. In a world of one process the network
    runs as it is.

    Args:
        parallel_mode: "semi_auto": strategies set with `shard`; the rest keeps its input's cut or runs data-parallel.
            "data_parallel": torch's DDP for a module that cannot be captured; no strategies, no hsdp.
        compat: "torch": losses of copies are averaged; "mindspore": they are added up.

    Every setter returns self and must come before the first call.

    Raises:
        StrategyError: unknown mode or word, illegal strategy.
        CaptureError: at the first call, when the network cannot be captured.
    """

    def __init__(self, network: Callable[..., Any], parallel_mode: str = "semi_auto", *, compat: Compat = "torch"):
        if parallel_mode not in MODES:
            raise StrategyError(
                f"parallel_mode={parallel_mode!r}{near_miss(str(parallel_mode), MODES)}: must be {' or '.join(MODES)}"
            )
        check_compat(compat)
        self.network = network
        self._mode = parallel_mode
        self._compat: Compat = compat
        self._hsdp: HsdpSpec | None = None
        self._dataset_strategy: DatasetStrategy = "data_parallel"
        self._mesh = build_mesh(1)
        self._rank = 0
        self._storages: dict[int, ParameterStorage] = {}
        """id of the root module -> its parameters"""
        self._compiled: dict[tuple[Any, ...], CompiledCall] = {}
        self._targets: dict[Any, Target] = {}
        self._plan: ParallelPlan | None = None
        self._data_parallel: DataParallelCall | None = None
        if parallel_mode == "data_parallel" and not isinstance(network, nn.Module):
            raise StrategyError(
                'parallel_mode="data_parallel" takes a module with its loss, not a step function: '
                "AutoParallel(WithLoss(net, loss_fn), ...)"
            )

    # -- settings -----------------------------------------------------------------------------------------------

    def hsdp(self, shard_size: int = -1, threshold: int = 64, optimizer_level: Level = "level1") -> AutoParallel:
        """Turn optimizer parallel on: parameters of `threshold` KB or more, and their optimizer state, are stored cut.

        Args:
            shard_size: ranks that share one parameter; -1 = all that hold copies of it.
            optimizer_level: level1 weights and state; level2 also gradients; level3 also gathers weights again for
                the backward pass.
        """
        self._check_open("hsdp")
        self._hsdp = HsdpSpec(shard_size, threshold, optimizer_level)
        return self

    def dataset_strategy(self, config: DatasetStrategy) -> AutoParallel:
        """Say what each rank passes: "data_parallel" its own part of the batch, "full_batch" all of it, or a tuple of
        parts per dimension for each input."""
        self._check_open("dataset_strategy")
        if isinstance(config, str) and config not in ("data_parallel", "full_batch"):
            raise StrategyError(
                f"dataset_strategy({config!r}){near_miss(config, ('data_parallel', 'full_batch'))}: "
                "must be data_parallel, full_batch or a tuple of tuples"
            )
        self._dataset_strategy = config
        return self

    def _check_open(self, name: str) -> None:
        if self._mode == "data_parallel":
            raise StrategyError(f'{name}() needs a captured graph: use parallel_mode="semi_auto"')
        if self._compiled:
            raise StrategyError(f"{name}() came after the first call: the parameters are placed already; set it before")

    # -- calling ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step function, or the network on this rank's part."""
        compat = current_compat.set(self._compat)
        try:
            if isinstance(self.network, nn.Module):
                return self.run(self.network, self.network, args, kwargs)
            token = current_parallel.set(self)
            try:
                result = self.network(*args, **kwargs)
            finally:
                current_parallel.reset(token)
            if not self._targets:
                raise CaptureError(
                    "the step function called no function of value_and_grad, so nothing ran in parallel: take the "
                    "gradients with value_and_grad, or give AutoParallel the network"
                )
            return result
        finally:
            current_compat.reset(compat)

    def run(self, key: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function of tensors in parallel; used by `value_and_grad`. `key` tells captured functions apart."""
        target = self._target(key, function)
        if torch.is_grad_enabled():
            progress.begin_step()
        if world.get_group_size() == 1:
            init_parameters(target.root)
            return function(*args, **kwargs)
        if self._mode == "data_parallel":
            return self._run_data_parallel(target.root, args, kwargs)
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        signature = (
            id(key),
            spec,
            tuple(module.training for module in target.root.modules()),
            tuple(parameter.requires_grad for parameter in target.root.parameters()),
            tuple(_describe_leaf(leaf) for leaf in leaves),
        )
        if signature not in self._compiled:
            self._compiled[signature] = self._compile(target, args, kwargs, tensors)
        return self._compiled[signature].run(tensors)

    def _run_data_parallel(self, network: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._data_parallel is None:
            init_parameters(network)
            self._data_parallel = DataParallelCall(network, world.device())
        return self._data_parallel.run(args, kwargs)

    def _target(self, key: Any, function: Callable[..., Any]) -> Target:
        if id(key) not in self._targets:
            self._targets[id(key)] = find_target(function)
        return self._targets[id(key)]

    # -- compiling ----------------------------------------------------------------------------------------------

    def _compile(
        self, target: Target, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> CompiledCall:
        self._mesh, self._rank = build_mesh(world.get_group_size()), world.get_rank()
        if self._hsdp is not None:
            self._hsdp.check_world(self._mesh.size)
        copies, call = 1, target
        if isinstance(target.call, MicroBatchInterleaved):
            copies = target.call.interleave_num
            call = Target(target.call.network, target.root)
        storage = self._storages.setdefault(
            id(target.root), ParameterStorage(target.root, self._mesh, self._rank, self._hsdp)
        )
        try:
            captured, program = self._capture(call, args, kwargs, tensors, storage, copies)
        except ParallelError as error:
            self._check_ranks_agree("", failure=str(error))
            raise
        nodes = [describe_node(n) for n in program.graph.nodes]
        inputs = [f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}" for tensor in tensors]
        self._check_ranks_agree("\n".join([*nodes, *inputs]))
        program.notes += storage.place(program)
        compiled = build_compiled_call(
            captured,
            program,
            storage.stored,
            dict(target.root.named_buffers()),
            mesh=self._mesh,
            rank=self._rank,
            copies=copies,
            scale=part_scale(self._compat, copies),
            regathers=self._hsdp is not None and self._hsdp.optimizer_level == "level3",
        )
        self._plan = build_parallel_plan(
            compiled,
            storage,
            mode=self._mode,
            mesh=self._mesh,
            hsdp=self._hsdp,
            compat=self._compat,
            dataset_strategy=str(self._dataset_strategy),
        )
        if self._rank == 0:
            _announce(self._plan)
        return compiled

    def _capture(
        self,
        call: Target,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        storage: ParameterStorage,
        copies: int,
    ) -> tuple[CapturedGraph, LocalProgram]:
        layouts = [self._input_layout(index, tensor) for index, tensor in enumerate(tensors)]
        shapes = [self._global_shape(tensor, layout, copies) for tensor, layout in zip(tensors, layouts, strict=True)]
        captured = capture(call, args, kwargs, input_shapes=shapes, parameter_shapes=storage.shapes)
        program = partition(
            captured,
            self._mesh,
            input_layouts=layouts,
            strategies=strategies_of(call.root),
            output_batch_axes=self._mesh.axes if self._dataset_strategy == "data_parallel" else (),
            differentiable_inputs=frozenset(i for i, tensor in enumerate(tensors) if tensor.requires_grad),
        )
        return captured, program

    def _input_layout(self, index: int, tensor: Tensor) -> Layout:
        strategy = self._dataset_strategy
        if strategy == "full_batch" or tensor.dim() == 0:
            return Layout.replicated(tensor.dim())
        if strategy == "data_parallel":
            return Layout((self._mesh.axes, *((),) * (tensor.dim() - 1)))
        if index >= len(strategy) or len(strategy[index]) != tensor.dim():
            given = strategy[index] if index < len(strategy) else "nothing"
            raise StrategyError(
                f"dataset_strategy: {given} for input {index} of {tensor.dim()} dimensions; "
                "give one tuple per input, one number per dimension"
            )
        return Layout(assign_axes(self._mesh, strategy[index], what=f"dataset_strategy of input {index}"))  # type: ignore[arg-type]

    def _global_shape(self, tensor: Tensor, layout: Layout, copies: int) -> tuple[int, ...]:
        shape = [size * self._mesh.extent(axes) for size, axes in zip(tensor.shape, layout.split, strict=True)]
        if copies > 1 and shape:
            if tensor.shape[0] % copies:
                raise StrategyError(
                    f"a batch of {tensor.shape[0]} rows on this rank cannot be cut into {copies} equal copies; "
                    f"give a batch that {copies} divides"
                )
            shape[0] //= copies
        return tuple(shape)

    def _check_ranks_agree(self, program: str, failure: str = "") -> None:
        """Refuse to start collectives that would not match: the same program must have come out on every rank.

        Args:
            failure: why this rank has none; it raises that itself afterwards.
        """
        everyone: list[Any] = [None] * self._mesh.size
        with progress.waiting_in(lambda: f"the comparison of graphs by {len(everyone)} ranks"):
            dist.all_gather_object(everyone, (hash_text(program), failure))
        if failure:
            return
        failed = [(rank, text) for rank, (_, text) in enumerate(everyone) if text]
        if failed:
            raise CaptureError(f"rank {failed[0][0]} cannot run this call: {failed[0][1]}")
        different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
        if different:
            raise CaptureError(
                f"rank {different[0]} captured another network than rank 0: give every rank the same network and "
                "equal batch shapes"
            )

    # -- telling ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ParallelPlan:
        """What was decided at the newest capture.

        Raises:
            CaptureError: before the first call, or in a world of one process.
        """
        if self._plan is None:
            raise CaptureError("there is no plan yet: it is made at the first call, in a world of several ranks")
        return self._plan

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


def _describe_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, str | int | float | bool | type(None)) else id(leaf)


def describe_node(node: fx.Node) -> str:
    """Return a node as text that is equal in every process: without addresses in memory."""
    return _ADDRESS.sub("", f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}")


def hash_text(text: str) -> str:
    """Return a short digest, equal on every host."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _announce(plan: ParallelPlan) -> None:
    """Say on rank 0 what was decided; visible also when the user has not configured logging."""
    if not _log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
        _log.propagate = False
    _log.info(plan.summary())
    for note in plan.notes:
        _log.warning(note)
