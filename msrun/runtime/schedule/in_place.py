"""Collectives that may work in place: where nobody else holds the tensor that they move.

An all-reduce writes its sum to new memory, as others may still read what it was given. The partial sums of a matrix
product that only the all-reduce reads need not be kept: the message takes their memory, and an activation less is held
until the backward pass. The same holds on the way back for the gradient of what only matrix products read.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from msrun.runtime.sharding.collective import Collective

aten = torch.ops.aten
_PRODUCTS = frozenset({aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default})
"""Results and gradients of factors are new memory each, and autograd keeps factors only."""


def may_take_source(node: fx.Node, collective: Collective, kept: Set[fx.Node]) -> bool:
    """Return whether a collective may write to what it reads.

    Args:
        node: the collective.
        kept: values that somebody beside the graph's operators reads.
    """
    source = node.args[0]
    return (
        collective.kind == "all_reduce"
        and isinstance(source, fx.Node)
        and source.target in _PRODUCTS
        and list(source.users) == [node]
        and source not in kept
    )


def may_take_gradient(node: fx.Node, collective: Collective, kept: Set[fx.Node]) -> bool:
    """Return whether a collective's way back may write to the gradient of its result."""
    return (
        collective.kind == "enter"
        and bool(node.users)
        and all(user.target in _PRODUCTS and node in user.args[:2] for user in node.users)
        and node not in kept
    )
