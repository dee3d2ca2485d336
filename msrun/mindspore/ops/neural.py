"""Operators of networks: products, normalisation, windows over images, losses, random numbers. The table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msrun.errors import UsageError
from msrun.mindspore.ops.shapes import dims
from msrun.mindspore.ops.table import define
from msrun.mindspore.windows import convolve, pool_average, pool_largest, sizes_of


def _matmul(input: Tensor, mat2: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    a = input.transpose(-1, -2) if transpose_a else input
    if transpose_b:
        return F.linear(a, mat2) if mat2.dim() == 2 else torch.matmul(a, mat2.transpose(-1, -2))
    return torch.matmul(a, mat2)


def _bias_add(input_x: Tensor, bias: Tensor, data_format: str = "NCHW") -> Tensor:
    if data_format == "NHWC":
        return input_x + bias
    return input_x + bias.reshape(-1, *[1] * (input_x.dim() - 2))


def as_classes(target: Tensor) -> Tensor:
    """Return class numbers as torch's losses take them; probabilities as they are."""
    return target if target.is_floating_point() or target.dtype == torch.int64 else target.long()


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    return F.cross_entropy(
        input,
        as_classes(target),
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _nll_loss(
    inputs: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    return F.nll_loss(inputs, as_classes(target), weight, ignore_index=ignore_index, reduction=reduction)


def _weighted_nll(
    logits: Tensor, labels: Tensor, weight: Tensor, reduction: str = "mean", ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the sum of the weights of the labels."""
    used = labels[labels != ignore_index].long()
    return _nll_loss(logits, labels, weight, ignore_index, reduction), weight[used].sum()


def _softmax_loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits, labels, reduction="none"), (logits.softmax(-1) - labels).detach()


def _sparse_softmax_loss(logits: Tensor, labels: Tensor, is_grad: bool = False) -> Tensor:
    if is_grad:
        return (logits.softmax(-1) - F.one_hot(labels.long(), logits.shape[-1])) / len(labels)
    return F.cross_entropy(logits, labels.long())


def _layer_norm(
    input_x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    begin_norm_axis: int = 1,
    begin_params_axis: int = 1,
    epsilon: float = 1e-7,
) -> tuple[Tensor, Tensor, Tensor]:
    axes = tuple(range(begin_norm_axis % input_x.dim(), input_x.dim()))
    mean, variance = input_x.mean(axes, True), input_x.var(axes, correction=0, keepdim=True)
    shape = input_x.shape[begin_params_axis % input_x.dim() :]
    return (
        (input_x - mean) * torch.rsqrt(variance + epsilon) * gamma.reshape(shape) + beta.reshape(shape),
        mean,
        variance,
    )


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    factor = torch.rsqrt((x * x).mean(-1, True) + epsilon)
    return x * factor * gamma, factor


def _batch_norm(
    input_x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    is_training: bool = False,
    epsilon: float = 1e-5,
    momentum: float = 0.1,
    data_format: str = "NCHW",
) -> tuple[Tensor, ...]:
    images = input_x.movedim(-1, 1) if data_format == "NHWC" else input_x
    result = F.batch_norm(images, mean, variance, scale, bias, is_training, momentum, epsilon)
    return (result.movedim(1, -1) if data_format == "NHWC" else result), mean, variance, mean, variance


def _conv2d(
    x: Tensor,
    weight: Tensor,
    out_channel: int = 0,
    kernel_size: Any = None,
    mode: int = 1,
    pad_mode: str = "valid",
    pad: Any = 0,
    stride: Any = 1,
    dilation: Any = 1,
    group: int = 1,
    data_format: str = "NCHW",
) -> Tensor:
    del out_channel, kernel_size, mode
    if data_format not in ("NCHW", "NCDHW"):
        raise UsageError(f"data_format={data_format!r}: NCHW; transpose the images with (0, 3, 1, 2)")
    return convolve(x, weight, None, stride, pad_mode, pad, dilation, group)


def _resize(mode: str) -> Any:
    def run(image: Tensor, size: Any, align_corners: bool = False, half_pixel_centers: bool = False) -> Tensor:
        """Resize (n, c, h, w); without align_corners and half_pixel_centers corners are where MindSpore has them."""
        sizes = sizes_of(size, 2)
        if mode == "nearest":
            return F.interpolate(image, sizes, mode="nearest")
        if align_corners or half_pixel_centers:
            return F.interpolate(image, sizes, mode=mode, align_corners=align_corners or None)
        return _bilinear_from_the_corner(image, sizes)

    return run


def _bilinear_from_the_corner(image: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Bilinear in both directions, where point i of the result lies at i * (old size / new size)."""
    for dim, size in zip((2, 3), sizes, strict=True):
        old = image.shape[dim]
        place = torch.arange(size, dtype=torch.float32, device=image.device) * (old / size)
        low = place.floor().long().clamp(max=old - 1)
        high = (low + 1).clamp(max=old - 1)
        share = (place - low).to(image.dtype).reshape([-1 if d == dim else 1 for d in range(image.dim())])
        image = image.index_select(dim, low) * (1 - share) + image.index_select(dim, high) * share
    return image


def _dropout(x: Tensor, keep_prob: float = 0.5, Seed0: int = 0, Seed1: int = 0) -> tuple[Tensor, Tensor]:
    del Seed0, Seed1
    mask = (torch.rand_like(x, dtype=torch.float32) < keep_prob).to(x.dtype)
    return x * mask / keep_prob, mask


def _uniform(shape: Any, minval: Any, maxval: Any, seed: Any = None, dtype: torch.dtype = torch.float32) -> Tensor:
    del seed
    if not dtype.is_floating_point:
        return torch.randint(int(minval), int(maxval), dims(shape), dtype=dtype)
    return torch.rand(dims(shape), dtype=dtype) * (maxval - minval) + minval


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    lengths = (torch.as_tensor(input_lengths).long(), torch.as_tensor(target_lengths).long())
    return F.ctc_loss(log_probs, targets.long(), *lengths, blank, reduction, zero_infinity)


def _huber(input: Tensor, target: Tensor, beta: float = 1.0, reduction: str = "none") -> Tensor:
    return F.smooth_l1_loss(input, target, beta=beta, reduction=reduction)


def _l2_normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    return F.normalize(input, p, dim, eps)


def _pool(pool: Any) -> Any:
    return lambda x, kernel_size=1, strides=1, pad_mode="valid", data_format="NCHW": pool(
        x, kernel_size, strides, pad_mode
    )


def _binary(weighted: Any) -> Any:
    def run(logits: Tensor, labels: Tensor, weight: Tensor | None = None, reduction: str = "mean") -> Tensor:
        return weighted(logits, labels.to(logits.dtype), weight, reduction=reduction)

    return run


def _max_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    return_indices: bool = False,
    ceil_mode: bool = False,
) -> Any:
    pool: Any = F.max_pool2d
    return pool(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def _avg_pool2d(
    input_x: Tensor,
    kernel_size: Any = 1,
    stride: Any = 1,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int = 0,
) -> Tensor:
    return F.avg_pool2d(input_x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override or None)


def _scores(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def _random_ints(low: int, high: int, size: Any, seed: Any = None, *, dtype: torch.dtype | None = None) -> Tensor:
    del seed
    return torch.randint(low, high, dims(size), dtype=dtype or torch.int64)


def _normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, seed: Any = None) -> Tensor:
    del seed
    return torch.randn(dims(shape)) * stddev + mean


def _einsum(equation: str, *operands: Any) -> Tensor:
    return torch.einsum(equation, *operands)


def _sizes(size: Sequence[Any]) -> tuple[int, ...]:
    return dims(size[0]) if len(size) == 1 and not isinstance(size[0], int) else dims(size)


def _overlaps(anchor_boxes: Tensor, gt_boxes: Tensor, mode: str = "iou") -> Tensor:
    """Return (gt boxes, anchors): what two boxes (x0, y0, x1, y1) share of both, or with "iof" of the gt box."""
    a, b = anchor_boxes[None], gt_boxes[:, None]
    sides = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2]) + 1).clamp(min=0)
    area_a, area_b = ((one[..., 2:] - one[..., :2] + 1).prod(-1) for one in (a, b))
    common = sides.prod(-1)
    whole = area_b + 0 * area_a if mode == "iof" else area_a + area_b - common
    return common / whole


