"""One-line calls in MindSpore's words, whose results real MindSpore and msrun.mindspore have in common.

`python tests/cases/mindspore_calls.py` prints as JSON what the `mindspore` of this Python computes: with real MindSpore
it makes the stored table, tests/golden/mindspore_calls.json.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import numpy as np

CALLS = """
ops.Add()(x, y)
ops.add(x, 2)
ops.Sub()(x, y)
ops.sub(2.0, x)
ops.Mul()(x, y)
ops.Div()(x, y)
ops.RealDiv()(x, y)
ops.div(x, y)
ops.FloorDiv()(x, y)
ops.Mod()(x, y)
ops.FloorMod()(x, y)
ops.Pow()(x, 2)
ops.pow(y, 3)
ops.Maximum()(x, y)
ops.maximum(x, 1.0)
ops.minimum(x, y)
ops.Abs()(x)
ops.Neg()(x)
ops.Exp()(x)
ops.Log()(y)
ops.Sqrt()(y)
ops.Rsqrt()(y)
ops.Square()(x)
ops.SquaredDifference()(x, y)
ops.Reciprocal()(y)
ops.Floor()(x)
ops.Round()(x)
ops.Sign()(x)
ops.Sin()(x)
ops.Cos()(x)
ops.Tanh()(x)
ops.Sigmoid()(x)
ops.Erf()(x)
ops.Atan2()(x, y)
ops.ReLU()(x)
ops.ReLU6()(x)
ops.GeLU()(x)
ops.gelu(x)
ops.gelu(x, approximate="tanh")
ops.Elu()(x)
ops.SeLU()(x)
ops.leaky_relu(x)
ops.HSwish()(x)
ops.HSigmoid()(x)
ops.Softplus()(x)
ops.silu(x)
ops.mish(x)
ops.clip_by_value(x, -1.0, 1.0)
ops.clamp(x, min=0)
ops.addn([x, y, x])
ops.AddN()([x, y])
ops.Greater()(x, y)
ops.GreaterEqual()(x, y)
ops.Less()(x, y)
ops.LessEqual()(x, y)
ops.Equal()(x, x)
ops.NotEqual()(x, y)
ops.LogicalAnd()(x > 0, y > 1)
ops.LogicalOr()(x > 0, y > 1)
ops.LogicalNot()(x > 0)
ops.isfinite(x)
ops.Cast()(x, ms.int32)
ops.cast(x, ms.float16)
ops.Reshape()(x, (3, 2))
ops.reshape(x, (-1,))
ops.Shape()(x)
ops.shape(x)
ops.Size()(x)
ops.Rank()(x)
ops.Transpose()(x, (1, 0))
ops.transpose(cube, (2, 0, 1))
ops.Tile()(x, (2, 1))
ops.tile(x, (1, 2, 2))
ops.Concat(1)((x, y))
ops.concat((x, y), axis=0)
ops.cat((x, y), axis=1)
ops.Stack(axis=1)((x, y))
ops.stack([x, y], axis=0)
ops.Unstack(axis=0)(x)
ops.Split(1, 3)(x)
ops.split(x, 1, axis=0)
ops.ExpandDims()(x, 1)
ops.expand_dims(x, -1)
ops.Squeeze(0)(x[:1])
ops.squeeze(x[:1])
ops.Flatten()(cube)
ops.flatten(cube, start_dim=1)
ops.swapaxes(cube, 0, 2)
ops.BroadcastTo((2, 2, 3))(x)
ops.broadcast_to(x, (2, 2, 3))
ops.Gather()(x, ids, 1)
ops.gather(x, ids, 0)
ops.GatherNd()(x, pairs)
ops.gather_nd(x, pairs)
ops.GatherD()(x, 1, places)
ops.gather_elements(x, 1, places)
ops.EmbeddingLookup()(x, ids, 0)
ops.ScatterNd()(pairs, vector, (2, 3))
ops.TensorScatterUpdate()(x, pairs, vector)
ops.tensor_scatter_add(x, pairs, vector)
ops.UnsortedSegmentSum()(x, ids, 3)
ops.Select()(x > 0, x, y)
ops.select(x > 0, x, y)
ops.where(x > 0, x, y)
ops.masked_fill(x, x > 0, 0.0)
ops.MaskedFill()(x, x > 0, 7.0)
ops.MaskedSelect()(x, x > 0)
ops.nonzero(x > 0)
ops.Slice()(x, (0, 1), (2, 2))
ops.StridedSlice()(x, (0, 0), (2, 3), (1, 2))
ops.strided_slice(cube, (0, 0, 0), (1, 2, 2), (1, 1, 1), shrink_axis_mask=1)
ops.ReverseV2(axis=[1])(x)
ops.flip(x, (0,))
ops.Tril()(x)
ops.triu(x, 1)
ops.Pad(((1, 0), (0, 2)))(x)
ops.MirrorPad("REFLECT")(x, Tensor(np.array([[0, 0], [1, 1]])))
ops.pad(x, (1, 2), value=3.0)
ops.OneHot()(ids, 3, Tensor(1.0), Tensor(0.0))
ops.one_hot(ids, 3)
ops.Fill()(ms.float32, (2, 2), 3)
ops.fill(ms.int32, (2,), 5)
ops.Ones()((2, 3), ms.float32)
ops.ones((2,), ms.int32)
ops.zeros((2, 2))
ops.ZerosLike()(x)
ops.OnesLike()(x)
ops.ones_like(x)
ops.eye(2, 3)
ops.Eye()(2, 2, ms.float32)
ops.arange(4)
ops.arange(1, 7, 2)
ops.Range()(Tensor(0, ms.int32), Tensor(6, ms.int32), Tensor(2, ms.int32))
ops.linspace(0, 1, 5)
ops.meshgrid(vector, vector)
ops.ReduceSum()(x)
ops.ReduceSum(keep_dims=True)(x, 1)
ops.ReduceMean()(x, (0, 1))
ops.ReduceMax()(x, 0)
ops.ReduceMin(keep_dims=True)(x, 1)
ops.ReduceProd()(y, 1)
ops.ReduceAll()(x > 0, 1)
ops.ReduceAny()(x > 0, 0)
ops.sum(x, 1)
ops.mean(x, 0, True)
ops.prod(y)
ops.std(x)
ops.std(x, axis=1, ddof=1)
ops.var(x, axis=0)
ops.max(x, 1)
ops.max(x)
ops.min(x, axis=0)
ops.amax(x, 0)
ops.Argmax()(x)
ops.Argmax(axis=0, output_type=ms.int32)(x)
ops.argmax(x, 1)
ops.argmin(x, axis=0)
ops.ArgMaxWithValue(axis=1)(x)
ops.ArgMinWithValue(axis=0, keep_dims=True)(x)
ops.TopK()(x, 2)
ops.topk(x, 2)
ops.Sort()(x)
ops.argsort(x)
ops.CumSum()(x, 1)
ops.CumSum(exclusive=True, reverse=True)(x, 1)
ops.cumsum(x, 0)
ops.cumprod(y, 1)
ops.logsumexp(x, 1)
ops.norm(x)
ops.L2Loss()(x)
ops.L2Normalize(axis=1)(x)
ops.count_nonzero(x)
ops.unique(ids)
ops.MatMul()(x, y.T)
ops.MatMul(transpose_b=True)(x, y)
ops.BatchMatMul()(cube, cube.transpose((0, 2, 1)))
ops.matmul(x, y.T)
ops.tensor_dot(x, y, ((1,), (1,)))
ops.outer(vector, vector)
ops.dense(x, y)
ops.BiasAdd()(x, vector3)
ops.bias_add(x, vector3)
ops.Softmax()(x)
ops.softmax(x, axis=0)
ops.LogSoftmax()(x)
ops.log_softmax(x)
ops.LayerNorm(1, 1)(x, vector3, vector3)
ops.Conv2D(2, 2)(image, kernel)
ops.Conv2D(2, 2, pad_mode="same", stride=2)(image, kernel)
ops.conv2d(image, kernel, pad_mode="pad", padding=1)
ops.MaxPool(2, 2)(image)
ops.MaxPool(3, 2, "same")(image)
ops.AvgPool(2, 1, "same")(image)
ops.max_pool2d(image, 2)
ops.avg_pool2d(image, 2, 2)
ops.adaptive_avg_pool2d(image, 2)
ops.ResizeNearestNeighbor((8, 8))(image)
ops.ResizeBilinearV2()(image, (6, 6))
ops.interpolate(image, size=(8, 8), mode="nearest")
ops.cross_entropy(x, ids)
ops.nll_loss(ops.log_softmax(x), ids)
ops.SoftmaxCrossEntropyWithLogits()(x, hot)
ops.SparseSoftmaxCrossEntropyWithLogits()(x, ids)
ops.SigmoidCrossEntropyWithLogits()(x, hot)
ops.binary_cross_entropy_with_logits(x, hot, ops.ones_like(x), ops.ones_like(x))
ops.BinaryCrossEntropy()(ops.sigmoid(x), hot)
ops.SmoothL1Loss()(x, y)
ops.mse_loss(x, y)
ops.l1_loss(x, y)
ops.kl_div(ops.log_softmax(x), ops.softmax(y))
ops.huber_loss(x, y)
ops.cosine_similarity(x, y)
ops.stop_gradient(x)
ops.depend(x, y)
ops.clip_by_global_norm([x, y], 1.0)
ops.HyperMap()(ops.Square(), (x, y))
ops.HyperMap()(ops.partial(ops.Mul(), 2.0), (x, y))
ops.GradOperation()(lambda a: a * a)(x)
ops.GradOperation(get_all=True)(lambda a, b: a * b)(x, y)
ops.GradOperation(sens_param=True)(lambda a: a * a)(x, y)
ops.grad(lambda a: (a * a).sum())(x)
ms.grad(lambda a, b: a * b, (0, 1))(x, y)
ms.value_and_grad(lambda a: (a * a).sum())(x)
ops.Assign()(Parameter(x), y)
ops.assign_add(Parameter(x), y)
ops.AssignSub()(Parameter(x), y)
changed_by(ops.AdamWeightDecay(), 0.1, 0.9, 0.999, 1e-6, 0.01, y)
changed_by(ops.Adam(), 0.9, 0.999, 0.1, 0.9, 0.999, 1e-6, y)
changed_by(ops.FusedSparseLazyAdam(), 0.9, 0.999, 0.1, 0.9, 0.999, 1e-6, y, ids)
nn.ReLU()(x)
nn.LeakyReLU()(x)
nn.ELU()(x)
nn.GELU()(x)
nn.GELU(approximate=False)(x)
nn.HSwish()(x)
nn.PReLU()(x)
nn.Softmax()(x)
nn.LogSoftmax()(x)
nn.Flatten()(cube)
nn.Pad(((1, 1), (0, 2)))(x)
nn.Pad(((0, 0), (1, 1)), mode="REFLECT")(x)
nn.Norm()(x)
nn.ReduceLogSumExp(1)(x)
nn.MaxPool2d(3, 2, "same")(image)
nn.AvgPool2d(2, 1, "same")(image)
nn.MaxPool2d(2, 2, pad_mode="pad", padding=1)(image)
nn.AdaptiveAvgPool2d(2)(image)
nn.Conv2d(1, 2, 3, weight_init="ones")(image)
nn.Conv2d(1, 2, 3, pad_mode="valid", weight_init=0.5, has_bias=True, bias_init="ones")(image)
nn.Conv2d(1, 1, 2, pad_mode="pad", padding=(1, 0, 0, 1), weight_init="ones")(image)
nn.Conv1d(2, 1, 3, weight_init="ones")(cube)
nn.Conv2dTranspose(1, 1, 3, stride=2, weight_init="ones")(image)
nn.Conv2dTranspose(1, 1, 2, 2, pad_mode="valid", weight_init="ones")(image)
nn.Dense(3, 2, weight_init="ones", bias_init="ones")(x)
nn.Dense(3, 2, weight_init="ones", bias_init="zeros", activation="relu")(x)
nn.BatchNorm2d(1)(image)
nn.BatchNorm2d(1).set_train()(image)
nn.BatchNorm1d(3, gamma_init=2.0)(x)
nn.LayerNorm((3,))(x)
nn.GroupNorm(1, 2)(cube.expand_dims(-1))
nn.Embedding(3, 2, embedding_table="ones")(ids)
nn.Dropout(p=0.5).set_train(False)(x)
nn.OneHot(depth=3)(ids)
nn.Upsample(scale_factor=2.0, mode="nearest", recompute_scale_factor=True)(image)
nn.MSELoss()(x, y)
nn.L1Loss()(x, y)
nn.MAELoss()(x, y)
nn.SmoothL1Loss()(x, y)
nn.HuberLoss()(x, y)
nn.RMSELoss()(x, y)
nn.BCELoss(reduction="mean")(ops.sigmoid(x), hot)
nn.CrossEntropyLoss()(x, ids)
nn.NLLLoss()(ops.log_softmax(x), ids)
nn.SoftmaxCrossEntropyWithLogits(sparse=True)(x, ids)
nn.SoftmaxCrossEntropyWithLogits()(x, hot)
nn.DiceLoss()(ops.sigmoid(x), hot)
nn.FocalLoss()(x, ids.expand_dims(1))
nn.Dense(3, 2, weight_init="ones", bias_init="zeros").to_float(ms.float16)(x)
nn.cosine_decay_lr(0.01, 0.1, 6, 2, 2)
nn.piecewise_constant_lr([2, 4], [0.1, 0.01])
nn.warmup_lr(0.1, 6, 2, 2)
nn.exponential_decay_lr(0.1, 0.9, 6, 2, 1)
nn.polynomial_decay_lr(0.1, 0.01, 6, 2, 2, 0.5)
nn.natural_exp_decay_lr(0.1, 0.9, 6, 2, 2, True)
nn.inverse_decay_lr(0.1, 0.5, 6, 2, 1, True)
nn.CosineDecayLR(0.01, 0.1, 4)(Tensor(2, ms.int32))
nn.PolynomialDecayLR(0.1, 0.01, 4, 0.5)(Tensor(2, ms.int32))
nn.WarmUpLR(0.1, 10)(Tensor(2, ms.int32))
nn.ExponentialDecayLR(0.1, 0.9, 4)(Tensor(2, ms.int32))
x.asnumpy()
x.astype(ms.float16)
x.astype("int32")
x.copy()
x.expand_dims(0)
x.mean(axis=0, keep_dims=True)
x.sum(axis=1)
x.sum(axis=0, keepdims=True)
x.max()
x.max(axis=1)
x.min(axis=0, keepdims=True)
x.argmax(axis=1)
x.std()
x.var(axis=0)
x.std(ddof=1)
x.transpose((1, 0))
x.transpose(1, 0)
cube.transpose(2, 0, 1)
x.swapaxes(0, 1)
x.view(3, 2)
x.reshape((3, 2))
x.flatten()
x.squeeze()
x.split(1, axis=0)
x.prod()
x.any()
x.all(axis=1)
x.clip(0, 2)
x.ptp()
x.fill(2.0)
x.broadcast_to((2, 2, 3))
x.masked_fill(x > 0, 0.0)
x.gather_nd(pairs)
x.T
x.ndim
x.shape
x.nbytes
x.itemsize
x.strides
x.tolist()
x.item() if x.ndim == 0 else x[0, 1].item()
x[0]
x[:, 1:]
x[0, 1]
x[ids]
x // 2
x % 2
1 - x
x ** 2
-x
x @ y.T
x > y
str(x)
str(x.sum())
f"{x.sum()}"
"%s" % x[0]
len(x)
float(x[0, 1])
Tensor([1, 2]).asnumpy()
Tensor(1.5).asnumpy()
Tensor(3).asnumpy()
Tensor(True).asnumpy()
Tensor(np.ones(2)).asnumpy()
Tensor([1, 2], ms.float16).asnumpy()
Tensor(shape=(2, 2), dtype=ms.float32, init=ms.common.initializer.One()).init_data().asnumpy()
Parameter(x, name="w").name
Parameter(x, name="w").set_data(y)
Parameter(x, name="w").clone("same").name
Parameter(x, requires_grad=False).requires_grad
[p.name for p in nn.Dense(2, 3).get_parameters()]
[p.name for p in nn.SequentialCell(nn.Dense(2, 3), nn.BatchNorm1d(3)).trainable_params()]
nn.Dense(2, 3).cls_name
nn.Momentum(nn.Dense(2, 3).trainable_params(), 0.1, 0.9).parameters[0].name
nn.Momentum(nn.SequentialCell(nn.Dense(2, 3), nn.BatchNorm1d(3)).trainable_params(), 0.1, 0.9).decay_flags
nn.Dense(2, 3).add_flags(fast=True).fast
ops.Add().name
msnp.arange(5)
msnp.array([1.0, 2.0])
msnp.mean(x, axis=1)
msnp.sum(x, axis=0, keepdims=True)
msnp.concatenate((x, y), axis=1)
msnp.stack([x, y])
msnp.where(x > 0, x, y)
msnp.ones((2, 2))
msnp.zeros((2, 2), dtype=ms.int32)
msnp.full((2, 2), 1.5)
msnp.tile(x, (2, 1))
msnp.expand_dims(x, 0)
msnp.transpose(x)
msnp.matmul(x, y.T)
msnp.sqrt(y)
msnp.maximum(x, y)
msnp.clip(x, 0, 1)
msnp.argmax(x, axis=1)
msnp.unique(ids)
msnp.std(x)
msnp.isnan(x)
msnp.pad(x, 1)
msnp.linspace(0.0, 1.0, 3)
msnp.pi
ms.set_context(mode=ms.PYNATIVE_MODE)
ms.get_context("mode")
ms.dtype_to_nptype(ms.float32).__name__
ms.ops.functional.add(x, y)
ms.ops.operations.ReLU()(x)
ms.common.initializer.initializer("ones", (2, 2), ms.float32).init_data()
ms.amp.all_finite([x, y])
ms.amp.DynamicLossScaler(4.0, 2, 2).scale(x)
ms.FixedLossScaleManager(8.0).get_loss_scale()
ms.DynamicLossScaleManager(8, 2, 2).get_loss_scale()
train_two_steps(nn.SGD, 0.1)
train_two_steps(nn.Momentum, 0.1, 0.9)
train_two_steps(nn.Adam, 0.1)
train_two_steps(nn.AdamWeightDecay, 0.1, weight_decay=0.1)
train_two_steps(nn.RMSProp, 0.1)
train_two_steps(nn.Adagrad, learning_rate=0.1)
train_two_steps(nn.SGD, [0.1, 0.01])
train_two_steps(nn.SGD, 0.1, weight_decay=0.1)
train_two_steps(nn.Momentum, nn.PolynomialDecayLR(0.1, 0.01, 4, 0.5), 0.9)
train_with_cell(None)
look_up_type(1.0)
look_up_type(x)
mint.add(x, y)
mint.matmul(x, y.T)
mint.nn.functional.relu(x)
mint.nn.Linear(3, 2).weight.shape
mint.sum(x, dim=1)
mint.cat([x, y], dim=1)
mint.softmax(x, dim=-1)
mint.mean(x, dim=0, keepdim=True)
ops.UnsortedSegmentMax()(x, ids, 3)
ops.unsorted_segment_min(x, ids, 2)
ops.unsorted_segment_prod(x, ids, 2)
ops.ReverseSequence(1)(x, ids + 1)
ops.ReverseSequence(seq_dim=0, batch_dim=1)(cube, ids + 1)
ops.functional.make_range(3)
ops.functional.make_range(1, 6, 2)
ops.functional.tuple_len((1, 2))
ops.real(ops.Complex()(x, y))
ops.FloatStatus()(x)
ops.FloatStatus()(x / 0)
ops.functional.mixed_precision_cast(ms.float16, x)
ops.IOU()(boxes, boxes[1:])
ops.IOU("iof")(boxes, boxes[1:])
ops.BoundingBoxEncode(means=(0.0, 0.0, 0.0, 0.0), stds=(1.0, 0.5, 1.0, 2.0))(boxes, boxes + 3)
ops.BoundingBoxDecode(max_shape=(32, 24))(boxes, boxes / 40)
ops.CheckValid()(boxes, Tensor(np.array([20.0, 16.0, 1.0], np.float32)))
ops.NMSWithMask(0.5)(scored)
ops.NMSWithMask(0.1)(scored)
ops.NLLLoss()(ops.log_softmax(x), ids, vector3)
ops.constexpr(lambda a: a + 1)(2)
nn.PSNR()(image / 16, image / 17)
nn.MultiLabelSoftMarginLoss()(x, hot)
nn.GaussianNLLLoss()(x, y, y)
nn.RMSProp(nn.Dense(2, 3).trainable_params(), 0.1).loss_scale
nn.Momentum(nn.Dense(2, 3).trainable_params(), 0.1, 0.9, loss_scale=8.0).loss_scale
train_two_steps(nn.Momentum, 0.1, 0.9, loss_scale=8.0)
train_two_steps(nn.Adam, 0.1, loss_scale=4.0)
train_two_steps(nn.AdaMax, 0.1)
train_two_steps(nn.Adadelta, 0.1)
train_two_steps(nn.Rprop, 0.1)
train_two_steps(nn.ASGD, 0.1)
train_two_steps(nn.RMSProp, 0.1, centered=True)
ms.grad(ms.grad(lambda a: a * a * a))(Tensor(2.0))
ops.GradOperation()(ops.GradOperation()(lambda a: a * a * a))(Tensor(2.0))
ms.common.initializer.initializer("identity", (2, 3), ms.float32).init_data()
ms.get_context(attr_key="mode")
ms.parallel.set_algo_parameters(fully_use_devices=False)
ms.dataset.transforms.Compose([lambda a: a + 1, lambda a: a * 2])(np.ones((2, 3), np.float32))
ms.dataset.vision.SlicePatches(1, 2)(np.arange(24, dtype=np.uint8).reshape(2, 4, 3))
ms.dataset.vision.SlicePatches(2, 2)(np.arange(27, dtype=np.uint8).reshape(3, 3, 3))
nn.Precision()(ops.softmax(x), ids)
nn.MAE()(x, y)
nn.Accuracy("multilabel")(hot, hot)
""".strip().splitlines()


DIFFERENT = {
    "ops.FloatStatus()(x)": "MindSpore's CPU has no kernel of it",
    "ops.FloatStatus()(x / 0)": "MindSpore's CPU has no kernel of it",
    "nn.PSNR()(image / 16, image / 17)": "MindSpore 2.10 refuses its own default max_val here",
}
"""Call -> why the results differ. docs/how-to/from_mindspore.md has the reasons."""


def words(ms: ModuleType) -> dict[str, Any]:
    """Return what the calls name."""
    from importlib import import_module

    for path in ("common.initializer", "amp", "dataset", "numpy", "mint", "ops.functional", "ops.operations"):
        import_module(f"{ms.__name__}.{path}")
    ops, nn, Tensor, Parameter = ms.ops, ms.nn, ms.Tensor, ms.Parameter  # noqa: N806
    x = Tensor(np.array([[1.25, -2.0, 3.5], [4.0, 0.5, -6.0]], np.float32))
    y = Tensor(np.array([[2.0, 2.5, 1.0], [1.5, 0.5, 4.0]], np.float32))
    graph = ops.MultitypeFuncGraph("graph")

    @graph.register("Number")
    def of_number(value: Any) -> Any:
        return value + 1

    @graph.register("Tensor")
    def of_tensor(value: Any) -> Any:
        return value + 2

    def network() -> Any:
        return nn.Dense(3, 1, weight_init="ones", bias_init="zeros")

    def changed_by(operator: Any, *args: Any) -> Any:
        tables = [Parameter(x, name="w"), Parameter(y, name="m"), Parameter(y, name="v")]
        operator(*tables, *(Tensor(one, ms.float32) if isinstance(one, float) else one for one in args))
        return tables

    def train_two_steps(optimizer: Any, *args: Any, **settings: Any) -> Any:
        net, loss = network(), nn.MSELoss()
        step = optimizer(net.trainable_params(), *args, **settings)
        gradients = ms.value_and_grad(lambda a, b: loss(net(a), b), None, net.trainable_params())
        losses = []
        for _ in range(2):
            value, found = gradients(x, y[:, :1])
            step(found)
            losses.append(value)
        return losses, net.weight

    def train_with_cell(scale: Any) -> Any:
        net = network()
        joined, step = nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.01)
        cell = (
            nn.TrainOneStepCell(joined, step)
            if scale is None
            else nn.TrainOneStepWithLossScaleCell(joined, step, scale)
        )
        results = [cell(x, y[:, :1]) for _ in range(2)]
        return results, net.weight

    return {
        "__name__": __name__,
        "ms": ms,
        "np": np,
        "ops": ops,
        "nn": nn,
        "msnp": ms.numpy,
        "mint": ms.mint,
        "Tensor": Tensor,
        "Parameter": Parameter,
        "x": x,
        "y": y,
        "cube": Tensor(np.arange(8, dtype=np.float32).reshape(2, 2, 2)),
        "ids": Tensor(np.array([1, 0], np.int32)),
        "places": Tensor(np.array([[0, 2], [1, 1]], np.int32)),
        "pairs": Tensor(np.array([[0, 1], [1, 2]], np.int32)),
        "vector": Tensor(np.array([10.0, 20.0], np.float32)),
        "vector3": Tensor(np.array([1.0, 2.0, 3.0], np.float32)),
        "hot": Tensor(np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], np.float32)),
        "image": Tensor(np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)),
        "kernel": Tensor(np.arange(8, dtype=np.float32).reshape(2, 1, 2, 2)),
        "boxes": Tensor(np.array([[1, 1, 8, 9], [3, 2, 9, 9], [12, 4, 18, 20]], np.float32)),
        "scored": Tensor(np.array([[1, 1, 8, 9, 0.4], [2, 1, 9, 9, 0.9], [12, 4, 18, 20, 0.5]], np.float32)),
        "changed_by": changed_by,
        "train_two_steps": train_two_steps,
        "train_with_cell": train_with_cell,
        "look_up_type": graph,
    }


def plain(value: Any) -> Any:
    """Return a result as JSON has it: a tensor as its shape, its type and its numbers."""
    if hasattr(value, "asnumpy"):
        value = value.asnumpy()
    if isinstance(value, np.ndarray):
        return {
            "shape": list(value.shape),
            "type": value.dtype.name,
            "numbers": value.astype(np.float64).reshape(-1).tolist(),
        }
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def results(ms: ModuleType) -> dict[str, Any]:
    """Return call -> its result, or the name of its error."""
    found: dict[str, Any] = {}
    for call in CALLS:
        try:
            found[call] = plain(eval(call, words(ms)))
        except Exception as error:
            found[call] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(call, found[call], file=sys.stderr)
    return found


if __name__ == "__main__":
    import mindspore

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    rows = results(mindspore)
    print(json.dumps(rows, indent=0))
