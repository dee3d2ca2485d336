"""Rule for batch norm: in training the statistics are those of the global batch, forward and backward.

What torch's SyncBatchNorm does with one all-gather and a kernel of its own is one gather here and torch's plain
operator, so it runs on every device and is exact in every type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes
from msrun.runtime.sharding.operators.norm import (
    HALF,
    cut_axes,
    global_moments,
    in_statistics_type,
    inputs_by_name,
    item,
)
from msrun.runtime.sharding.operators.rule import (
    Form,
    Labels,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    dimension_labels,
    sizes_of,
)

aten = torch.ops.aten


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
        count = 1
        for dim in dims:
            count *= call.output_shape[dim]
        return y, fixed_mean, build.call(aten.mul.Scalar, fixed_variance, count / max(1, count - 1))

    @staticmethod
    def _mixed(call: OperatorCall, build: LocalBuilder, old: fx.Node, batch: fx.Node) -> fx.Node:
        """Return momentum * batch + (1 - momentum) * old, in one operator: see `plan_buffers`."""
        dtype = call.argument("running_mean").meta["val"].dtype
        batch = build.call(aten._to_copy.default, batch, dtype=dtype) if dtype in HALF else batch
        return build.call(aten.lerp.Scalar, old, batch, call.argument("momentum"))


RULES = [(BatchNorm(), [aten.batch_norm.default, aten._native_batch_norm_legit_functional.default])]
