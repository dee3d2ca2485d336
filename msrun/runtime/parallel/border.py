"""The border of a step, the same in every mode: what the gradients of its results and of its inputs mean.

Every rank's backward pass begins with a loss of its own, and what is trained is the mean of the ranks' losses, as in
torch's DDP. So outside of steps a gradient is that of the rank's own loss, whichever step it comes from or goes to:
`g(f(x))`, losses outside, and states that go from call to call need nothing else. At the border (factors: `scaling.py`)

- a result that is cut over n ranks, such as rows of the batch, takes a gradient in as that of the mean, a n-th;
- a result that all ranks hold whole takes the mean of the ranks' gradients: that is the gradient itself if all begin
  alike, as they do with a loss. The first backward pass looks; if they do not, all later ones average;
- an input that is cut over n ranks hands on n times the gradient of the mean.

What the user looks at in the end is the gradient of the mean: that of rows that require it, a n-th of what has arrived;
of what is no row of the batch, such as a parameter of a module outside of every step, the mean over the ranks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from msrun.errors import CaptureError, StrategyError
from msrun.runtime import world
from msrun.runtime.agreement import gather
from msrun.runtime.execute.gradients import mean_over_ranks
from msrun.runtime.execute.phase import is_verifying
from msrun.runtime.parallel.outside import (
    are_alike,
    average_outside,
    check_shared,
    note_known,
    summaries_of,
)
from msrun.runtime.parallel.parameters.storage import digest
from msrun.runtime.parts.part import Part
from msrun.runtime.tensors.plain_tensors import StandIn, plain_tensors


class LateLoss(StandIn, Tensor):
    """A scalar that becomes a plain tensor, with its value, as soon as anything but its gradient is asked for.

    Every function of torch that gets one comes here first (`__torch_function__`), also where it is part of a list; what
    does not come from torch, as `print` or numpy, asks through the tensor's methods.
    """

    _buffer: Tensor
    """Holds the value in the same memory, outside autograd."""
    _arrive: Callable[[], Tensor]
    _kind: type[Tensor]
    """What it becomes."""

    @staticmethod
    def of(arrive: Callable[[], Tensor], dtype: torch.dtype) -> LateLoss:
        """Return a scalar whose value `arrive` will give, once. The value is on the host, as is the result."""
        buffer = torch.full((), torch.nan, dtype=dtype)
        loss: LateLoss = Tensor._make_subclass(LateLoss, buffer)
        loss._buffer, loss._arrive, loss._kind = buffer, arrive, Tensor
        return loss

    def become(self, kind: type[Tensor]) -> LateLoss:
        """Choose the class that it has when its value is there; `as_subclass` would not wait for the value."""
        self._kind = kind
        return self

    def constructed_by(self, construct: Callable[[Any], Any]) -> Any:
        """Return what `torch.tensor` and the like make of the value, when it has arrived."""
        self._become_plain()()
        return construct(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        self._become_plain()()
        return repr(self)

    def __str__(self) -> str:
        self._become_plain()()
        return str(self)

    def __format__(self, how: str) -> str:
        self._become_plain()()
        return format(self, how)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch on values that have arrived; `backward` and `grad` before the value has."""
        kwargs = kwargs or {}
        found = _late_ones((args, kwargs))
        if not found:  # hidden in a container that torch's pytree does not know
            return NotImplemented
        needs_values = func not in _OF_GRADIENTS or len(_late_ones(args[:1])) < len(found)
        arrivals = [loss._become_plain() for loss in {id(loss): loss for loss in found}.values()]
        if needs_values:
            _run_all(arrivals)
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            _run_all(arrivals)

    def _become_plain(self) -> Callable[[], None]:
        """Become an ordinary tensor; return what writes the value that was missing."""
        state = self.__dict__
        buffer, arrive = state["_buffer"], state["_arrive"]

        def finish() -> None:
            with torch.inference_mode(mode=False), torch.no_grad():
                buffer.copy_(arrive())

        self.__class__ = state["_kind"]
        del state["_buffer"], state["_arrive"], state["_kind"]
        return finish


def _late_ones(values: Any) -> list[LateLoss]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, LateLoss)]