def _center_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    return (boxes[..., :2] + boxes[..., 2:]) * 0.5, boxes[..., 2:] - boxes[..., :2] + 1


def _encode_boxes(
    anchor_box: Tensor,
    groundtruth_box: Tensor,
    means: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
    stds: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
) -> Tensor:
    """Return how boxes lie to their anchors: shifts in sizes of the anchor, and logarithms of the sizes' ratios."""
    (center, size), (other, other_size) = map(_center_and_size, (anchor_box, groundtruth_box))
    deltas = torch.cat(((other - center) / size, torch.log(other_size / size)), -1)
    return (deltas - deltas.new_tensor(means)) / deltas.new_tensor(stds)


def _decode_boxes(
    anchor_box: Tensor,
    deltas: Tensor,
    max_shape: Sequence[int],
    means: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
    stds: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
    wh_ratio_clip: float = 0.016,
) -> Tensor:
    """Return the boxes, inside an image of `max_shape` (height, width), whose encoding is `deltas`."""
    center, size = _center_and_size(anchor_box)
    deltas = deltas * deltas.new_tensor(stds) + deltas.new_tensor(means)
    limit = abs(math.log(wh_ratio_clip))
    middle, half = center + size * deltas[..., :2], size * deltas[..., 2:].clamp(-limit, limit).exp() * 0.5
    sides = deltas.new_tensor([max_shape[1] - 1, max_shape[0] - 1])
    return torch.cat([torch.minimum(one.clamp(min=0), sides) for one in (middle - half + 0.5, middle + half - 0.5)], -1)


