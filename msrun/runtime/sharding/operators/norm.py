"""Rules for normalisation of single samples: layer, RMS and group norm; what batch norm shares with them.

Statistics over a dimension that is cut are those of the global tensor: every rank computes mean and variance of its
part, the parts are gathered in one message, and combined as Chan, Golub and LeVeque (1979) do, which loses no digits
when the mean is large beside the deviation. With equal parts: mean = mean of means, variance = mean of variances +
variance of means. The gradient of the statistics travels back through the same gather, as a reduce-scatter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes
from msrun.runtime.sharding.operators.rule import (
    Form,
    Labels,
    LabelSplit,
    Limit,
    LocalBuilder,
    OperatorCall,
    Rule,
    Rules,
    dimension_labels,
    sizes_of,
)

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def inputs_by_name(call: OperatorCall, inputs: Sequence[fx.Node]) -> dict[str, fx.Node]:
    """Return argument name -> local input, for the tensors that the call was given."""
    given = iter(inputs)
    names = [argument.name for argument in call.node.target._schema.arguments]  # type: ignore[union-attr]
    return {name: next(given) for name in names if isinstance(call.argument(name), fx.Node)}


def cut_axes(labels: Sequence[str], split: LabelSplit) -> Axes:
    """Return the axes that cut any of these labels."""
    return tuple(sorted(axis for label in labels for axis in split.get(label, ())))


def in_statistics_type(call: OperatorCall, build: LocalBuilder, x: fx.Node) -> fx.Node:
    """Return the input in the type in which torch's kernels add up: half types in float32."""
    if call.tensors[0].meta["val"].dtype in HALF:
        return build.call(aten._to_copy.default, x, dtype=torch.float32)
    return x


def in_output_type(call: OperatorCall, build: LocalBuilder, y: fx.Node) -> fx.Node:
    """Undo `in_statistics_type`."""
    dtype = call.tensors[0].meta["val"].dtype
    return build.call(aten._to_copy.default, y, dtype=dtype) if dtype in HALF else y


def global_moments(
    build: LocalBuilder, x: fx.Node, dims: Sequence[int], axes: Axes, *, keepdim: bool
) -> tuple[fx.Node, fx.Node]:
    """Return mean and variance (of the population) over `dims` of the parts of all ranks along `axes`."""
    both = build.call(aten.var_mean.correction, x, list(dims), correction=0, keepdim=keepdim)
    parts = build.call(aten.stack.default, [item(build, both, 1), item(build, both, 0)])
    gathered = build.collective(Collective("gather_enter", axes, 0), build.call(aten.unsqueeze.default, parts, 0))
    means, variances = (build.call(aten.select.int, gathered, 1, index) for index in (0, 1))
    of_means = build.call(aten.var_mean.correction, means, [0], correction=0)
    within = build.call(aten.mean.dim, variances, [0])
    return item(build, of_means, 1), build.call(aten.add.Tensor, within, item(build, of_means, 0))


def item(build: LocalBuilder, node: fx.Node, index: int) -> fx.Node:
    """Take one result of an operator with several."""
    return build.call(operator.getitem, node, index)


def standardise(build: LocalBuilder, x: fx.Node, mean: fx.Node, variance: fx.Node, eps: float) -> fx.Node:
    """Return (x - mean) / sqrt(variance + eps)."""
    scale = build.call(aten.rsqrt.default, build.call(aten.add.Scalar, variance, eps))
    return build.call(aten.mul.Tensor, build.call(aten.sub.Tensor, x, mean), scale)


def affine(build: LocalBuilder, x: fx.Node, weight: fx.Node | None, bias: fx.Node | None) -> fx.Node:
    """Return x * weight + bias; either may be missing."""
    x = build.call(aten.mul.Tensor, x, weight) if weight is not None else x
    return build.call(aten.add.Tensor, x, bias) if bias is not None else x


class LayerNorm(Rule):
    """layer_norm: weight and bias are cut like the normalised dimensions."""

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return labels b0, ... for the leading and n0, ... for the normalised dimensions."""
        shape = call.shapes[0]
        count = len(call.argument("normalized_shape"))
        normalised = dimension_labels("n", count)
        labels = (*dimension_labels("b", len(shape) - count), *normalised)
        return Form((labels, *(normalised,) * (len(call.tensors) - 1)), labels, sizes_of((labels, shape)))

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Cut normalised dimensions need the statistics of all their parts."""
        count = len(call.argument("normalized_shape"))
        axes = cut_axes([label for label in form.output[-count:] if label], split)
        if not axes:
            return self.local_call(call, build, inputs)
        named = inputs_by_name(call, inputs)
        x = in_statistics_type(call, build, named["input"])
        y = self.normalise(call, build, x, list(range(-count, 0)), axes)
        return in_output_type(call, build, affine(build, y, named.get("weight"), named.get("bias")))

    def normalise(self, call: OperatorCall, build: LocalBuilder, x: fx.Node, dims: list[int], axes: Axes) -> fx.Node:
        """Return the input without its weight and bias, from statistics over the ranks along `axes`."""
        mean, variance = global_moments(build, x, dims, axes, keepdim=True)
        return standardise(build, x, mean, variance, call.argument("eps"))


