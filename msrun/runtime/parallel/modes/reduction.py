"""A module whose gradients torch's DDP averages: told in each backward pass which parameters the pass reaches.

DDP expects one backward pass after each forward pass, and gradients for all its parameters. Here it expects nothing in
the forward pass. When a backward pass comes to a result of the module, autograd says which gradients the pass will
make: if it makes those of all parameters of DDP's, DDP reduces them while the pass goes on. What a pass leaves out,
what no pass has reached so far and what `torch.autograd.grad` asks for is averaged after the pass, or as it is found.
The first pass is averaged after its end, and all of them if it has run others inside, as reentrant checkpoints do.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.agreement import gather
from msrun.runtime.parallel.border import leaves_of, share_leaves
from msrun.runtime.parallel.modes.own_gradients import has_own_gradient
from msrun.runtime.parallel.outside import is_short, mean_of_ranks
from msrun.runtime.progress import waiting_in

_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False
}
"""Buffers are synchronised here; torch 2.13 has given the option that says so another name."""


class ReducedNetwork:
    """One module and the reduction of its gradients. All ranks make it and its passes together.

    Args:
        sums_wide: gradients of 16 bits are added up in float32.
    """

    def __init__(self, network: nn.Module, *, sums_wide: bool) -> None:
        self._network = network
        self._sums_wide = sums_wide
        trained = [p for p in network.parameters() if p.requires_grad and not has_own_gradient(p)]
        self._nodes = {parameter: get_gradient_edge(parameter).node for parameter in trained}
        """trained parameter -> what adds to its gradient in a backward pass"""
        self._loose: set[nn.Parameter] | None = None
        """Those that DDP knows nothing of, as some pass has not reached them on some rank; None: nobody knows yet."""
        self._wrapped: DistributedDataParallel | None = None
        self._pass = -1
        """The backward pass that was looked at last."""
        self._waiting: set[nn.Parameter] = set()
        """Those with gradients that only this rank has added up."""
        self._nests: bool | None = None
        """Whether backward passes run others inside, as reentrant checkpoints do; None: none was seen to its end."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if self._wrapped is None and self._loose is not None and self._nests is False:  # DDP expects one gradient each
            self._wrapped = self._wrap(self._loose)
        if self._wrapped is None:
            return self._network(*args, **kwargs)
        return self._wrapped(*args, **kwargs)

    def look(self, results: Sequence[Tensor]) -> None:
        """Look at the results of a forward pass: the first ones tell which parameters the passes reach."""
        if self._loose is None:
            reached = {id(leaf): leaf for leaf in leaves_of(results)}
            own = set(map(id, self._network.parameters()))
            share_leaves([leaf for key, leaf in reached.items() if key not in own])
            missed = {parameter for parameter in self._nodes if id(parameter) not in reached}
            self._loose = set(any_rank(list(self._nodes), missed))

    def begin_backward(self, *, syncs: bool) -> None:
        """Hear that a backward pass has come to a result of the module; to be called for each result.

        Args:
            syncs: False: this rank adds its gradients up until a pass that syncs.
        """
        number = torch._C._current_graph_task_id()
        if number == self._pass:
            return
        added, asked = self._reached()
        if torch.is_grad_enabled() and (added or asked):
            raise StrategyError(
                "create_graph=True for gradients of parameters, which the ranks exchange: take that of an input with "
                "torch.autograd.grad, or put what needs second derivatives into the network's loss"
            )
        inner: set[nn.Parameter] = set()
        if not syncs:
            self._waiting.update(added)
            watches = self._watch(number, added, inner)
            _at_the_end(partial(self._wait_for, inner, watches))
            return
        self._pass = number
        if self._wrapped is not None and not self._loose and len(added) == len(self._nodes):
            self._waiting.clear()
            _arm(self._wrapped)
            return
        hooks = [parameter.register_hook(self._mean_now) for parameter in asked]
        hooks += self._watch(number, added, inner)
        touched = self._waiting.union(added) if added else set()
        loose = self._loose or set()
        all_reached = len(set(added) | loose) == len(self._nodes)
        if self._wrapped is None and len(loose) < len(self._nodes):
            all_reached = False
        if added:
            self._waiting.clear()
            if all_reached and self._wrapped is not None:
                _arm(self._wrapped)
        if hooks or (added and (loose or not all_reached)):
            _at_the_end(partial(self._end, touched, inner, hooks, everything=not all_reached))

    def _watch(self, number: int, added: Sequence[nn.Parameter], inner: set[nn.Parameter]) -> list[Any]:
        """Note in `inner` whose gradients are made by passes inside this one, as reentrant checkpoints run them."""
        reached = set(added) if self._nests is False else set()

        def note(parameter: nn.Parameter, _: Any) -> None:
            if torch._C._current_graph_task_id() != number:
                inner.add(parameter)

        return [node.register_prehook(partial(note, p)) for p, node in self._nodes.items() if p not in reached]

    def _wait_for(self, inner: set[nn.Parameter], watches: Sequence[Any]) -> None:
        for watch in watches:
            watch.remove()
        self._waiting.update(inner)

    def _reached(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return whose gradients the present backward pass adds to `.grad`, and whose it gives to the caller."""
        with contextlib.suppress(RuntimeError):
            flags = map(torch._C._will_engine_execute_node, self._nodes.values())
            return [parameter for parameter, is_added in zip(self._nodes, list(flags), strict=True) if is_added], []
        added, asked = [], []
        for parameter, node in self._nodes.items():
            try:
                if torch._C._will_engine_execute_node(node):
                    added.append(parameter)
            except RuntimeError:  # how torch says that it runs torch.autograd.grad for this one
                asked.append(parameter)
        return added, asked

    def _mean_now(self, gradient: Tensor) -> Tensor:
        return mean_of_ranks([gradient], sums_wide=self._sums_wide)[0]

    def _end(
        self, touched: set[nn.Parameter], inner: set[nn.Parameter], hooks: Sequence[Any], *, everything: bool
    ) -> None:
        """Average what DDP has not, after a backward pass."""
        for hook in hooks:
            hook.remove()
        if inner:
            touched = touched | inner | self._waiting
            self._waiting.clear()
        if self._nests is None and touched:
            self._nests = any(gather(bool(inner), what="the search for backward passes inside others"))
        chosen = list(self._nodes) if everything else [p for p in self._nodes if p in (self._loose or ())]
        if not touched or not chosen:
            return
        members = any_rank(chosen, touched)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        for parameter, gradient, mean in zip(
            members, gradients, mean_of_ranks(gradients, sums_wide=self._sums_wide), strict=True
        ):
            parameter.grad = gradient.copy_(mean)
        if everything:
            self._loose = (self._loose or set()) | (set(self._nodes) - set(members))
            self._wrapped = None

    def _wrap(self, loose: set[nn.Parameter]) -> DistributedDataParallel | None:
        if len(loose) == len(self._nodes):
            return None
        holder = _Holder(self._network)
        inside = {id(parameter) for parameter in self._nodes if parameter not in loose}
        left_out = [f"network.{name}" for name, p in self._network.named_parameters() if id(p) not in inside]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(holder, left_out)
        device = world.device()
        ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(holder, device_ids=ids, init_sync=False, **_NO_BUFFERS)
        if self._sums_wide and any(is_short(parameter.dtype) for parameter in self._nodes):
            wrapped.register_comm_hook(None, lambda _state, bucket: _reduce_in_float32(bucket))
        wrapped.require_backward_grad_sync = False  # it is told in backward passes
        return wrapped


def _arm(wrapped: DistributedDataParallel) -> None:
    """Let DDP reduce the gradients of the backward pass that has just begun."""
    wrapped.reducer._rebuild_buckets()  # DDP does so in its next forward pass, and fails where two passes have come by
    wrapped.reducer.prepare_for_backward([])


def _at_the_end(work: Callable[[], None]) -> None:
    """Do something after the present backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(work)


class _Holder(nn.Module):
    """A network for DDP, which says in a class of its own what DDP shall leave out."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's result."""
        return self.network(*args, **kwargs)


def any_rank(parameters: Sequence[nn.Parameter], mine: set[nn.Parameter]) -> list[nn.Parameter]:
    """Return those of some parameters that any rank has among its own."""
    mask = torch.tensor([float(p in mine) for p in parameters], device=world.device())
    with waiting_in(lambda: "the search for parameters without gradient"):
        dist.all_reduce(mask, dist.ReduceOp.MAX)
    return [parameter for parameter, found in zip(parameters, mask.tolist(), strict=True) if found]


def _reduce_in_float32(bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of DDP; one of 16 bits travels as float32."""
    short = bucket.buffer()
    if not is_short(short.dtype):
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
    work = dist.all_reduce(short.float().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: short.copy_(done.value()[0]))
