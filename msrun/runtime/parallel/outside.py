"""Parameters outside of every step: of modules between the results of steps and losses, such as a head of its own.

Each rank's backward pass gives them the gradient of its own loss. What is trained is the mean of the losses, so after
every pass through a step their gradients are averaged over the ranks. Optimizers tell which tensors are trained, and
autograd which ones a pass reaches. What is not averaged so is refused at an optimizer's first step. An optimizer that
trains nothing of a step may be this rank's alone, so its ranks compare without waiting: the last one to come finds what
the others have left in the store.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.agreement import gather
from msrun.runtime.execute.placement import placement_of
from msrun.runtime.execute.transfers import start_all_reduce
from msrun.runtime.nn.replaced import living, living_optimizers
from msrun.runtime.parallel.modes.own_gradients import is_same_everywhere
from msrun.runtime.parallel.parameters.fusion import BUCKET_BYTES
from msrun.runtime.parallel.parameters.storage import digest, equal_everywhere
from msrun.runtime.tensors.plain_tensors import plain_tensors

log = logging.getLogger("msrun.runtime")
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Tensors whose gradients are those of the mean already, as a step without capture runs them, or they reach one ->
whether all ranks are to hold the same values"""
_averaged: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters outside that passes have reached, in the same order on every rank."""
_looked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose first step was looked at."""
_left: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Those that train nothing of a step, and whose gradients this rank has left for the others."""
_counts: Counter[str] = Counter()
"""shapes -> how many optimizers of parameters of such shapes have been left for the others"""


class _Optimizers:
    """What optimizers train; looked for again when one was given more."""

    def __init__(self) -> None:
        self._changes = itertools.count(1)
        self._change, self._seen = 0, -1
        self._found: weakref.WeakKeyDictionary[Optimizer, list[TensorWeakRef]] = weakref.WeakKeyDictionary()

    def watch(self) -> None:
        """Hear of parameters that optimizers get from now on."""
        add = Optimizer.add_param_group

        @functools.wraps(add)
        def noting_add(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
            self._change = next(self._changes)
            add(optimizer, param_group)

        Optimizer.add_param_group = noting_add  # type: ignore[method-assign,assignment]

    def reached(self) -> list[list[Tensor]]:
        """Return the parameters outside of every step that the present backward pass reaches, by optimizer."""
        if self._seen != self._change:
            self._seen = self._change
            self._found.clear()
            averaged = {id(p) for module in living(DistributedDataParallel) for p in module.parameters()}  # by torch
            for optimizer in living_optimizers():
                held = [p for group in optimizer.param_groups for p in group["params"]]
                self._found[optimizer] = [TensorWeakRef(p) for p in held if id(p) not in averaged and _is_outside(p)]
        groups = ([p for ref in refs if (p := ref()) is not None and _is_reached(p)] for refs in self._found.values())
        return [group for group in groups if group]


_optimizers = _Optimizers()


@functools.cache
def watch_trained() -> None:
    """Look at what optimizers train from now on; once in a process."""
    _optimizers.watch()
    register_optimizer_step_pre_hook(_check_first_step)


def note_known(tensors: Iterable[Tensor], *, kept_equal: bool = True) -> None:
    """Note tensors whose gradients are those of the mean; parameters of captured networks are placed instead.

    Args:
        kept_equal: all ranks are to hold the same values.
    """
    for tensor in tensors:
        _known[tensor] = kept_equal


def average_outside() -> None:
    """Have the gradients of parameters outside averaged at the end of the present backward pass, which is in a step."""
    if world.simulation_level() is not None:
        return
    groups = _optimizers.reached()
    found = {id(parameter) for group in groups for parameter in group}
    unknown = [[p for p in group if p not in _averaged] for group in groups]
    new = _in_one_order([group for group in unknown if group])
    reached = [p for p in _averaged if id(p) in found or _is_reached(p)] + new
    if reached:
        torch.autograd.Variable._execution_engine.queue_callback(partial(_average, reached, new))


def _in_one_order(groups: list[list[Tensor]]) -> list[Tensor]:
    """Return parameters of several optimizers in an order that is the same on every rank, by their values."""
    if len(groups) > 1:
        keys = [tuple(map(digest, group)) for group in groups]
        groups = [groups[index] for index in sorted(range(len(groups)), key=keys.__getitem__)]
        different = {tuple(map(id, group)) for group in groups}
        if len(set(keys)) < len(different):
            raise StrategyError(
                "two optimizers train modules outside of the step that hold the same values, so that the ranks cannot "
                "tell them apart: give them one optimizer, or put the modules into networks that AutoParallel runs"
            )
    return list({id(parameter): parameter for group in groups for parameter in group}.values())


def _average(reached: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    if new:
        check_shared(new)
        for parameter in new:
            _averaged[parameter] = True
    given = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in reached]
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in given]
    for parameter, mean in zip(reached, mean_of_ranks(dense, sums_wide=True), strict=True):
        parameter.grad = mean


def _check_first_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Refuse the first step of an optimizer that would train what no step runs to other values on every rank."""
    if optimizer in _looked or world.get_group_size() == 1 or world.simulation_level() is not None:
        return
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(_known.get(parameter, placement_of(parameter) is not None) for parameter in trained):
        if optimizer not in _left:
            _compare_with_who_came(optimizer, [p for p in _outside(trained) if isinstance(p, nn.Parameter)])
        return
    _looked.add(optimizer)
    outside = _outside(trained)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in outside]
    equal = equal_everywhere([g.to_dense() if g.is_sparse else g for g in gradients])
    for parameter, is_equal in zip(outside, equal, strict=True):
        if not is_equal:
            raise StrategyError(
                f"optimizer.step(): a parameter of shape {tuple(parameter.shape)} outside of the step has another "
                "gradient on each rank, of its own rows, and every rank would train its own copy: put its module into "
                "the network that AutoParallel runs, or into an AutoParallel of its own"
            )


