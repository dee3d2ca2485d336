"""The modes without capture: every rank runs the network as it is, on its own part of the batch.

data_parallel: torch's DistributedDataParallel, or with hsdp its FSDP2 (`parallel/fsdp.py`). hybrid_parallel: the same,
save that parameters marked `layerwise_parallel` belong to their rank. A step function's gradients are reduced after its
backward pass; a module's while it still runs.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.capture.target import Target
from msrun.runtime.execute.transfers import start_all_reduce
from msrun.runtime.nn.deferred_init import init_parameters
from msrun.runtime.parallel.batch.accumulation import GradAccumulation
from msrun.runtime.parallel.batch.divided_batch import find_wrappers
from msrun.runtime.parallel.host_operators import refusing_targets
from msrun.runtime.parallel.modes.fsdp import Decision, ShardedNetwork, called_modules
from msrun.runtime.parallel.modes.hybrid import check_no_layerwise, is_layerwise, scale_gradient_of
from msrun.runtime.parallel.modes.on_servers import check_servers
from msrun.runtime.parallel.modes.own_gradients import average_rows, has_own_gradient, is_same_everywhere
from msrun.runtime.parallel.parameters.fusion_config import BUCKET_BYTES
from msrun.runtime.parallel.parameters.storage import equal_everywhere, note_placed
from msrun.runtime.parallel.precision import autocast
from msrun.runtime.parallel.scaling import replica_scales, scale_gradient
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.parallel.user_name import user_name
from msrun.runtime.progress import waiting_in

Placed = Callable[[nn.Module, Mapping[int, Decision], list[str]], None]
replicas_called: ContextVar[list[Replicas] | None] = ContextVar("replicas_called", default=None)
"""A list while `value_and_grad` runs its function: who must hand out the gradients of what was called."""


_living: weakref.WeakSet[Replicas] = weakref.WeakSet()


class Replicas:
    """The networks of one AutoParallel in a mode without capture. All ranks make the same calls in the same order.

    Args:
        placed: called with what was decided and notes when a network's parameters have been put in place.
    """

    def __init__(self, settings: ParallelSettings, placed: Placed) -> None:
        self._settings = settings
        self._placed = placed
        self._ranks = world.get_group_size()
        self._scales = replica_scales(settings.compat, settings.averages_gradients, self._ranks)
        self._networks: dict[tuple[int, ...], tuple[nn.Module, list[nn.Parameter]]] = {}
        """ids of the modules that are called -> who has them, and their parameters in place that are trained"""
        self._wrapped: dict[int, DistributedDataParallel] = {}
        self._sharded: dict[int, ShardedNetwork] = {}
        self.is_running_module = False
        self._waits: list[contextlib.ExitStack] = []
        """The contexts of `no_sync` that are open, outermost first."""
        _living.add(self)

    # -- calling ------------------------------------------------------------------------------------------------

    def call(self, target: Target, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a module, or a function that closes over modules.

        Scalar results are means over all ranks, others are this rank's own.
        """
        self.place(target)
        mode = self._settings.parallel_mode
        is_module = isinstance(target.call, nn.Module)
        reduces = isinstance(target.call, nn.Module) and torch.is_grad_enabled() and not self._sharded
        wrapped = self._wrapped.get(id(target.call)) if reduces else None
        if wrapped is not None:
            _check_hooks(target.root, mode)
        run: Callable[..., Any] = target.call if wrapped is None else wrapped
        own = self._scales.own
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: scale_gradient(x, own), (tuple(args), dict(kwargs)))
        with autocast(self._settings.precision), refusing_targets(target.root, mode):
            result = run(*args, **kwargs)
        if reduces and wrapped is None:
            result = self._wrap(target.call, result)
        if not torch.is_grad_enabled():
            for sharded in self._sharded.values():
                sharded.reshard()  # else the modules show whole parameters until the next backward pass
        called = replicas_called.get()
        if called is not None:
            self.is_running_module = is_module
            called.append(self)
        return pytree.tree_map_only(Tensor, self._leave, result)

    def _leave(self, value: Tensor) -> Tensor:
        if value.dim() == 0 and value.is_floating_point():
            mean: Tensor = _MeanOfRanks.apply(value, self._scales.start)
            return mean
        return scale_gradient(value, self._scales.start)

    def place(self, target: Target) -> None:
        """Give each rank its parameters, unless it has them."""
        root = target.root
        key = tuple(map(id, called_modules(target)))
        parameters = _trainable_of(root)
        if id(root) in self._sharded and key in self._networks:
            return self._sharded[id(root)].check()
        if key in self._networks:
            before = self._networks[key][1]
            if len(before) == len(parameters) and all(map(operator.is_, before, parameters)):
                return None
            self._wrapped.pop(id(root), None)  # DDP would leave the gradients of new and of unfrozen ones alone
        if self._settings.parallel_mode != "hybrid_parallel":
            check_no_layerwise(root, self._settings.parallel_mode)
        check_servers(root, self._settings)
        if self._settings.hsdp is not None:
            _check_not_accumulated(root, self._settings.parallel_mode)
        init_parameters(root)
        notes = list(self._settings.precision.notes) if self._settings.precision else []
        notes += self._agree(root)
        average_rows(root)
        decisions: Mapping[int, Decision] = {}
        if self._settings.hsdp is not None and not all(isinstance(p, DTensor) for p in root.parameters()):
            self._sharded[id(root)] = sharded = ShardedNetwork(
                target, self._settings.hsdp, sums_wide=self._settings.gradient_fp32_sync
            )
            for waits in self._waits[:1]:
                waits.enter_context(sharded.no_sync())
            decisions = sharded.decisions
            notes += sharded.notes
        else:
            for parameter in filter(is_layerwise, root.parameters()):
                scale_gradient_of(parameter, self._scales.own)
        self._networks[key] = root, _trainable_of(root)
        self._placed(root, decisions, notes)
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
        if not self._settings.broadcasts_parameters:
            return [f"{found} and parameter_broadcast is off: the ranks train different networks"]
        for name in different:
            value = named[name].detach().contiguous()
            with waiting_in(lambda: "broadcast of a parameter's values"):
                dist.broadcast(value, 0)
            named[name].data.copy_(value)
        return [f"{found}: rank 0's are used"]

    def _wrap(self, network: Any, result: Any) -> Any:
        """Put a module whose first forward pass has given `result` under DDP, and return the result seen by it.

        DDP must know whether the backward pass gives every parameter a gradient: it would wait for one in vain and
        leave others unreduced, and looking every time is dear. So the first result tells, on all ranks together.
        """
        _check_hooks(network, self._settings.parallel_mode)
        named = list(network.named_parameters())
        own = [f"network.{name}" for name, parameter in named if has_own_gradient(parameter)]
        if not any(parameter.requires_grad and not has_own_gradient(parameter) for _, parameter in named):
            return result
        misses = torch.tensor(0.0 if _reaches_all(result, network) else 1.0, device=world.device())
        with waiting_in(lambda: "the search for parameters without gradient"):
            dist.all_reduce(misses, dist.ReduceOp.MAX)
        holder = _Holder(network, result)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(holder, own)
        device = world.device()
        ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(holder, device_ids=ids, init_sync=False, find_unused_parameters=bool(misses))
        if self._settings.gradient_fp32_sync and any(is_short(parameter.dtype) for _, parameter in named):
            wrapped.register_comm_hook(None, lambda _state, bucket: _reduce_in_float32(bucket))
        wrapped.require_forward_param_sync = False  # buffers are equal, and the result may depend on their values
        self._wrapped[id(network)] = wrapped
        for waits in self._waits[:1]:
            waits.enter_context(wrapped.no_sync())
        return wrapped()

    def forget(self) -> None:
        """Let go of torch's wrappers, which hold the world's groups and with them their threads."""
        self._wrapped.clear()
        self._sharded.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients on each rank for as long as the context lasts; the next backward pass reduces them."""
        with contextlib.ExitStack() as stack:
            for wrapped in self._wrapped.values():
                stack.enter_context(wrapped.no_sync())
            for sharded in self._sharded.values():
                stack.enter_context(sharded.no_sync())
            self._waits.append(stack)
            try:
                yield
            finally:
                self._waits.remove(stack)

    # -- gradients for value_and_grad ---------------------------------------------------------------------------

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

        Raises:
            StrategyError: a weight that no network of the step function has.
        """
        known = {id(parameter) for parameter in self.parameters()}
        for index, weight in enumerate(weights):
            if id(weight) not in known:
                raise StrategyError(
                    f"value_and_grad: weight {index} of shape {tuple(weight.shape)} belongs to no network that the "
                    "function calls: give its networks' parameters"
                )
        result = list(gradients)
        for members in _buckets([i for i, weight in enumerate(weights) if not has_own_gradient(weight)], gradients):
            parts = [gradients[i] for i in members]
            flat = torch.cat([part.reshape(-1) for part in parts])
            wide = flat.float() if self._settings.gradient_fp32_sync and is_short(flat.dtype) else flat
            assert dist.group.WORLD is not None
            future = start_all_reduce(wide, dist.group.WORLD, in_place=True)
            mean = (future.wait() / self._ranks).to(flat.dtype)
            for i, part in zip(members, mean.split([part.numel() for part in parts]), strict=True):
                result[i] = part.view(gradients[i].shape)
        return result


