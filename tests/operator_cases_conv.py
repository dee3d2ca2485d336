"""Calls of the operators of convolutional networks with the strategies that are legal for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812
from operator_cases import OperatorCase
from torch import Tensor

Call = Callable[..., Tensor]


def _layer_norm(*shape: int) -> Call:
    return lambda x, *affine: F.layer_norm(x, shape, *affine)


def _group_norm(groups: int) -> Call:
    return lambda x, *affine: F.group_norm(x, groups, *affine, eps=1e-3)


def _batch_norm(x: Tensor, *affine: Tensor) -> Tensor:
    """Training without running statistics; large means beside small deviations must lose no digits."""
    return F.batch_norm(x + 30, None, None, *affine, training=True)


def _batch_norm_eval(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, w, b, eps=1e-2)


NORM = [
    OperatorCase("layer-norm", _layer_norm(8), ((4, 8), (8,), (8,)), "bn,n,n", parameters=(1, 2), on_eight=True),
    OperatorCase("layer-norm-2d", _layer_norm(4, 4), ((4, 4, 4), (4, 4)), "bmn,mn", parameters=(1,)),
    OperatorCase("rms-norm", lambda x, w: F.rms_norm(x, (8,), w), ((2, 4, 8), (8,)), "abn,n", parameters=(1,)),
    OperatorCase("group-norm", _group_norm(4), ((2, 8, 4), (8,), (8,)), "bgs,g,g", parameters=(1, 2)),
    OperatorCase("group-norm-of-one", _group_norm(1), ((2, 4, 4), (4,), (4,)), "bcs,c,c", parameters=(1, 2)),
    OperatorCase("batch-norm-1d", _batch_norm, ((8, 4), (4,), (4,)), "bc,c,c", parameters=(1, 2)),
    OperatorCase("batch-norm-2d", _batch_norm, ((4, 2, 4, 2), (2,), (2,)), "bchw,c,c", parameters=(1, 2)),
    OperatorCase(
        "batch-norm-eval", _batch_norm_eval, ((4, 4, 4), (4,), (4,), (4,), (4,)), "bcs,c,c,c,c", "", (1, 2), "fffww"
    ),
]

BINARY = [*NORM]
"""Operators that take a strategy."""

UNARY: list[Any] = [
    OperatorCase("layer-norm-without-weight", _layer_norm(8), ((4, 8),), "bn"),
    OperatorCase("rms-norm-eps", lambda x: F.rms_norm(x, (4, 4), eps=0.1), ((2, 4, 4),), "bmn"),
    OperatorCase("batch-norm-without-weight", _batch_norm, ((4, 2, 4),), "bcs"),
]
"""Operators that keep their input's cut: every layout of the input is tried."""
