"""Which rule belongs to which operator."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from msrun.runtime.sharding.operators import custom_function, ordering, table_lookup
from msrun.runtime.sharding.operators.along_split import LogSumExp, Softmax
from msrun.runtime.sharding.operators.attention import Attention
from msrun.runtime.sharding.operators.bags import EmbeddingBag
from msrun.runtime.sharding.operators.batch_norm import BatchNorm
from msrun.runtime.sharding.operators.conv import Convolution, TransposedConvolution
from msrun.runtime.sharding.operators.custom import Custom
from msrun.runtime.sharding.operators.dropout import KINDS, Dropout
from msrun.runtime.sharding.operators.einsum import Einsum
from msrun.runtime.sharding.operators.elementwise import Elementwise, is_elementwise
from msrun.runtime.sharding.operators.joining import Join, ScatterPart, Stack, TakeApart, Unbind
from msrun.runtime.sharding.operators.lookup import Embedding, Gather, Index, OneHot, Scatter, Select
from msrun.runtime.sharding.operators.loss import ClassLoss, ElementwiseLoss
from msrun.runtime.sharding.operators.matmul import AddBatchMatMul, AddMatMul, Linear, MatMul, Outer
from msrun.runtime.sharding.operators.norm import GroupNorm, InstanceNorm, LayerNorm, RmsNorm
from msrun.runtime.sharding.operators.ordering import AlongOne
from msrun.runtime.sharding.operators.pool import AdaptiveAverage, Pool, PoolWithIndices
from msrun.runtime.sharding.operators.random_draws import CAPTURED, RandomDraw
from msrun.runtime.sharding.operators.recurrent import Recurrent
from msrun.runtime.sharding.operators.reduction import Extreme, Mean, Reduction
from msrun.runtime.sharding.operators.resample import Interpolation, Nearest, Padding, PixelShuffle
from msrun.runtime.sharding.operators.rule import Form, OperatorCall, Rule
from msrun.runtime.sharding.operators.selection import (
    AnyPermute,
    LikeInType,
    Repeat,
    RepeatInterleave,
    SelectOne,
    Slice,
    SomeWhole,
    Triangle,
)
from msrun.runtime.sharding.operators.shape import Expand, Permute, Reshape, WholeDimension

aten = torch.ops.aten


class Replicated(Rule):
    """For operators without a rule of their own: every rank computes the whole. Correct, and reported in the plan."""

    def form(self, call: OperatorCall) -> Form:
        """Return no labels at all."""
        value = call.node.meta["val"]
        ndim = value.dim() if isinstance(value, torch.Tensor) else 0
        return Form(tuple((None,) * len(shape) for shape in call.shapes), (None,) * ndim, {})


@cache
def _table() -> dict[Any, Rule]:
    table: dict[Any, Rule] = {}
    rules: list[tuple[Rule, list[Any]]] = [
        (Linear(), [aten.linear.default]),
        (AddMatMul(), [aten.addmm.default]),
        (MatMul(), [aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default]),
        (AddBatchMatMul(), [aten.baddbmm.default]),
        (Outer(), [aten.outer.default, aten.ger.default]),
        (Einsum(), [aten.einsum.default]),
        (Embedding(), [aten.embedding.default]),
        (table_lookup.TableLookup(), [table_lookup.OPERATOR]),
        (EmbeddingBag(), [aten.embedding_bag.default, aten.embedding_bag.padding_idx]),
        (Gather(), [aten.gather.default]),
        (Scatter(), [aten.scatter.value, aten.scatter.src, aten.scatter_add.default]),
        (Select(), [aten.index_select.default]),
        (Index(), [aten.index.Tensor]),
        (OneHot(), [aten.one_hot.default]),
        (Attention(), [aten.scaled_dot_product_attention.default]),
        (Dropout(), list(KINDS)),
        (RandomDraw(), list(CAPTURED)),
        (VALUE_BY_VALUE, [aten.expand_as.default, aten.lift_fresh_copy.default]),
        (Join(), [aten.cat.default, aten.concat.default, aten.concatenate.default, aten.hstack.default]),
        (Stack(), [aten.stack.default]),
        (
            TakeApart(),
            [
                aten.split.Tensor,
                aten.split.sizes,
                aten.split_with_sizes.default,
                aten.chunk.default,
                aten.tensor_split.sections,
                aten.tensor_split.indices,
                aten.unsafe_split.Tensor,
                aten.unsafe_chunk.default,
                aten.glu.default,
            ],
        ),
        (Unbind(), [aten.unbind.int]),
        (Custom(), [custom_function.OPERATOR]),
        (ScatterPart(), [aten.slice_scatter.default, aten.select_scatter.default]),
        (SelectOne(), [aten.select.int]),
        (Slice(), [aten.slice.Tensor, aten.narrow.default]),
        (
            SomeWhole(),
            [
                aten.roll.default,
                aten.flip.default,
                aten.cumprod.default,
                aten.logcumsumexp.default,
                aten.diff.default,
            ],
        ),
        (Recurrent(), [aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input]),
        (Triangle(), [aten.tril.default, aten.triu.default]),
        (Repeat(), [aten.repeat.default, aten.tile.default]),
        (RepeatInterleave(), [aten.repeat_interleave.self_int]),
        (LikeInType(), [aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default]),
        (
            AnyPermute(),
            [
                aten.movedim.int,
                aten.movedim.intlist,
                aten.moveaxis.int,
                aten.moveaxis.intlist,
                aten.swapaxes.default,
                aten.swapdims.default,
                aten.mT.default,
                aten.adjoint.default,
            ],
        ),
        (AlongOne(keeps=True, default_dim=-1), ordering.targets(ordering.KEPT)),
        (AlongOne(keeps=False), ordering.targets(ordering.REMOVED)),
        (AlongOne(keeps=False), ordering.targets(ordering.MOMENTS)),
        (LogSumExp(), [aten.logsumexp.default]),
        (
            Reshape(),
            [
                aten.flatten.using_ints,
                aten.view.default,
                aten.reshape.default,
                aten._unsafe_view.default,
                aten.unflatten.int,
                aten.squeeze.default,
                aten.squeeze.dim,
                aten.squeeze.dims,
                aten.unsqueeze.default,
            ],
        ),
        (Expand(), [aten.expand.default]),
        (Permute(), [aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default]),
        (Softmax(is_log=False), [aten.softmax.int, aten._softmax.default]),
        (Softmax(is_log=True), [aten.log_softmax.int, aten._log_softmax.default]),
        (WholeDimension(), [aten.cumsum.default]),
        (Reduction(), [aten.sum.default, aten.sum.dim_IntList]),
        (Mean(), [aten.mean.default, aten.mean.dim]),
        (Extreme(), ordering.targets(ordering.REDUCED)),
        (
            ElementwiseLoss(),
            [
                aten.mse_loss.default,
                aten.l1_loss.default,
                aten.smooth_l1_loss.default,
                aten.huber_loss.default,
                aten.binary_cross_entropy.default,
                aten.binary_cross_entropy_with_logits.default,
            ],
        ),
        (VALUE_BY_VALUE, [aten.copy.default, aten.fill.Scalar, aten.fill.Tensor, aten.zero.default]),
        (LayerNorm(), [aten.layer_norm.default]),
        (RmsNorm(), [aten.rms_norm.default]),
        (GroupNorm(), [aten.group_norm.default]),
        (InstanceNorm(), [aten.instance_norm.default]),
        (BatchNorm(), [aten.batch_norm.default, aten._native_batch_norm_legit_functional.default]),
        (
            Convolution(),
            [
                aten.conv1d.default,
                aten.conv1d.padding,
                aten.conv2d.default,
                aten.conv2d.padding,
                aten.conv3d.default,
                aten.conv3d.padding,
            ],
        ),
        (
            TransposedConvolution(),
            [aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input],
        ),
        (Pool(1, fill=-math.inf), [aten.max_pool1d.default]),
        (Pool(2, fill=-math.inf), [aten.max_pool2d.default]),
        (Pool(3, fill=-math.inf), [aten.max_pool3d.default]),
        (Pool(1, fill=0.0), [aten.avg_pool1d.default]),
        (Pool(2, fill=0.0), [aten.avg_pool2d.default]),
        (Pool(3, fill=0.0), [aten.avg_pool3d.default]),
        (AdaptiveAverage(1), [aten.adaptive_avg_pool1d.default]),
        (AdaptiveAverage(2), [aten.adaptive_avg_pool2d.default]),
        (AdaptiveAverage(3), [aten.adaptive_avg_pool3d.default]),
        (PoolWithIndices(1), [aten.adaptive_max_pool1d.default, aten.max_pool1d_with_indices.default]),
        (PoolWithIndices(2), [aten.adaptive_max_pool2d.default, aten.max_pool2d_with_indices.default]),
        (PoolWithIndices(3), [aten.adaptive_max_pool3d.default, aten.max_pool3d_with_indices.default]),
        (Nearest(1), [aten.upsample_nearest1d.vec, aten._upsample_nearest_exact1d.vec]),
        (Nearest(2), [aten.upsample_nearest2d.vec, aten._upsample_nearest_exact2d.vec]),
        (Nearest(3), [aten.upsample_nearest3d.vec, aten._upsample_nearest_exact3d.vec]),
        (Interpolation(1), [aten.upsample_linear1d.vec]),
        (Interpolation(2), [aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec]),
        (Interpolation(3), [aten.upsample_trilinear3d.vec]),
        (Padding(), [aten.pad.default, aten.constant_pad_nd.default]),
        (PixelShuffle(2), [aten.pixel_shuffle.default]),
        (ClassLoss(), [aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default]),
    ]
    for rule, operators in rules:
        table.update(dict.fromkeys(operators, rule))
    return table


REPLICATED = Replicated()
VALUE_BY_VALUE = Elementwise()


def find_rule(target: Any) -> Rule | None:
    """Return the rule of an operator, or None when it has none."""
    found = _table().get(target)
    return VALUE_BY_VALUE if found is None and is_elementwise(target) else found