def _check_boxes(bboxes: Tensor, img_metas: Tensor) -> Tensor:
    """Tell which boxes lie inside an image of (height, width, ratio)."""
    height, width = img_metas[0] * img_metas[2] - 1, img_metas[1] * img_metas[2] - 1
    return (bboxes[:, :2] >= 0).all(1) & (bboxes[:, 2] <= width) & (bboxes[:, 3] <= height)


def _suppress(bboxes: Tensor, iou_threshold: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes (x0, y0, x1, y1, score) by falling score, numbered, and which of them no better one covers."""
    order = bboxes[:, 4].argsort(descending=True, stable=True)
    boxes = bboxes[order]
    sides = boxes[:, 2:4] - boxes[:, :2]
    low, high = (
        choose(boxes[:, None, part], boxes[None, :, part])
        for choose, part in ((torch.maximum, slice(0, 2)), (torch.minimum, slice(2, 4)))
    )
    common, areas = (high - low).clamp(min=0).prod(-1), sides.prod(-1)
    covers = common / (areas[:, None] + areas - common) > iou_threshold
    kept = torch.ones(len(boxes), dtype=torch.bool)
    for place in range(len(boxes)):
        if kept[place]:
            kept[place + 1 :] &= ~covers[place, place + 1 :]
    return boxes, torch.arange(len(boxes), dtype=torch.int32), kept


OPERATORS: dict[str, Any] = {}
for _row in (
    ("MatMul BatchMatMul", _matmul, "transpose_a transpose_b"),
    ("matmul", torch.matmul),
    ("mm", torch.mm),
    ("bmm batch_matmul", torch.matmul),
    ("mv", torch.mv),
    ("dot", lambda input, other: torch.tensordot(input, other, ([-1], [-2])) if other.dim() > 1 else input @ other),
    ("inner", torch.inner),
    ("outer ger Ger", torch.outer),
    ("kron", torch.kron),
    ("addmm", lambda input, mat1, mat2, *, beta=1, alpha=1: torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)),
    ("baddbmm", lambda input, batch1, batch2, beta=1, alpha=1: torch.baddbmm(
        input, batch1, batch2, beta=beta, alpha=alpha)),
    ("tensor_dot tensordot", lambda x1, x2, axes: torch.tensordot(x1, x2, axes)),
    ("einsum", _einsum),
    ("Cross cross", lambda input, other, dim=None: torch.cross(
        input, other, -1 if dim in (None, -65530) else dim), "dim"),
    ("Dense dense", lambda input, weight, bias=None: F.linear(input, weight, bias)),
    ("BiasAdd bias_add", _bias_add, "data_format"),
    ("MatrixInverse inverse", lambda input, adjoint=False: torch.linalg.inv(input), "adjoint"),
    ("MatrixDeterminant det", torch.linalg.det),
    ("Cholesky cholesky", lambda input_x, upper=False: torch.linalg.cholesky(input_x, upper=upper), "upper"),
    ("cdist Cdist", lambda x1, x2, p=2.0: torch.cdist(x1, x2, p), "p"),
    ("cosine_similarity", lambda x1, x2, dim=1, eps=1e-8: F.cosine_similarity(x1, x2, dim, eps)),
    ("normalize", _l2_normalize),
    # -- softmax and norms -----------------------------------------------------------------------------------------
    ("Softmax", lambda input, axis=-1: F.softmax(input, axis), "axis"),
    ("softmax", lambda input, axis=-1, *, dtype=None: F.softmax(input, axis, dtype=dtype)),
    ("LogSoftmax log_softmax", lambda logits, axis=-1: F.log_softmax(logits, axis), "axis"),
    ("softmin", lambda x, axis=-1, *, dtype=None: F.softmin(x, axis, dtype=dtype)),
    ("LayerNorm", _layer_norm, "begin_norm_axis begin_params_axis epsilon"),
    ("layer_norm", lambda input, normalized_shape, weight=None, bias=None, eps=1e-5: F.layer_norm(
        input, normalized_shape, weight, bias, eps)),
    ("group_norm", lambda input, num_groups, weight=None, bias=None, eps=1e-5: F.group_norm(
        input, num_groups, weight, bias, eps)),
    ("RmsNorm rms_norm", _rms_norm, "epsilon"),
    ("BatchNorm", _batch_norm, "is_training epsilon momentum data_format"),
    ("batch_norm", lambda input_x, running_mean, running_var, weight, bias, training=False, momentum=0.1, eps=1e-5:
        F.batch_norm(input_x, running_mean, running_var, weight, bias, training, momentum, eps)),
    # -- images ----------------------------------------------------------------------------------------------------
    ("Conv2D Conv3D", _conv2d, "out_channel kernel_size mode pad_mode pad stride dilation group data_format"),
    ("conv1d conv2d conv3d", convolve),
    ("MaxPool MaxPool3D", _pool(pool_largest), "kernel_size strides pad_mode data_format"),
    ("AvgPool AvgPool3D", _pool(pool_average), "kernel_size strides pad_mode data_format"),
    ("max_pool2d", _max_pool2d),
    ("avg_pool2d", _avg_pool2d),
    ("AdaptiveAvgPool2D adaptive_avg_pool2d", lambda input, output_size: F.adaptive_avg_pool2d(input, output_size),
     "output_size"),
    ("adaptive_avg_pool1d", lambda input, output_size: F.adaptive_avg_pool1d(input, output_size)),
    ("adaptive_avg_pool3d", lambda input, output_size: F.adaptive_avg_pool3d(input, output_size)),
    ("AdaptiveMaxPool2D", lambda input, output_size: F.adaptive_max_pool2d(input, output_size), "output_size"),
    ("adaptive_max_pool2d", lambda input, output_size, return_indices=False: F.adaptive_max_pool2d(
        input, output_size, return_indices)),
    ("ResizeBilinear", lambda image, size, align_corners=False, half_pixel_centers=False: _resize("bilinear")(
        image, size, align_corners, half_pixel_centers), "size align_corners half_pixel_centers"),
    ("ResizeBilinearV2", _resize("bilinear"), "align_corners half_pixel_centers"),
    ("ResizeNearestNeighbor", lambda input_x, size, align_corners=False, half_pixel_centers=False: _resize("nearest")(
        input_x, size), "size align_corners half_pixel_centers"),
    ("interpolate upsample", lambda input, size=None, scale_factor=None, mode="nearest", align_corners=None,
        recompute_scale_factor=None: F.interpolate(input, size, scale_factor, mode, align_corners)),
    ("grid_sample GridSampler2D", lambda input, grid, interpolation_mode="bilinear", padding_mode="zeros",
        align_corners=False: F.grid_sample(input, grid, interpolation_mode, padding_mode, bool(align_corners)),
     "interpolation_mode padding_mode align_corners"),
    ("unfold", lambda input, kernel_size, dilation=1, padding=0, stride=1: F.unfold(
        input, kernel_size, dilation, padding, stride)),
    ("fold", lambda input, output_size, kernel_size, dilation=1, padding=0, stride=1: F.fold(
        input, output_size, kernel_size, dilation, padding, stride)),
    # -- boxes ---------------------------------------------------------------------------------------------------
    ("IOU iou", _overlaps, "mode"),
    ("BoundingBoxEncode bounding_box_encode", _encode_boxes, "means stds"),
    ("BoundingBoxDecode bounding_box_decode", _decode_boxes, "max_shape means stds wh_ratio_clip"),
    ("CheckValid check_valid", _check_boxes),
    ("NMSWithMask", _suppress, "iou_threshold"),
    # -- losses ----------------------------------------------------------------------------------------------------
    ("cross_entropy", _cross_entropy),
    ("nll_loss", _nll_loss),
    ("SoftmaxCrossEntropyWithLogits", _softmax_loss_and_gradient),
    ("SparseSoftmaxCrossEntropyWithLogits", _sparse_softmax_loss, "is_grad"),
    ("SigmoidCrossEntropyWithLogits", _scores),
    ("BinaryCrossEntropy binary_cross_entropy", _binary(F.binary_cross_entropy), "reduction"),
    ("BCEWithLogitsLoss binary_cross_entropy_with_logits", lambda input, target, weight=None, pos_weight=None,
        reduction="mean": F.binary_cross_entropy_with_logits(
            input, target, weight, pos_weight=pos_weight, reduction=reduction), "reduction"),
    ("SmoothL1Loss smooth_l1_loss", _huber, "beta reduction"),
    ("mse_loss", lambda input, target, reduction="mean": F.mse_loss(input, target, reduction=reduction)),
    ("l1_loss", lambda input, target, reduction="mean": F.l1_loss(input, target, reduction=reduction)),
    ("huber_loss", lambda input, target, reduction="mean", delta=1.0: F.huber_loss(input, target, reduction, delta)),
    ("NLLLoss", _weighted_nll, "reduction ignore_index"),
    ("KLDivLoss kl_div", lambda logits, labels, reduction="mean": F.kl_div(logits, labels, reduction=reduction),
     "reduction"),
    ("ctc_loss", _ctc_loss),
    ("hinge_embedding_loss", lambda inputs, targets, margin=1.0, reduction="mean": F.hinge_embedding_loss(
        inputs, targets, margin, reduction=reduction)),
    ("margin_ranking_loss", lambda input1, input2, target, margin=0.0, reduction="mean": F.margin_ranking_loss(
        input1, input2, target, margin, reduction=reduction)),
    ("cosine_embedding_loss", lambda input1, input2, target, margin=0.0, reduction="mean": F.cosine_embedding_loss(
        input1, input2, target, margin, reduction=reduction)),
    ("soft_margin_loss", lambda input, target, reduction="mean": F.soft_margin_loss(
        input, target, reduction=reduction)),
    # -- random ----------------------------------------------------------------------------------------------------
    ("Dropout", _dropout, "keep_prob Seed0 Seed1"),
    ("Dropout2D", lambda x, keep_prob=0.5: (F.dropout2d(x, 1 - keep_prob), x != 0), "keep_prob"),
    ("dropout2d", lambda input, p=0.5, training=True: F.dropout2d(input, p, training)),
    ("StandardNormal", lambda shape, seed=0, seed2=0: _normal(shape), "seed seed2"),
    ("standard_normal", lambda shape, seed=None: _normal(shape)),
    ("normal", _normal),
    ("uniform", _uniform),
    ("UniformReal", lambda shape, seed=0, seed2=0: torch.rand(dims(shape)), "seed seed2"),
    ("UniformInt", lambda shape, minval, maxval, seed=0, seed2=0: _random_ints(
        minval, maxval, shape).int(), "seed seed2"),
    ("TruncatedNormal", lambda shape, seed=0, dtype=torch.float32, seed2=0: torch.nn.init.trunc_normal_(
        torch.empty(dims(shape), dtype=dtype)), "seed dtype seed2"),
    ("rand", lambda *size, dtype=None, seed=None: torch.rand(_sizes(size), dtype=dtype)),
    ("randn", lambda *size, dtype=None, seed=None: torch.randn(_sizes(size), dtype=dtype)),
    ("rand_like", lambda input, seed=None, *, dtype=None: torch.rand_like(input, dtype=dtype)),
    ("randn_like", lambda input, seed=None, *, dtype=None: torch.randn_like(input, dtype=dtype)),
    ("randint", _random_ints),
    ("randperm", lambda n, seed=0, offset=0, dtype=torch.int64: torch.randperm(n, dtype=dtype)),
    ("bernoulli", lambda input, p=0.5, seed=None: torch.bernoulli(torch.full_like(input, p, dtype=torch.float32))),
    ("multinomial", lambda input, num_samples, replacement=True, seed=None: torch.multinomial(
        input, num_samples, replacement)),
    ("RandomShuffle", lambda x, seed=0, seed2=0: x[torch.randperm(len(x))], "seed seed2"),
    ("shuffle", lambda x, seed=None: x[torch.randperm(len(x))]),
):  # fmt: skip
    OPERATORS |= define(*_row)