class RmsNorm(LayerNorm):
    """rms_norm: x / sqrt(mean of squares + eps) * weight."""

    def normalise(self, call: OperatorCall, build: LocalBuilder, x: fx.Node, dims: list[int], axes: Axes) -> fx.Node:
        """The mean of squares is a mean of equal parts' means: one all-reduce."""
        eps = call.argument("eps")
        if eps is None:  # torch's default
            dtype = call.tensors[0].meta["val"].dtype
            eps = torch.finfo(torch.float32 if dtype in HALF else dtype).eps
        mean = build.call(aten.mean.dim, build.call(aten.square.default, x), dims, keepdim=True)
        mean = build.sum_over(build.call(aten.div.Scalar, mean, build.mesh.extent(axes)), axes)
        mean = build.collective(Collective("enter", axes), mean)
        scale = build.call(aten.rsqrt.default, build.call(aten.add.Scalar, mean, eps))
        return build.call(aten.mul.Tensor, x, scale)


class GroupNorm(Rule):
    """group_norm: channels are cut between groups; a single group may be cut anywhere. Space may be cut."""

    follows = True

    def groups(self, call: OperatorCall) -> int:
        """Return the number of groups of channels."""
        return int(call.argument("num_groups"))

    def form(self, call: OperatorCall) -> Form:
        """Return labels b, c, s0, ...; parts of c must be whole groups."""
        shape, groups = call.shapes[0], self.groups(call)
        labels = ("b", "c", *dimension_labels("s", len(shape) - 2))
        limits = {}
        if 1 < groups < shape[1]:
            limits["c"] = Limit(lambda parts: groups % parts == 0, f"in {groups} groups, which must stay whole")
        inputs: list[Labels] = [labels, *(("c",),) * (len(call.tensors) - 1)]
        return Form(tuple(inputs), labels, sizes_of((labels, shape)), limits=limits)

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Groups that are cut need the statistics of all their parts; whole ones are normalised alone."""
        groups = self.groups(call)
        space = [label for label in form.output[2:] if label]
        axes = cut_axes(space if groups > 1 else ["c", *space], split)
        own_groups = max(1, groups // build.mesh.extent(split.get("c", ())))
        if not axes:
            return self.whole_groups(call, build, inputs, own_groups)
        named = inputs_by_name(call, inputs)
        shape = form.layout(form.output, split).local_shape(build.mesh, call.output_shape)
        x = in_statistics_type(call, build, named["input"])
        x = build.call(aten.reshape.default, x, [shape[0], own_groups, -1])
        mean, variance = global_moments(build, x, [2], axes, keepdim=True)
        y = standardise(build, x, mean, variance, call.argument("eps"))
        y = build.call(aten.reshape.default, y, list(shape))
        per_channel = [-1, *(1,) * len(space)]
        weight, bias = (
            build.call(aten.reshape.default, named[name], per_channel) if name in named else None
            for name in ("weight", "bias")
        )
        return in_output_type(call, build, affine(build, y, weight, bias))

    def whole_groups(
        self, call: OperatorCall, build: LocalBuilder, inputs: Sequence[fx.Node], own_groups: int
    ) -> fx.Node:
        """Add the same operator on this rank's groups."""
        named = inputs_by_name(call, inputs)
        affine = (named.get("weight"), named.get("bias"))
        return build.call(aten.group_norm.default, named["input"], own_groups, *affine, call.argument("eps"))