def _run_all(arrivals: Iterable[Callable[[], None]]) -> None:
    for arrive in arrivals:
        arrive()


_OF_GRADIENTS = (Tensor.backward, torch.autograd.grad)


SHARED = 0.0
"""In place of a factor: all ranks hold the same of a leaf, and its gradient is the mean of theirs."""
_IS_RESULT = "msrun_result_of_a_step"
_factors: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""leaf of autograd that has reached a step through its inputs -> factor of its gradient"""
_passes: set[int] = set()
"""Backward passes that have come through a step."""
_averaging: set[int] = set()
"""Those after which gradients of parameters outside are averaged."""


class StepFunction(torch.autograd.Function):
    """What autograd runs where results leave a step: leaves beyond it belong to the step and not to its caller."""

    @staticmethod
    def begin_backward(*, counts: bool = True) -> None:
        """Hear that a backward pass has come to a step.

        Args:
            counts: False: the step is only verified, or its rank keeps its gradients to itself for now.
        """
        number = torch._C._current_graph_task_id()
        _note_pass(_passes, number)
        if counts and not torch.is_grad_enabled() and _note_pass(_averaging, number):
            average_outside()

    @staticmethod
    def refuse_second_derivatives() -> None:
        """Refuse a backward pass that shall itself be differentiated."""
        if torch.is_grad_enabled():
            raise CaptureError(
                "backward(create_graph=True) through a step: its gradients have no graph of their own. Put what needs "
                "second derivatives into the network's loss, or take the gradient of an input with "
                'parallel_mode="data_parallel" without hsdp'
            )


class WholeResults:
    """The gradients that come in at results which all ranks hold whole."""

    def __init__(self) -> None:
        self._differ: bool | None = None

    def of_step(self) -> WholeResults:
        """Return what a forward pass asks on its way back, in whatever thread: a step that is verified settles nothing
        for later ones."""
        return WholeResults() if is_verifying.get() else self

    def settle(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return each gradient as that of the mean of the ranks' losses. All ranks call it together."""
        is_pretended = world.simulation_level() is not None or any(isinstance(g, FakeTensor) for g in gradients)
        if self._differ is None and not is_pretended:
            with torch.no_grad():
                mine = [None if gradient is None else digest(gradient) for gradient in gradients]
                everyone = gather(mine, what="the comparison of losses")
            for rank, other in enumerate(everyone):
                if [each is None for each in other] != [each is None for each in everyone[0]]:
                    raise StrategyError(
                        f"the loss of rank {rank} uses other results of a step than that of rank 0: use the same ones "
                        "on every rank (times 0 where they shall not count)"
                    )
            self._differ = any(other != everyone[0] for other in everyone)
        if not self._differ:
            return list(gradients)
        return [None if gradient is None else _mean(gradient) for gradient in gradients]


def enter_step(tensors: Sequence[Tensor], parts: Sequence[int], leaf_factors: Callable[[int], float]) -> None:
    """Let the gradients of whatever the inputs of a step are made of become those of the mean of the ranks' losses.

    Args:
        parts: into how many parts each input is cut; 1: all ranks pass the same.
        leaf_factors: number of parts -> factor of the gradient of a leaf that is cut so.
    """
    if not torch.is_grad_enabled():
        return
    found: list[Tensor] = []
    for tensor, count in zip(tensors, parts, strict=True):
        if count == 1 or not tensor.requires_grad:
            continue
        for leaf in leaves_of([tensor]):
            factor = leaf_factors(count) if _is_cut_like(leaf, tensor) else SHARED
            known = _factors.get(leaf)
            if known == factor:
                continue
            if known is not None:
                raise StrategyError(
                    f"a tensor of shape {tuple(leaf.shape)} reaches steps that cut it into different numbers of parts, "
                    "or one as rows of the batch and another not: give each step a tensor of its own"
                )
            _set_factor(leaf, factor)
            if factor == SHARED:
                found.append(leaf)
    if found:
        check_shared(found)


