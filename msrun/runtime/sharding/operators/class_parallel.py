"""Cross-entropy over classes that are cut over ranks, as the output layer of a large vocabulary leaves them.

No rank ever holds a whole row of scores: per row the largest score of every part is gathered and the sum of
exponentials all-reduced, then each rank adds what its own classes contribute (Megatron-LM's vocabulary-parallel
loss). MindSpore's SoftmaxCrossEntropyWithLogits refuses cut classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from msrun.runtime.sharding.collective import Collective
from msrun.runtime.sharding.layout import Axes
from msrun.runtime.sharding.operators.along_split import shifted, sum_of_exponentials
from msrun.runtime.sharding.operators.rows import own_rows
from msrun.runtime.sharding.operators.rule import Form, LabelSplit, LocalBuilder, OperatorCall, summed_axes

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
    reduction = call.argument("reduction", MEAN)
    weight = inputs[2] if len(inputs) > 2 else None
    smoothing = call.argument("label_smoothing", default=0.0) or 0.0
    where = {"dim": dim, "smoothing": smoothing, "classes": form.sizes[CLASSES]}
    if call.tensors[1].meta["val"].is_floating_point():
        losses = build.call(losses_of_probabilities, scores, inputs[1], weight, **where)
        if reduction == NONE:
            return build.sum_over(losses, axes)
        total = build.call(aten.sum.default, losses)
        samples = 1
        for label in form.inputs[0]:
            samples *= 1 if label in (CLASSES, None) else form.sizes[str(label)]
        total = build.call(aten.div.Scalar, total, samples) if reduction == MEAN else total
        return build.sum_over(total, summed_axes(form, split))
    given = (inputs[1], weight, build.place())
    cut = {"mesh_shape": build.mesh.shape, "axes": axes, "ignored": call.argument("ignore_index", -100)}
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