class InstanceNorm(GroupNorm):
    """instance_norm: every channel is a group; in evaluation with running statistics nothing is shared at all.

    A capture refuses training with running statistics: see `writes`.
    """

    def groups(self, call: OperatorCall) -> int:
        """Return the number of channels."""
        return call.shapes[0][1]

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Running statistics are cut like the channels and used as they are."""
        if call.argument("use_input_stats"):
            return super().lower(call, form, build, inputs, split)
        return self.local_call(call, build, inputs)


RULES: Rules = [
    (LayerNorm(), [aten.layer_norm.default]),
    (RmsNorm(), [aten.rms_norm.default]),
    (GroupNorm(), [aten.group_norm.default]),
    (InstanceNorm(), [aten.instance_norm.default]),
]


class BatchNorm(Rule):
    """batch_norm 1d, 2d and 3d. Training: statistics of the global batch. Running statistics are whole on every rank.

    Training with running statistics is `_native_batch_norm_legit_functional`: its results 3 and 4 are their new values.
    """

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return labels b, c, s0, ...; in training the running statistics have none."""
        shape = call.shapes[0]
        labels = ("b", "c", *dimension_labels("s", len(shape) - 2))
        updates = self._updates(call)
        inputs: list[Labels] = [labels]
        for name in ("weight", "bias", "running_mean", "running_var"):
            if isinstance(call.argument(name), fx.Node):
                inputs.append((None,) if updates and name.startswith("running") else ("c",))
        others: tuple[Labels, ...] = ((None,),) * 4 if updates else ()
        return Form(tuple(inputs), labels, sizes_of((labels, shape)), others=others)

    @staticmethod
    def _updates(call: OperatorCall) -> bool:
        return call.node.target is not aten.batch_norm.default

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Return the result, packed with the new running statistics."""
        axes = cut_axes([label for label in form.output if label and label != "c"], split)
        updates = self._updates(call)
        if not call.argument("training") or not (axes or (updates and split)):
            return self.local_call(call, build, inputs)
        named = inputs_by_name(call, inputs)
        if not axes:
            y, mean, variance = self._own_channels(call, form, build, named, split)
        else:
            y, mean, variance = self._global_batch(call, form, build, named, axes)
        if not updates:
            return y
        batch = build.call(aten.stack.default, [mean, variance])
        if split.get("c"):
            batch = build.collective(Collective("gather", split["c"], 1), batch)
        news = [
            self._mixed(call, build, named[name], build.call(aten.select.int, batch, 0, index))
            for index, name in enumerate(("running_mean", "running_var"))
        ]
        return build.pack({0: y, 3: news[0], 4: news[1]})

    @staticmethod
    def _own_channels(
        call: OperatorCall, form: Form, build: LocalBuilder, named: Mapping[str, fx.Node], split: LabelSplit
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Return the result and the moments of whole channels: what torch's operator gives with a momentum of 1."""
        count = form.sizes["c"] // build.mesh.extent(split["c"])
        nothing = build.call(aten.new_zeros.default, named["running_mean"], [count])
        given = (named["input"], named.get("weight"), named.get("bias"), nothing, nothing)
        whole = build.call(
            aten._native_batch_norm_legit_functional.default,
            *given,
            training=True,
            momentum=1.0,
            eps=call.argument("eps"),
        )
        return item(build, whole, 0), item(build, whole, 3), item(build, whole, 4)

    @staticmethod
    def _global_batch(
        call: OperatorCall, form: Form, build: LocalBuilder, named: Mapping[str, fx.Node], axes: Axes
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Return the result and the moments of the global batch, the variance unbiased.

        torch's operator takes fixed statistics and gives them no gradient. Weight and bias carry it instead: with
        m, r the mean and 1/sqrt(variance + eps) and m', r' the same numbers without gradient, weight * r / r' and
        bias - weight * r * (m - m') have the values of weight and bias, and the gradients that m and r must get.
        """
        dims = [dim for dim in range(len(form.output)) if dim != 1]
        x = in_statistics_type(call, build, named["input"])
        mean, variance = global_moments(build, x, dims, axes, keepdim=False)
        fixed_mean, fixed_variance = (build.call(aten.detach.default, value) for value in (mean, variance))
        scale = build.call(aten.rsqrt.default, build.call(aten.add.Scalar, variance, call.argument("eps")))
        weight = build.call(aten.div.Tensor, scale, build.call(aten.detach.default, scale))
        moved = build.call(aten.mul.Tensor, scale, build.call(aten.sub.Tensor, fixed_mean, mean))
        if "weight" in named:
            weight, moved = (build.call(aten.mul.Tensor, value, named["weight"]) for value in (weight, moved))
        bias = build.call(aten.add.Tensor, moved, named["bias"]) if "bias" in named else moved
        y = build.call(
            aten.batch_norm.default,
            *(named["input"], weight, bias, fixed_mean, fixed_variance),
            training=False,
            momentum=0.0,
            eps=call.argument("eps"),
            cudnn_enabled=False,
        )
        count = math.prod(call.output_shape[dim] for dim in dims)
        return y, fixed_mean, build.call(aten.mul.Scalar, fixed_variance, count / max(1, count - 1))

    @staticmethod
    def _mixed(call: OperatorCall, build: LocalBuilder, old: fx.Node, batch: fx.Node) -> fx.Node:
        """Return momentum * batch + (1 - momentum) * old, in one operator: see `plan_buffers`."""
        dtype = call.argument("running_mean").meta["val"].dtype
        batch = build.call(aten._to_copy.default, batch, dtype=dtype) if dtype in HALF else batch
        return build.call(aten.lerp.Scalar, old, batch, call.argument("momentum"))


RULES += [(BatchNorm(), [aten.batch_norm.default, aten._native_batch_norm_legit_functional.default])]
