"""Rules for losses. The result is the loss of the global batch, the same number on every rank.

Reduction codes are ATen's: 0 none, 1 mean, 2 sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes
from msrun.runtime.sharding.operators.along_split import shifted, sum_of_exponentials
from msrun.runtime.sharding.operators.elementwise import Elementwise
from msrun.runtime.sharding.operators.rows import own_rows
from msrun.runtime.sharding.operators.rule import (
    Form,
    LabelSplit,
    LocalBuilder,
    OperatorCall,
    Rule,
    Rules,
    aligned,
    dimension_labels,
    set_argument,
    sizes_of,
    summed_axes,
)

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
CLASSES = "c"


def lower_class_parallel(
    call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
) -> fx.Node:
    """Return the loss of scores whose classes are cut; labels and arguments are those of `ClassLoss`."""
    axes = split[CLASSES]
    dim = form.inputs[0].index(CLASSES)
    scores = inputs[0]
    if call.node.target is aten.cross_entropy_loss.default:
        scores, _ = shifted(scores, [dim], axes, build)
        total = build.collective(Collective("enter", axes), sum_of_exponentials(scores, [dim], axes, build))
        scores = build.call(aten.sub.Tensor, scores, build.call(aten.log.default, total))
    reduction = call.argument("reduction")
    weight = inputs[2] if len(inputs) > 2 else None
    smoothing = call.argument("label_smoothing", 0.0)
    where = {"dim": dim, "smoothing": smoothing, "classes": form.sizes[CLASSES]}
    if call.tensors[1].meta["val"].is_floating_point():
        losses = build.call(losses_of_probabilities, scores, inputs[1], weight, **where)
        if reduction == NONE:
            return build.sum_over(losses, axes)
        total = build.call(aten.sum.default, losses)
        total = build.call(aten.div.Scalar, total, _samples(form)) if reduction == MEAN else total
        return build.sum_over(total, summed_axes(form, split))
    given = (inputs[1], weight, build.place())
    cut = {"mesh_shape": build.mesh.shape, "axes": axes, "ignored": call.argument("ignore_index")}
    losses = build.call(losses_of_classes, scores, *given, **cut, **where)
    if reduction == NONE:
        return build.sum_over(losses, axes)
    total = build.call(aten.sum.default, losses)
    if reduction == MEAN:
        weights = build.call(weights_of_classes, *given, **cut, classes=form.sizes[CLASSES])
        count = build.call(aten.to.dtype, build.call(aten.sum.default, weights), call.node.meta["val"].dtype)
        total = build.call(aten.div.Tensor, total, build.sum_over(count, summed_axes(form, split)))
    return build.sum_over(total, summed_axes(form, split))


def weights_of_classes(
    target: Tensor,
    weight: Tensor | None,
    place: Tensor,
    *,
    mesh_shape: tuple[int, ...],
    axes: Axes,
    ignored: int,
    classes: int,
) -> Tensor:
    """Return the weight of every target that is one of this rank's classes, 0 for the others: what a mean divides by.

    Shapes: target (b, ..), weight (classes of this rank) -> (b, ..).
    """
    own, mine = _own_targets(target, place, mesh_shape, axes, ignored, classes)
    return mine if weight is None else weight[own] * mine


def _own_targets(
    target: Tensor, place: Tensor, mesh_shape: tuple[int, ...], axes: Axes, ignored: int, classes: int
) -> tuple[Tensor, Tensor]:
    """Return for every target its number among this rank's classes, and whether it is one of them and counts."""
    counts = target != ignored
    length = classes // math.prod(mesh_shape[axis] for axis in axes)
    own, is_elsewhere = own_rows(target.masked_fill(~counts, 0), place, mesh_shape, axes, length, classes)
    return own, counts & ~is_elsewhere


def losses_of_classes(
    logarithms: Tensor,
    target: Tensor,
    weight: Tensor | None,
    place: Tensor,
    *,
    mesh_shape: tuple[int, ...],
    axes: Axes,
    ignored: int,
    dim: int,
    smoothing: float,
    classes: int,
) -> Tensor:
    """Return what this rank's classes add to the losses.

    Shapes: logarithms (b, classes of this rank, ..), target (b, ..), weight (classes of this rank) -> (b, ..).
    """
    own, mine = _own_targets(target, place, mesh_shape, axes, ignored, classes)
    weights = mine.to(logarithms.dtype) if weight is None else weight[own] * mine
    losses = -logarithms.gather(dim, own.unsqueeze(dim)).squeeze(dim) * weights
    if smoothing:
        shape = [-1 if i == dim else 1 for i in range(logarithms.dim())]
        each = logarithms if weight is None else logarithms * weight.reshape(shape)
        losses = (1 - smoothing) * losses - smoothing / classes * each.sum(dim) * (target != ignored)
    return losses


