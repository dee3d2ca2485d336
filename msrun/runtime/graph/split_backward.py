"""The backward pass of one segment in two parts: gradients of what it read first, gradients of its weights later.

Zero-bubble pipelines send the first part on at once and fill their pauses with the second. Where a weight joins the way
from an input to a result, the gradient that arrives there in the first part is kept; the second part goes on from it.
The search for those places and the second part are torch's (private: torch.distributed.pipelining._backward). Torch
does not provide for results that depend on no input, which are left whole for the second part, and for groups of
weights whose ways cross, as those of a module that is called twice; such a segment is done whole in the first part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import construct_reverse_graph, get_param_groups, stage_backward_weight


class DeferredWeights:
    """The second part of a segment's backward pass."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        self._groups: list[dict[str, Any]] = []
        """weights that join at the same places, with those places and the gradients there"""
        self._whole: list[tuple[Tensor, Tensor]] = []
        """(result, gradient) of results that no input leads to"""

    def run(self) -> None:
        """Add the weights' gradients to their `.grad`."""
        groups, self._groups = self._groups, []
        whole, self._whole = self._whole, []
        if groups:
            stage_backward_weight(iter(self._weights), groups)  # type: ignore[arg-type]  # any leaf will do
        if whole:
            torch.autograd.backward([result for result, _ in whole], [gradient for _, gradient in whole])


def start_backward(
    results: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> DeferredWeights:
    """Add the gradients of `inputs` to their `.grad` and return what is left to do for `weights`.

    Args:
        results: of one segment, each with its gradient.
        inputs: leaves that require a gradient.
        weights: leaves that require a gradient.
    """
    deferred = DeferredWeights(weights)
    input_nodes = [get_gradient_edge(leaf).node for leaf in inputs]
    split: list[tuple[Tensor, Tensor]] = []
    for pair in zip(results, gradients, strict=True):
        (split if _reaches(pair[0], input_nodes) else deferred._whole).append(pair)
    if not split:
        return deferred
    roots = [get_gradient_edge(result).node for result, _ in split]
    weight_nodes = [get_gradient_edge(leaf).node for leaf in weights]
    readers = construct_reverse_graph(roots)
    groups = get_param_groups(input_nodes, weight_nodes, readers)
    if _share_nodes(groups, readers):
        torch.autograd.backward([result for result, _ in split], [gradient for _, gradient in split])
        return deferred
    handles = [
        place.register_prehook(_keep(group, index)) for group in groups for index, place in enumerate(_as_list(group))
    ]
    try:
        found = torch.autograd.grad(
            [result for result, _ in split], inputs, [g for _, g in split], retain_graph=True, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    for leaf, gradient in zip(inputs, found, strict=True):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    deferred._groups = [group for group in groups if _drop_unreached(group)]
    return deferred


def _share_nodes(groups: Sequence[Mapping[str, Any]], readers: Mapping[Any, Sequence[Any]]) -> bool:
    """Return whether the ways from their places to their weights of two groups have a node in common."""
    seen: set[Any] = set()
    for group in groups:
        below = _closure(group["intermediates"], lambda node: [n for n, _ in node.next_functions if n is not None])
        own = below & _closure(group["params"], lambda node: readers.get(node, ()))
        if seen & own:
            return True
        seen |= own
    return False


def _closure(nodes: Iterable[Any], following: Callable[[Any], Iterable[Any]]) -> set[Any]:
    found = set(nodes)
    waiting = list(found)
    while waiting:
        more = set(following(waiting.pop())) - found
        found |= more
        waiting += more
    return found


def _as_list(group: dict[str, Any]) -> list[Any]:
    group["intermediates"] = list(group["intermediates"])
    group["grads"] = [None] * len(group["intermediates"])
    return list(group["intermediates"])


def _keep(group: dict[str, Any], index: int) -> Callable[[tuple[Tensor, ...]], None]:
    def hook(arrived: tuple[Tensor, ...]) -> None:
        group["grads"][index] = arrived

    return hook


def _drop_unreached(group: dict[str, Any]) -> bool:
    """Forget places at which no gradient arrived; return whether any is left."""
    pairs = zip(group["intermediates"], group["grads"], strict=True)
    reached = [(place, grads) for place, grads in pairs if grads is not None]
    group["intermediates"] = [place for place, _ in reached]
    group["grads"] = [grads for _, grads in reached]
    return bool(reached)


def _reaches(result: Tensor, targets: Sequence[Any]) -> bool:
    """Return True when a gradient of `result` reaches one of the nodes."""
    wanted = set(targets)
    seen: set[Any] = set()
    waiting: list[Any] = [get_gradient_edge(result).node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node in wanted:
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False