def _check_hooks(network: nn.Module, mode: str) -> None:
    """Refuse hooks that would look at, or step with, the gradient of one rank.

    Raises:
        StrategyError: there is one.
    """
    for parameter in network.parameters():
        if parameter._post_accumulate_grad_hooks and not has_own_gradient(parameter):
            raise StrategyError(
                f"register_post_accumulate_grad_hook on a parameter of shape {tuple(parameter.shape)}: with "
                f"parallel_mode={mode!r} it is called before the ranks' mean is there: step after backward(), or use "
                'parallel_mode="semi_auto"'
            )


def _trainable_of(root: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in root.parameters() if parameter.requires_grad]


class _Holder(nn.Module):
    """A network for DDP; its first forward pass is done already."""

    def __init__(self, network: nn.Module, result: Any) -> None:
        super().__init__()
        self.network = network
        self._first = [result]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's result."""
        return self._first.pop() if self._first else self.network(*args, **kwargs)


def _reaches_all(result: Any, network: nn.Module) -> bool:
    """Return whether the backward pass of a result gives every trainable parameter of a network a gradient."""
    missing = {id(p) for p in network.parameters() if p.requires_grad and not has_own_gradient(p)}
    tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    todo = [x.grad_fn for x in tensors if x.grad_fn is not None]
    seen = set(todo)
    while todo and missing:
        node = todo.pop()
        missing.discard(id(getattr(node, "variable", None)))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return not missing