def losses_of_probabilities(
    logarithms: Tensor, target: Tensor, weight: Tensor | None, *, dim: int, smoothing: float, classes: int
) -> Tensor:
    """Return what this rank's classes add to the losses: (b, classes of this rank, ..) -> (b, ..)."""
    wanted = target * (1 - smoothing) + smoothing / classes
    if weight is not None:
        wanted = wanted * weight.reshape([-1 if i == dim else 1 for i in range(logarithms.dim())])
    return -(logarithms * wanted).sum(dim)


class ElementwiseLoss(Elementwise):
    """mse, l1, smooth l1, huber, binary cross-entropy: value by value, then none, mean or sum."""

    def form(self, call: OperatorCall) -> Form:
        """Return elementwise labels; the output of mean and sum has none."""
        if call.argument("reduction") == NONE:
            return super().form(call)
        shape = tuple(torch.broadcast_shapes(*call.shapes))
        labels = dimension_labels("d", len(shape))
        inputs = tuple(aligned(labels, shape, given) for given in call.shapes)
        return Form(inputs, (), sizes_of((labels, shape)))

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Scale a local mean by the number of parts, then all-reduce."""
        axes = summed_axes(form, split)
        local = self.local_call(call, build, inputs)
        if axes and call.argument("reduction") == MEAN:
            local = build.call(aten.div.Scalar, local, build.mesh.extent(axes))
        return build.sum_over(local, axes)


class ClassLoss(Rule):
    """cross_entropy_loss and nll_loss: every dimension may be split, classes too (see `class_parallel`).

    The mean is over the targets that are not ignored, weighted by class. Their number needs the targets alone, so it is
    all-reduced while the network computes; every rank divides its own sum by it before the sums are added up, and the
    backward pass waits for nothing. Targets may also be probabilities: then the mean is over samples.
    """

    follows = True

    def form(self, call: OperatorCall) -> Form:
        """Return labels: b, c, then the rest; a 1-D input is a single sample."""
        shapes = call.shapes
        rest = dimension_labels("s", max(0, len(shapes[0]) - 2))
        scores = ("b", "c", *rest) if len(shapes[0]) > 1 else ("c",)
        samples = ("b", *rest) if len(shapes[0]) > 1 else ()
        target = scores if self._has_probabilities(call) else samples
        inputs = [scores, target] + ([("c",)] if len(shapes) > 2 else [])
        output = samples if call.argument("reduction") == NONE else ()
        return Form(tuple(inputs), output, sizes_of(*zip(inputs, shapes, strict=True)))

    @staticmethod
    def _has_probabilities(call: OperatorCall) -> bool:
        return bool(call.tensors[1].meta["val"].is_floating_point())

    def lower(
        self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node], split: LabelSplit
    ) -> fx.Node:
        """Return the mean of the global batch from local sums and counts."""
        if split.get(CLASSES):
            return lower_class_parallel(call, form, build, inputs, split)
        axes = summed_axes(form, split)
        if not axes or call.argument("reduction") != MEAN:
            return build.sum_over(self.local_call(call, build, inputs), axes)
        total = self.local_call(call, build, inputs)
        set_argument(total, "reduction", SUM)
        if self._has_probabilities(call):
            return build.sum_over(build.call(aten.div.Scalar, total, _samples(form)), axes)
        count = self._local_count(call, form, build, inputs)
        count = build.sum_over(build.call(aten.to.dtype, count, call.node.meta["val"].dtype), axes)
        return build.sum_over(build.call(aten.div.Tensor, total, count), axes)

    def _local_count(self, call: OperatorCall, form: Form, build: LocalBuilder, inputs: Sequence[fx.Node]) -> fx.Node:
        """Add the number of targets that count, each with the weight of its class."""
        target = inputs[1]
        counts = build.call(aten.ne.Scalar, target, call.argument("ignore_index"))
        if len(inputs) > 2:
            # an ignored target may be no class at all
            classes = build.call(aten.clamp.default, target, 0, form.sizes["c"] - 1)
            flat = build.call(aten.reshape.default, classes, [-1])
            weights = build.call(aten.index_select.default, inputs[2], 0, flat)
            counts = build.call(aten.reshape.default, counts, [-1])
            counts = build.call(aten.mul.Tensor, weights, counts)
        return build.call(aten.sum.default, counts)


def _samples(form: Form) -> int:
    """Return how many losses a mean is over."""
    return math.prod(size for label, size in form.sizes.items() if label != CLASSES)


RULES: Rules = [
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
    (ClassLoss(), [aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default]),
]