def _compare_with_who_came(optimizer: Optimizer, outside: Sequence[Tensor]) -> None:
    """Warn, on the last rank to come, at the first step of an optimizer of no step whose gradients differ by rank.

    It may be a module on results of a step without a gradient, a linear probe, and it may be what each rank is to train
    for itself: no error.
    """
    mine = summaries_of(outside)
    if not any(norm for _, norm, _ in filter(None, mine)):
        return  # nothing is trained yet
    _left.add(optimizer)
    shapes = ";".join(f"{parameter.dtype}{tuple(parameter.shape)}" for parameter in outside)
    place = f"msrun_outside/{zlib.crc32(shapes.encode())}/{_counts[shapes]}"
    _counts[shapes] += 1
    store = dist.distributed_c10d._get_default_store()
    keys = [f"{place}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], json.dumps(mine))
    if not store.check(keys):
        return
    summaries = [json.loads(store.get(key)) for key in keys]
    different = [p for p, *found in zip(outside, *summaries, strict=True) if not are_alike(found)]
    if different:
        log.warning(
            "%d parameters that no step runs have another gradient on each rank, so every rank trains its own copy. An "
            'AutoParallel around their module trains one; one with the mode "stand_alone" says that this is meant',
            len(outside),
        )


Summary = tuple[float, float, float]


def summaries_of(parameters: Sequence[Tensor]) -> list[Summary | None]:
    """Return sum, norm and root of the size of each gradient; None where there is none."""
    with plain_tensors(), torch.no_grad():
        given = [parameter.grad for parameter in parameters]
        wide = [None if g is None else (g.to_dense() if g.is_sparse else g).double() for g in given]
        return [None if g is None else (g.sum().item(), g.norm().item(), g.numel() ** 0.5) for g in wide]


def are_alike(of_ranks: Sequence[Summary | None]) -> bool:
    """Return whether ranks' gradients of a parameter differ by rounding alone; what is not finite counts as equal."""
    known = [each for each in of_ranks if each is not None]
    if len(known) < len(of_ranks) or not known:
        return not known
    sums, norms, root = [each[0] for each in known], [each[1] for each in known], known[0][2]
    limit = 1e-2 * max(norms)
    return not (max(norms) - min(norms) > limit or max(sums) - min(sums) > limit * root)


def _outside(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter.requires_grad and _is_outside(parameter)]


def _is_outside(parameter: Tensor) -> bool:
    """Return whether the gradient of a parameter that all ranks hold is that of each rank's own loss."""
    if parameter in _known or isinstance(parameter, DTensor) or placement_of(parameter) is not None:
        return False
    return is_same_everywhere(parameter)


def _is_reached(parameter: Tensor) -> bool:
    """Return whether a parameter is outside of every step and the present backward pass adds to its gradient.

    Its node of autograd is not kept between passes: it would hold the parameter, which a later call may cut.
    """
    is_in_a_graph = parameter._use_count() > 1  # type: ignore[attr-defined]  # cheaper than to look for its node
    if not (is_in_a_graph and parameter.requires_grad and parameter.is_leaf and _is_outside(parameter)):
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # how torch says that it runs torch.autograd.grad for this one
        raise StrategyError(
            f"torch.autograd.grad of a parameter of shape {tuple(parameter.shape)} outside of the step gives that of "
            "this rank's rows: use backward() and .grad, or put its module into the network that AutoParallel runs"
        ) from None


def check_shared(leaves: Sequence[Tensor]) -> None:
    """Refuse parameters outside of every step that would stay different on every rank, and say what the others cost."""
    mine = [digest(leaf.detach()) for leaf in leaves]
    everyone = gather(mine, what="the comparison of parameters outside of steps")
    if any(len(digests) != len(leaves) for digests in everyone):
        raise StrategyError(
            f"the losses of the ranks use {sorted(set(map(len, everyone)))} parameters outside of the step: use the "
            "same ones on every rank (times 0 where they shall not count)"
        )
    for leaf, *digests in zip(leaves, *everyone, strict=True):
        if len(set(digests)) > 1:
            raise StrategyError(
                f"a parameter of shape {tuple(leaf.shape)} outside of the step differs between the ranks, and the loss "
                "depends on it: put its module into the network that AutoParallel runs, or into an AutoParallel of its "
                "own, which gives all ranks rank 0's values"
            )
    if world.get_rank() == 0:
        log.warning(
            "%d parameters are trained outside of the step: their gradients are averaged over the ranks one by one. "
            "An AutoParallel around their module sends them together",
            len(leaves),
        )


def mean_of_ranks(gradients: Sequence[Tensor], *, sums_wide: bool) -> list[Tensor]:
    """Return gradients averaged over the ranks, in messages of at most 25 MB."""
    result = list(gradients)
    for members in _buckets(gradients):
        parts = [gradients[i] for i in members]
        flat = torch.cat([part.reshape(-1) for part in parts])
        wide = flat.float() if sums_wide and is_short(flat.dtype) else flat
        assert dist.group.WORLD is not None
        future = start_all_reduce(wide, dist.group.WORLD, in_place=True)
        mean = (future.wait() / dist.get_world_size()).to(flat.dtype)
        for i, part in zip(members, mean.split([part.numel() for part in parts]), strict=True):
            result[i] = part.view(gradients[i].shape)
    return result


def _buckets(gradients: Sequence[Tensor]) -> list[list[int]]:
    """Return indexes of gradients that travel together: of one type, last ones first as backward makes them."""
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for index in reversed(range(len(gradients))):
        size = gradients[index].numel() * gradients[index].element_size()
        bucket, filled = open_buckets.get(gradients[index].dtype, ([], BUCKET_BYTES))
        if filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[gradients[index].dtype] = bucket, filled + size
    return buckets


def is_short(dtype: torch.dtype) -> bool:
    """Return whether a type of numbers has 16 bits."""
    return dtype in (torch.float16, torch.bfloat16)