def _buckets(members: Sequence[int], gradients: Sequence[Tensor]) -> list[list[int]]:
    """Return indexes of gradients that travel together: of one type, last ones first as backward makes them."""
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for index in reversed(members):
        size = gradients[index].numel() * gradients[index].element_size()
        bucket, filled = open_buckets.get(gradients[index].dtype, ([], BUCKET_BYTES))
        if filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[gradients[index].dtype] = bucket, filled + size
    return buckets


def _check_not_accumulated(root: nn.Module, mode: str) -> None:
    """Refuse micro batches under FSDP2, which gives gradients in `backward()` only: they would take none.

    Raises:
        StrategyError: there are some.
    """
    for wrapper in find_wrappers(root):
        if isinstance(wrapper, GradAccumulation):
            raise StrategyError(
                f"{type(wrapper).__name__} with parallel_mode={mode!r} and hsdp: FSDP2 gives it no gradients; use "
                'parallel_mode="semi_auto", or several backward passes under no_sync()'
            )


def is_short(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def _reduce_in_float32(bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of DDP; one of 16 bits travels as float32."""
    short = bucket.buffer()
    if not is_short(short.dtype):
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
    work = dist.all_reduce(short.float().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: short.copy_(done.value()[0]))


class _MeanOfRanks(torch.autograd.Function):
    """Forward: the mean over ranks. Backward: the gradient times the factor of every rank's own loss."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        assert dist.group.WORLD is not None
        return start_all_reduce(value, dist.group.WORLD).wait() / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor if ctx.factor != 1.0 else gradient, None


def _forget_all() -> None:
    for replicas in list(_living):
        replicas.forget()


world.at_release(_forget_all)