def share_leaves(leaves: Sequence[Tensor]) -> None:
    """Let the gradients of leaves of which all ranks hold the same be means over the ranks, in passes through steps.

    Tensors that are no parameters and differ are of this rank's rows, such as a copy whose gradient the call takes.
    """
    found = [leaf for leaf in leaves if leaf not in _factors]
    if any(not isinstance(leaf, nn.Parameter) for leaf in found):
        everyone = gather([digest(leaf.detach()) for leaf in found], what="the comparison of tensors made in a step")
        differ = [len(set(digests)) > 1 for digests in zip(*everyone, strict=True)]
        found = [leaf for leaf, d in zip(found, differ, strict=True) if isinstance(leaf, nn.Parameter) or not d]
    for leaf in found:
        _set_factor(leaf, SHARED)
    if found:
        check_shared(found)


def check_equal_gradients(parameters: Sequence[Tensor]) -> None:
    """Refuse gradients of whole parameters that differ between the ranks after a backward pass through a step."""
    everyone = gather(summaries_of(parameters), what="the comparison of gradients")
    for parameter, *found in zip(parameters, *everyone, strict=True):
        if are_alike(found):
            continue
        raise StrategyError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} differs between ranks: the loss uses it "
            "outside of the step, too, and there its gradient is that of this rank's rows alone: use it inside the "
            "network"
        )


def leave_step(result: Tensor, begin_backward: Callable[[], None]) -> None:
    """Let a result of a step that is no output of a `StepFunction` be one of a step for backward passes.

    Args:
        begin_backward: called when a gradient comes in at it.
    """
    assert result.grad_fn is not None
    metadata: Any = result.grad_fn.metadata
    metadata[_IS_RESULT] = True

    result.register_hook(lambda _: begin_backward())


def _note_pass(passes: set[int], number: int) -> bool:
    """Note a backward pass for as long as it runs; return whether it was not noted before."""
    if number in passes:
        return False
    passes.add(number)
    torch.autograd.Variable._execution_engine.queue_callback(partial(passes.discard, number))
    return True


def _leave(factor: float, gradient: Tensor) -> Tensor:
    """Turn what has arrived at a leaf into the gradient of the mean of the ranks' losses."""
    if torch._C._current_graph_task_id() not in _passes or torch.is_grad_enabled():
        return gradient  # with a graph of its own it goes on into this rank's loss
    return _mean(gradient) if factor == SHARED else gradient * factor


def _set_factor(leaf: Tensor, factor: float) -> None:
    _factors[leaf] = factor
    note_known([leaf])
    with plain_tensors():
        Tensor.register_hook(leaf, partial(_leave, factor))


def _mean(gradient: Tensor) -> Tensor:
    return mean_over_ranks(gradient.to_dense() if gradient.is_sparse else gradient)


def _is_cut_like(leaf: Tensor, tensor: Tensor) -> bool:
    """Return whether a leaf is this rank's part of the batch, as the input that it has reached is."""
    if leaf is tensor:
        return tensor.dim() > 0
    return not isinstance(leaf, nn.Parameter) and leaf.shape[:1] == tensor.shape[:1] != ()


def leaves_of(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves of autograd that tensors were made of, without those inside of steps and cut parameters."""
    yield from (tensor for tensor in tensors if tensor.grad_fn is None and tensor.requires_grad)
    todo: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if issubclass(getattr(node, "_forward_cls", object), StepFunction) or _IS_RESULT in node.metadata:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None and not isinstance(leaf, Part | DTensor):
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a value with another tensor for each one in it, whatever holds them: what is changed is copied.

    Modules and what has no attributes of its own are left as they are.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        found = {key: map_tensors(function, each) for key, each in value.items()}
        changed = {key: each for key, each in found.items() if each is not value[key]}
        if not changed:
            return value
        copied = copy.copy(value)
        for key, each in changed.items():
            copied[key] = each
        return copied
    if isinstance(value, list | tuple):
        items = [map_tensors(function, each) for each in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            listed = copy.copy(value)
            listed[:] = items
            return listed
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, nn.Module | type) or not hasattr(value, "__dict__") or inspect.isroutine(value):
        return value
    changed = {
        name: each
        for name, old in vars(value).items()
        if isinstance(old, Tensor | dict | list | tuple) and (each := map_tensors(function, old)) is not old
    }
    if changed:
        value = copy.copy(value)
        vars(value).update(changed)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, whatever holds them."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found
