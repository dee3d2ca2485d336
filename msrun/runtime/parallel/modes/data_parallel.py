"""The modes without capture: every rank runs the network as it is, on its own part of the batch.

data_parallel: torch's DistributedDataParallel, or with hsdp its FSDP2 (`parallel/fsdp.py`). hybrid_parallel: the same,
save that parameters marked `layerwise_parallel` belong to their rank. A step function's gradients are reduced after its
backward pass; a module's while it still runs.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from msrun.errors import StrategyError, UnverifiableError
from msrun.runtime import world
from msrun.runtime.agreement import gather
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.execute.gradients import mean_over_ranks
from msrun.runtime.execute.phase import is_verifying
from msrun.runtime.execute.placement import Placement
from msrun.runtime.nn.deferred_init import init_parameters
from msrun.runtime.nn.random_calls import RandomCalls
from msrun.runtime.nn.random_stream import part_of_batch
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.batch.divided_batch import GradAccumulation, find_wrappers
from msrun.runtime.parallel.border import (
    StepFunction,
    WholeResults,
    enter_step,
    leave_step,
    map_tensors,
    tensors_in,
)
from msrun.runtime.parallel.engine import Engine
from msrun.runtime.parallel.host_operators import refusing_targets
from msrun.runtime.parallel.modes.fsdp import ShardedNetwork, called_modules
from msrun.runtime.parallel.modes.own_gradients import (
    average_rows,
    check_no_layerwise,
    check_servers,
    has_own_gradient,
    is_layerwise,
    is_same_everywhere,
    scale_gradient_of,
)
from msrun.runtime.parallel.modes.reduction import ReducedNetwork, any_rank
from msrun.runtime.parallel.modes.replica_plan import build_replica_plan
from msrun.runtime.parallel.outside import mean_of_ranks, note_known
from msrun.runtime.parallel.parameters.storage import equal_everywhere, note_placed
from msrun.runtime.parallel.precision import autocast, replica_scales, scale_gradient
from msrun.runtime.parallel.recomputation import checkpointed
from msrun.runtime.parts.part import Part
from msrun.runtime.progress import waiting_in
from msrun.runtime.sharding.layout import Box, whole

replicas_called: ContextVar[list[Replicas] | None] = ContextVar("replicas_called", default=None)
"""A list while `value_and_grad` runs its function: who must hand out the gradients of what was called."""


_living: weakref.WeakSet[Replicas] = weakref.WeakSet()


class Replicas(Engine):
    """Runs networks as they are: replicas whose gradients torch's DDP reduces, or which its FSDP2 cuts."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        settings = self.settings
        self._ranks = world.get_group_size()
        self._scales = replica_scales(settings.compat, settings.averages_gradients, self._ranks)
        self._networks: dict[tuple[int, ...], tuple[nn.Module, list[nn.Parameter]]] = {}
        """ids of the modules that are called -> who has them, and their parameters in place that are trained"""
        self._kinds: dict[tuple[int, ...], list[Any]] = {}
        """the same -> what their parameters were"""
        self._reduced: dict[int, ReducedNetwork] = {}
        """id of a module that is called -> what averages its gradients"""
        self._whole: dict[tuple[int, int], WholeResults] = {}
        """(id of the root, place among the numbers that it returns) -> what looks at their gradients"""
        self._buffered: dict[int, list[nn.Module]] = {}
        """id of the network -> its modules that have buffers"""
        self._sharded: dict[int, ShardedNetwork] = {}
        self._written: dict[tuple[int, bool], list[nn.Parameter]] = {}
        """(id of the root, whether it is in training) -> parameters that its forward pass writes"""
        self.is_running_module = False
        self._waits: list[contextlib.ExitStack] = []
        """The contexts of `no_sync` that are open, outermost first."""
        _living.add(self)

    # -- calling ------------------------------------------------------------------------------------------------

    def call(self, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a module, or a function that closes over modules.

        Scalar results are means over all ranks, others, and with MindSpore's meaning all, are this rank's own.
        """
        rows = part_of_batch(world.get_rank(), self._ranks, pytree.tree_leaves((args, kwargs)))
        with RandomCalls(), rows, checkpointed(target.root):
            return self._call(target, args, kwargs)

    def _call(self, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.place(target, args, kwargs)
        self._take_buffers(target.root)
        mode = self.settings.parallel_mode
        is_module, trains = isinstance(target.call, nn.Module), torch.is_grad_enabled()
        reduced: ReducedNetwork | None = None
        if isinstance(target.call, nn.Module) and trains and not self._sharded:
            _check_hooks(target.root, mode)
            reduced = self._reduced.get(id(target.call))
            if reduced is None:
                reduced = self._reduced[id(target.call)] = self._reduction_of(target.call)
        run: Callable[..., Any] = target.call if reduced is None else reduced
        args, kwargs = tuple(args), dict(kwargs)
        if trains:
            tensors = tensors_in((args, kwargs))
            enter_step(tensors, [self._ranks] * len(tensors), lambda _: self._scales.leaf)
            args, kwargs = map_tensors(lambda x: scale_gradient(x, self._scales.input), (args, kwargs))
        versions = {p: p._version for p in target.root.parameters() if is_same_everywhere(p)}
        with autocast(self.settings.precision), refusing_targets(target.root, mode):
            result = run(*args, **kwargs)
        if not self._sharded and self.settings.broadcasts_parameters:
            self._check_written(target.root, versions)
        if reduced is not None:
            reduced.look(tensors_in(result))
        elif trains and target.root is target.call and id(target.root) in self._sharded:
            self._sharded[id(target.root)].look(tensors_in(result))
        for sharded in self._sharded.values():
            sharded.show_own() if trains else sharded.reshard()
        called = replicas_called.get()
        if called is not None:
            self.is_running_module = is_module
            called.append(self)
        numbers = itertools.count()
        begin = partial(self._begin_backward, reduced, syncs=not self._waits, counts=not is_verifying.get())
        return map_tensors(lambda value: self._leave(value, (id(target.root), numbers), begin), result)

    def _take_buffers(self, root: nn.Module) -> None:
        """Let every rank go on with rank 0's buffers, which are those that a checkpoint holds; one message a type.

        Forward passes write into them, such as batch norms their running means, on every rank from its own rows.
        """
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for module in self._buffered[id(root)] if self.settings.broadcasts_parameters else ():
            is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
            for buffer in module._buffers.values():
                if buffer is not None and is_same_everywhere(buffer):
                    # A norm's backward pass never reads them; of others, autograd refuses graphs that have read them.
                    by_type.setdefault(buffer.dtype, []).append(buffer.data if is_norm else buffer.detach())
        for buffers in by_type.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers]).to(world.device())
            with waiting_in(lambda: "broadcast of the buffers"):
                dist.broadcast(flat, 0)
            if world.get_rank() != 0:
                for buffer, value in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                    buffer.copy_(value.view(buffer.shape))

    def _check_written(self, root: nn.Module, versions: Mapping[nn.Parameter, int]) -> None:
        """Refuse a forward pass that writes other values on each rank; the first call finds out."""
        key = id(root), root.training
        if key not in self._written:
            mine = {parameter for parameter, version in versions.items() if parameter._version != version}
            self._written[key] = any_rank(list(versions), mine) if versions else []
        written = self._written[key]
        for parameter, is_equal in zip(written, equal_everywhere([p.detach() for p in written]), strict=True):
            if not is_equal:
                name = next(name for name, found in root.named_parameters() if found is parameter)
                raise StrategyError(
                    f"the forward pass of {type(root).__name__} writes into its parameter {user_name(name)} what this "
                    "rank's rows give, and the ranks' values differ now: write it between the steps, by what all ranks "
                    "have"
                )

    def _reduction_of(self, network: nn.Module) -> ReducedNetwork:
        return ReducedNetwork(network, sums_wide=self.settings.gradient_fp32_sync)

    def _begin_backward(self, reduced: ReducedNetwork | None, *, syncs: bool, counts: bool) -> None:
        """Hear that a backward pass has come to a result.

        Args:
            counts: False: the step is only verified.
        """
        StepFunction.begin_backward(counts=syncs and counts and self.keeps_equal)
        if reduced is not None:
            reduced.begin_backward(syncs=syncs)
        elif self._sharded:
            StepFunction.refuse_second_derivatives()
            for sharded in self._sharded.values():
                sharded.show_gathered()

    def _leave(self, value: Tensor, place: tuple[int, Iterator[int]], begin: Callable[[], None]) -> Tensor:
        has_mean = is_verifying.get() or not self.settings.has_own_results
        if has_mean and value.dim() == 0 and value.is_floating_point():
            root, numbers = place
            whole = self._whole.setdefault((root, next(numbers)), WholeResults())
            mean: Tensor = _MeanOfRanks.apply(value, self._scales.start, whole, begin)
            return mean
        scaled = scale_gradient(value, self._scales.start)
        if scaled.grad_fn is not None and torch.is_grad_enabled():
            leave_step(scaled, begin)
        return scaled

    def place(self, target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Give each rank its parameters, unless it has them."""
        root = target.root
        key = tuple(map(id, called_modules(target)))
        parameters = _trainable_of(root)
        if id(root) in self._sharded and key in self._networks:
            return self._sharded[id(root)].check()
        kinds = _kinds_of(parameters)
        if key in self._networks:
            if self._kinds[key] == kinds:
                return None
            # DDP would leave the gradients of new, of unfrozen and of converted ones alone
            self._reduced.pop(id(root), None)
        if not self.settings.is_cut_by_hand:
            check_no_layerwise(root, self.settings.parallel_mode)
        check_servers(root, self.settings)
        if self.settings.hsdp is not None:
            _check_not_accumulated(root, self.settings.parallel_mode)
        init_parameters(root)
        notes = list(self.settings.precision.notes) if self.settings.precision else []
        notes += self._agree(root)
        average_rows(root)
        decisions: Mapping[int, Placement] = {}
        if self.settings.hsdp is not None and not all(isinstance(p, Part | DTensor) for p in root.parameters()):
            self._sharded[id(root)] = sharded = ShardedNetwork(
                target, self.settings.hsdp, sums_wide=self.settings.gradient_fp32_sync
            )
            for waits in self._waits[:1]:
                waits.enter_context(sharded.no_sync())
            decisions = sharded.decisions
        else:
            for parameter in filter(is_layerwise, root.parameters()):
                scale_gradient_of(parameter, self._scales.own)
        self._networks[key] = root, _trainable_of(root)
        note_known(root.parameters(), kept_equal=self.keeps_equal)
        self._kinds[key] = _kinds_of(self._networks[key][1])
        self._buffered[id(root)] = [module for module in root.modules() if module._buffers]
        self.tell(root, build_replica_plan(root, self.settings, decisions, notes))
        note_placed()
        return None

    def _agree(self, root: nn.Module) -> list[str]:
        """Make every rank start from rank 0's values, or say that they differ; ranks' own parameters are left alone."""
        named = {
            name: tensor
            for name, tensor in [*root.named_parameters(), *root.named_buffers()]
            if is_same_everywhere(tensor)
        }
        equal = equal_everywhere([tensor.detach() for tensor in named.values()])
        different = [name for name, is_equal in zip(named, equal, strict=True) if not is_equal]
        if not different:
            return []
        found = f"{len(different)} parameters or buffers differed between ranks ({user_name(different[0])}, ...)"
        if not self.settings.broadcasts_parameters:
            return [f"{found} and parameter_broadcast is off: the ranks train different networks"]
        for name in different:
            value = named[name].detach().contiguous()
            with waiting_in(lambda: "broadcast of a parameter's values"):
                dist.broadcast(value, 0)
            named[name].data.copy_(value)
        return [f"{found}: rank 0's are used"]

    def forget(self) -> None:
        """Let go of torch's wrappers, which hold the world's groups and with them their threads."""
        self._reduced.clear()
        self._sharded.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients on each rank for as long as the context lasts; the next backward pass reduces them."""
        self.has_waited = True
        with contextlib.ExitStack() as stack:
            for sharded in self._sharded.values():
                stack.enter_context(sharded.no_sync())
            self._waits.append(stack)
            try:
                yield
            finally:
                self._waits.remove(stack)

    @contextlib.contextmanager
    def syncing(self) -> Iterator[None]:
        """Reduce the gradients of every backward pass for as long as the context lasts, inside `no_sync` too."""
        waits, self._waits = self._waits, []
        for sharded in self._sharded.values():
            sharded.set_sync(reduces=True)
        try:
            yield
        finally:
            self._waits = waits
            for sharded in self._sharded.values() if waits else ():
                waits[0].enter_context(sharded.no_sync())

    def boxes(self, root: nn.Module, tensors: Sequence[Tensor]) -> list[Box]:  # noqa: ARG002
        """Return which part of each of the global batch's tensors this rank has passed."""
        everyone = gather([tuple(tensor.shape) for tensor in tensors])
        if len({tuple(shape[1:] for shape in shapes) for shapes in everyone}) > 1:
            raise UnverifiableError(
                f"verify(): the ranks' batches cannot be joined: {everyone[0]} on rank 0, {everyone[-1]} on the "
                "last one"
            )
        rows = [next((shape[:1] for shape in shapes if shape), ()) for shapes in everyone]
        others = [i for i in range(len(tensors)) if all(of[i][:1] != r for of, r in zip(everyone, rows, strict=True))]
        equal = equal_everywhere([tensors[i].detach() for i in others])
        shared = {i for i, is_equal in zip(others, equal, strict=True) if is_equal}  # a mask of all rows, weights
        return [
            whole(shapes[0]) if i in shared else _rows_of(shapes, world.get_rank())
            for i, shapes in enumerate(zip(*everyone, strict=True))
        ]

    # -- gradients for value_and_grad ---------------------------------------------------------------------------

    @property
    def keeps_equal(self) -> bool:
        """Whether all ranks are to hold the same parameters."""
        return self.settings.broadcasts_parameters

    @property
    def reduces_in_backward(self) -> bool:
        """Whether torch reduces the gradients of the last call by itself, in `backward()` only."""
        return self.is_running_module or bool(self._sharded)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all networks."""
        for _, parameters in self._networks.values():
            yield from parameters

    def reduce(self, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients averaged over the ranks, in messages of at most 25 MB; those of weights with
        gradients of their own as they are.
        """
        known = {id(parameter) for parameter in self.parameters()}
        for index, weight in enumerate(weights):
            if id(weight) not in known:
                raise StrategyError(
                    f"value_and_grad: weight {index} of shape {tuple(weight.shape)} belongs to no network that the "
                    "function calls: give its networks' parameters"
                )
        result = list(gradients)
        shared = [index for index, weight in enumerate(weights) if not has_own_gradient(weight)]
        means = mean_of_ranks([gradients[i] for i in shared], sums_wide=self.settings.gradient_fp32_sync)
        for index, mean in zip(shared, means, strict=True):
            result[index] = mean
        return result


def _rows_of(shapes: Sequence[tuple[int, ...]], rank: int) -> Box:
    """Return the box of a rank's rows when the ranks' tensors are joined along dimension 0."""
    own = shapes[rank]
    if not own:
        return Box((), (), ())
    rows = [shape[0] for shape in shapes]
    return Box((sum(rows), *own[1:]), (sum(rows[:rank]), *(0,) * (len(own) - 1)), own)


def _check_hooks(network: nn.Module, mode: str) -> None:
    """Refuse hooks that would look at, or step with, the gradient of one rank."""
    for parameter in network.parameters():
        if parameter._post_accumulate_grad_hooks and not has_own_gradient(parameter):
            raise StrategyError(
                f"register_post_accumulate_grad_hook on a parameter of shape {tuple(parameter.shape)}: with "
                f"parallel_mode={mode!r} it is called before the ranks' mean is there: step after backward(), or use "
                'parallel_mode="semi_auto"'
            )


def _trainable_of(root: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in root.parameters() if parameter.requires_grad]


def _kinds_of(parameters: Sequence[nn.Parameter]) -> list[Any]:
    return [(id(parameter), parameter.dtype, parameter.device) for parameter in parameters]


def _check_not_accumulated(root: nn.Module, mode: str) -> None:
    """Refuse micro batches under FSDP2, which gives gradients in `backward()` only: they would take none."""
    for wrapper in find_wrappers(root):
        if isinstance(wrapper, GradAccumulation):
            raise StrategyError(
                f"{type(wrapper).__name__} with parallel_mode={mode!r} and hsdp: FSDP2 gives it no gradients; use "
                'parallel_mode="semi_auto", or several backward passes under no_sync()'
            )


class _MeanOfRanks(StepFunction):
    """Forward: the mean over ranks. Backward: the mean of their gradients, times the factor of a rank's own loss."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float, whole: WholeResults, begin: Callable[[], None]) -> Tensor:
        ctx.factor, ctx.whole, ctx.begin = factor, whole.of_step(), begin
        return mean_over_ranks(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.begin()
        if torch.is_grad_enabled():  # the derivative itself: what is made of it goes into this rank's loss
            return gradient / dist.get_world_size(), None, None, None
        (mean,) = ctx.whole.settle([gradient])
        assert mean is not None
        return mean * ctx.factor if ctx.factor != 1.0 else mean, None, None, None


def _forget_all() -> None:
    for replicas in list(_living):
        replicas.forget()


world.at_release(_forget_all)
