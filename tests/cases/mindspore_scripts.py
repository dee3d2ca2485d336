"""Short scripts in MindSpore's words, whose printed text real MindSpore and msrun.mindspore have in common.

`python tests/cases/mindspore_scripts.py` prints as JSON what each prints with the `mindspore` of this Python: with real
MindSpore it makes the stored table, tests/golden/mindspore_scripts.json.
"""

# mypy: ignore-errors
# ruff: noqa: E501, FBT003, N812
import contextlib
import io
import json
import os
import sys
import tempfile

import mindspore as ms
import mindspore.dataset as ds
import mindspore.numpy as mnp
import mindspore.ops.functional as F
import numpy as np
from mindspore import Model, Parameter, ParameterTuple, Tensor, context, mint, nn, ops
from mindspore.common.initializer import HeNormal, Initializer, Normal, TruncatedNormal, XavierUniform, initializer
from mindspore.nn import LossBase
from mindspore.nn.learning_rate_schedule import LearningRateSchedule
from mindspore.train.callback import Callback, CheckpointConfig, LossMonitor, ModelCheckpoint

SCRIPTS = {}
"""Name -> script."""
DIFFERENT = {}
"""Name -> why what is printed differs. docs/how-to/from_mindspore.md has the reasons."""


def script(function):
    SCRIPTS[function.__name__] = function
    return function


def rows(*shape, scale=1.0):
    return (scale * np.cos(np.arange(np.prod(shape)) * 1.7)).reshape(shape).astype(np.float32)


def fixed(network):
    """Give all weights numbers that no generator makes."""
    for place, parameter in enumerate(sorted(network.trainable_params(), key=lambda one: one.name)):
        parameter.set_data(Tensor(rows(*parameter.shape, scale=0.5 / (place + 1))))
    return network


def show(*values):
    for value in values:
        if isinstance(value, list | tuple):
            show(*value)
        else:
            print(value.asnumpy() if isinstance(value, Tensor) else value)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense1 = nn.Dense(12, 8, activation="relu")
        self.dense2 = nn.Dense(8, 3)

    def construct(self, x):
        return self.dense2(self.dense1(self.flatten(x)))


class Images:
    def __getitem__(self, index):
        return rows(3, 4) + np.float32(index / 10), np.int32(index % 3)

    def __len__(self):
        return 16


def batches():
    return ds.GeneratorDataset(Images(), column_names=["image", "label"], shuffle=False).batch(4)


# -- training -------------------------------------------------------------------------------------------------------


@script
def model_eval_with_metrics():
    net = fixed(Net())
    loss = nn.CrossEntropyLoss()
    model = Model(
        net, loss, nn.Adam(net.trainable_params(), 0.01), metrics={"accuracy": nn.Accuracy(), "loss": nn.Loss()}
    )
    model.train(1, batches(), dataset_sink_mode=False)
    show(sorted(model.eval(batches(), dataset_sink_mode=False).items()))


@script
def model_predict():
    show(Model(fixed(Net())).predict(Tensor(rows(2, 3, 4))))


@script
def model_with_two_metrics_by_name():
    net = fixed(Net())
    model = Model(net, nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.1), metrics={"acc", "loss"})
    show(sorted(model.eval(batches(), dataset_sink_mode=False).items()))


@script
def a_callback_of_ones_own():
    class Watch(Callback):
        def step_end(self, run_context):
            params = run_context.original_args()
            print("step", params.cur_step_num, "loss", params.net_outputs)

    net = fixed(Net())
    model = Model(net, nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.1))
    model.train(1, batches(), callbacks=[Watch()], dataset_sink_mode=False)


@script
def checkpoints_of_a_model():
    net = fixed(Net())
    model = Model(net, nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.1))
    kept = ModelCheckpoint(
        prefix="net", directory="ckpt", config=CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=2)
    )
    model.train(2, batches(), callbacks=[kept], dataset_sink_mode=False)
    print(sorted(name for name in os.listdir("ckpt") if name.endswith(".ckpt")))
    other = Net()
    missing = ms.load_param_into_net(other, ms.load_checkpoint("ckpt/net-2_4.ckpt"))
    show(missing[0], np.array_equal(other.dense1.weight.asnumpy(), net.dense1.weight.asnumpy()))


@script
def save_and_load_a_checkpoint():
    net = fixed(Net())
    ms.save_checkpoint(net, "net.ckpt")
    found = ms.load_checkpoint("net.ckpt")
    show(list(found), found["dense2.bias"], type(found["dense2.bias"]).__name__)
    print(ms.load_param_into_net(nn.SequentialCell(nn.Dense(2, 2)), found, strict_load=False))
    ms.save_checkpoint([{"name": "step", "data": Tensor(3)}], "list.ckpt", append_dict={"epoch": 7})
    other = ms.load_checkpoint("list.ckpt")
    show(other["step"], int(other["epoch"]))


@script
def a_loss_of_each_row():
    loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True)
    net = fixed(Net())
    model = Model(net, loss_fn, nn.SGD(net.trainable_params(), 0.01))
    model.train(1, batches(), callbacks=[LossMonitor()], dataset_sink_mode=False)
    net = fixed(Net())
    optimizer = nn.SGD(net.trainable_params(), 0.01)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, loss_fn), optimizer)
    image, label = next(batches().create_tuple_iterator())
    show(step(image, label), step(image, label))
    show(ms.value_and_grad(lambda x, y: loss_fn(net(x), y), None, optimizer.parameters)(image, label))
    show(ms.value_and_grad(lambda x, y: loss_fn(net(x), y))(image, label)[1].sum())


@script
def a_loss_scale_by_hand():
    net, loss_fn = fixed(Net()), nn.CrossEntropyLoss()
    scaler = ms.amp.DynamicLossScaler(scale_value=2**10, scale_factor=2, scale_window=2)
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    grad_fn = ms.value_and_grad(lambda x, y: scaler.scale(loss_fn(net(x), y)), None, optimizer.parameters)
    for data, label in batches().create_tuple_iterator():
        loss, grads = grad_fn(data, label)
        grads = scaler.unscale(grads)
        finite = ms.amp.all_finite(grads)
        if finite:
            optimizer(grads)
        scaler.adjust(finite)
        show(scaler.unscale(loss), scaler.scale_value, finite)


@script
def a_fixed_loss_scale_of_a_model():
    net = fixed(Net())
    manager = ms.FixedLossScaleManager(1024.0, drop_overflow_update=False)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9, loss_scale=1024.0)
    model = Model(net, nn.CrossEntropyLoss(), optimizer, loss_scale_manager=manager)
    model.train(1, batches(), callbacks=[LossMonitor()], dataset_sink_mode=False)
    show(net.dense2.bias)


# -- optimizers and rates ---------------------------------------------------------------------------------------------


def steps(make, count=4):
    net, loss_fn = fixed(Net()), nn.CrossEntropyLoss()
    optimizer = make(net)
    grad_fn = ms.value_and_grad(lambda x, y: loss_fn(net(x), y), None, optimizer.parameters)
    for data, label in list(batches().create_tuple_iterator())[:count]:
        loss, grads = grad_fn(data, label)
        optimizer(grads)
        print(loss)
    show(net.dense1.weight[0], net.dense2.bias)


@script
def optimizers_of_each_family():
    rate = 0.05
    steps(lambda net: nn.SGD(net.trainable_params(), rate, momentum=0.9, weight_decay=0.01))
    steps(lambda net: nn.SGD(net.trainable_params(), rate, momentum=0.9, dampening=0.2))
    steps(lambda net: nn.SGD(net.trainable_params(), rate, momentum=0.9, nesterov=True))
    steps(lambda net: nn.Momentum(net.trainable_params(), rate, 0.9, weight_decay=0.01))
    steps(lambda net: nn.Adam(net.trainable_params(), rate, weight_decay=0.01))
    steps(lambda net: nn.AdamWeightDecay(net.trainable_params(), rate, weight_decay=0.1))
    steps(lambda net: nn.RMSProp(net.trainable_params(), rate, decay=0.8, momentum=0.5))
    steps(lambda net: nn.Adagrad(net.trainable_params(), learning_rate=rate, weight_decay=0.01))
    steps(lambda net: nn.FTRL(net.trainable_params(), learning_rate=rate, l2=0.01))


@script
def groups_of_parameters():
    def make(net):
        decayed = [one for one in net.trainable_params() if "bias" not in one.name]
        others = [one for one in net.trainable_params() if "bias" in one.name]
        groups = [
            {"params": decayed, "weight_decay": 0.01, "lr": nn.CosineDecayLR(0.01, 0.1, 4)},
            {"params": others},
            {"order_params": net.trainable_params()},
        ]
        optimizer = nn.Momentum(groups, learning_rate=0.1, momentum=0.9)
        show(optimizer.is_group, optimizer.is_group_lr, [one.name for one in optimizer.parameters])
        return optimizer

    steps(make)


@script
def schedules_of_the_rate():
    step = Tensor(3, ms.int32)
    show(nn.CosineDecayLR(0.01, 0.1, 4)(step), nn.ExponentialDecayLR(0.1, 0.9, 4, is_stair=True)(step))
    show(nn.NaturalExpDecayLR(0.1, 0.9, 4)(step), nn.InverseDecayLR(0.1, 0.9, 4)(step), nn.WarmUpLR(0.1, 10)(step))
    show(nn.PolynomialDecayLR(0.1, 0.01, 4, 0.5, update_decay_steps=True)(Tensor(9, ms.int32)))

    class WarmThenDecay(LearningRateSchedule):
        def __init__(self):
            super().__init__()
            self.warm, self.decay = nn.WarmUpLR(0.1, 2), nn.PolynomialDecayLR(0.1, 0.0, 6, 1.0)

        def construct(self, global_step):
            return ops.select(global_step < 2, self.warm(global_step), self.decay(global_step))

    steps(lambda net: nn.SGD(net.trainable_params(), WarmThenDecay()))


@script
def an_optimizer_of_ones_own():
    class Plain(nn.Optimizer):
        def __init__(self, params, learning_rate=0.1):
            super().__init__(learning_rate, params)
            self.moments = self.parameters.clone(prefix="moment", init="zeros")
            self.assign = ops.Assign()

        def construct(self, gradients):
            rate = self.get_lr()
            for parameter, moment, gradient in zip(self.parameters, self.moments, gradients, strict=True):
                moment = self.assign(moment, moment * 0.9 + gradient)
                self.assign(parameter, parameter - rate * moment)
            return gradients

    steps(lambda net: Plain(net.trainable_params(), 0.05))


# -- cells and layers -------------------------------------------------------------------------------------------------


@script
def the_surface_of_cells():
    net = Net()
    print([one.name for one in net.trainable_params()], [name for name, _ in net.parameters_and_names()])
    print([(name, type(cell).__name__) for name, cell in net.cells_and_names()][1:], list(net.name_cells()))
    net.dense1.weight.requires_grad = False
    print([one.name for one in net.trainable_params()], [one.name for one in net.untrainable_params()])
    print(net.training, net.set_train().training, net.dense1.training, net.cls_name, len(list(net.cells())))
    print(
        list(net.parameters_dict()),
        sum(one.size if isinstance(one.size, int) else one.numel() for one in net.get_parameters()),
    )
    for name, parameter in net.parameters_and_names():
        print(name, tuple(parameter.shape), parameter.requires_grad)


@script
def containers_of_cells():
    chain = nn.SequentialCell([nn.Dense(2, 3), nn.ReLU()])
    chain.append(nn.Dense(3, 1))
    cells = nn.CellList([nn.Dense(2, 2) for _ in range(2)])
    cells.extend([nn.ReLU()])
    cells.insert(0, nn.Tanh())
    print(len(chain), len(cells), [one.name for one in chain.get_parameters()], [type(one).__name__ for one in cells])
    named = nn.CellDict({"a": nn.Dense(2, 2), "b": nn.ReLU()})
    print(list(named.keys()), type(named["b"]).__name__, len(chain[:2]))
    show(fixed(chain)(Tensor(rows(2, 2))))


@script
def a_recurrent_network():
    class Reader(nn.Cell):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(6, 4, embedding_table=Tensor(rows(6, 4)))
            self.lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True, bidirectional=True)
            self.head = nn.Dense(6, 2)

        def construct(self, ids):
            output, (hidden, _) = self.lstm(self.embedding(ids))
            return self.head(output[:, -1]), hidden

    result, hidden = fixed(Reader())(Tensor([[1, 2, 5], [0, 3, 4]], ms.int32))
    show(result, hidden.shape)


@script
def recurrent_cells_of_one_step():
    x, h = Tensor(rows(2, 3)), Tensor(rows(2, 4))
    show(fixed(nn.GRUCell(3, 4))(x, h), fixed(nn.RNNCell(3, 4))(x, h), fixed(nn.LSTMCell(3, 4))(x, (h, h)))
    output, state = fixed(nn.GRU(3, 4))(Tensor(rows(5, 2, 3)), Tensor(rows(1, 2, 4)))
    show(output[-1], state)
    output, state = fixed(nn.RNN(3, 4, nonlinearity="relu"))(Tensor(rows(5, 2, 3)), Tensor(rows(1, 2, 4)))
    show(output[-1], state)


@script
def convolutions_of_one_dimension():
    show(fixed(nn.Conv1d(3, 2, 3, has_bias=True))(Tensor(rows(2, 3, 5))))
    show(fixed(nn.Conv1d(3, 2, 2, stride=2, pad_mode="valid"))(Tensor(rows(2, 3, 5))))
    show(fixed(nn.Conv1dTranspose(3, 2, 3, stride=2, pad_mode="pad"))(Tensor(rows(1, 3, 4))))


@script
def layers_of_attention():
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.0, batch_first=True)
    show(fixed(layer)(Tensor(rows(2, 3, 4))))
    output, weights = fixed(nn.MultiheadAttention(4, 2, batch_first=True))(*[Tensor(rows(2, 3, 4))] * 3)
    show(output, weights)


@script
def normalisations():
    x = Tensor(rows(2, 4, 3, 3))
    show(
        fixed(nn.GroupNorm(2, 4))(x)[0, 0],
        fixed(nn.LayerNorm((4, 3, 3), begin_norm_axis=1, begin_params_axis=1))(x)[0, 0],
    )
    norm = nn.BatchNorm2d(4, momentum=0.8)
    norm.set_train()
    norm(x)
    show(norm.moving_mean, norm.moving_variance, norm.gamma.name, norm.set_train(False)(x)[1, 1])


@script
def losses_of_ones_own():
    class Weighted(LossBase):
        def __init__(self, reduction="mean"):
            super().__init__(reduction)
            self.abs = ops.Abs()

        def construct(self, base, target):
            return self.get_loss(self.abs(base - target), weights=2.0)

    a, b = Tensor(rows(2, 3)), Tensor(rows(2, 3, scale=2.0))
    show(Weighted()(a, b), Weighted("sum")(a, b), Weighted("none")(a, b))


@script
def losses():
    a, b = Tensor(rows(2, 3)), Tensor(rows(2, 3, scale=0.3) + np.float32(0.5))
    labels = Tensor([2, 0], ms.int32)
    for loss in (
        nn.MSELoss("sum"),
        nn.L1Loss("none"),
        nn.SmoothL1Loss(beta=0.5),
        nn.HuberLoss(),
        nn.BCEWithLogitsLoss(),
    ):
        show(loss(a, b))
    show(nn.CrossEntropyLoss(label_smoothing=0.1)(a, labels), nn.NLLLoss()(ops.log_softmax(a), labels))
    show(nn.CosineEmbeddingLoss()(a, b, Tensor([1, -1], ms.int32)), nn.KLDivLoss()(ops.log_softmax(a), ops.softmax(b)))
    show(nn.MultiLabelSoftMarginLoss()(a, (b > 0.5).astype(ms.float32)))
    show(nn.PoissonNLLLoss()(a, b), nn.MarginRankingLoss()(a, b, b))
    show(nn.GaussianNLLLoss()(a, b, ops.ones_like(a)), nn.HingeEmbeddingLoss()(a, Tensor(np.sign(rows(2, 3)))))


@script
def initial_values():
    show(initializer("ones", [2, 2], ms.float32), initializer("zeros", [2], ms.int32), initializer(0.5, [1, 2]))
    show(nn.Dense(2, 2, weight_init="ones", bias_init=1.0)(Tensor(rows(1, 2))))
    for word in (
        "normal",
        "xavier_uniform",
        "he_uniform",
        Normal(0.1),
        XavierUniform(),
        HeNormal(),
        TruncatedNormal(0.02),
    ):
        print(tuple(initializer(word, [3, 4], ms.float32).init_data().shape))
    show(initializer(ms.common.initializer.Identity(), [2, 2]), initializer(ms.common.initializer.Dirac(), [2, 2, 1]))
    for cell in [nn.Dense(3, 2)]:
        cell.weight.set_data(initializer(ms.common.initializer.Constant(0.25), cell.weight.shape, cell.weight.dtype))
        show(cell.weight)

    class Sevens(Initializer):
        def _initialize(self, arr):
            arr[:] = 7

    show(initializer(Sevens(), [2, 2], ms.float32))


# -- tensors, parameters, functions --------------------------------------------------------------------------------------


@script
def the_surface_of_parameters():
    p = Parameter(Tensor(rows(2, 2)), name="table", requires_grad=True)
    print(p.name, tuple(p.shape), p.requires_grad, p.asnumpy()[0, 0])
    p.set_data(Tensor(np.ones((2, 2), np.float32)))
    ops.assign(p, p * 2)
    show(p, p.value(), p.layerwise_parallel, p.parallel_optimizer)
    pair = ParameterTuple((p, Parameter(Tensor(1.0), name="scale")))
    copies = pair.clone(prefix="moment", init="zeros")
    print([one.name for one in copies], [float(one.asnumpy().sum()) for one in copies])

    class Holder(nn.Cell):
        def __init__(self):
            super().__init__()
            self.w = Parameter(initializer("ones", [2]))
            self.step = Parameter(Tensor(0, ms.int32), name="global_step", requires_grad=False)

        def construct(self, x):
            self.step += 1
            return x * self.w

    holder = Holder()
    show(holder(Tensor(rows(2))), holder.step, [one.name for one in holder.get_parameters()])


@script
def functions_of_functions():
    grad_all = ops.GradOperation(get_all=True)
    show(grad_all(lambda x, y: x * x * y)(Tensor(3.0), Tensor(2.0)))
    show(ms.grad(lambda x, y: x**2 + y, grad_position=(0, 1))(Tensor(3.0), Tensor(2.0)))
    show(ms.grad(ms.grad(lambda x: x**3))(Tensor(2.0)))
    show(ops.stop_gradient(Tensor(1.0)), ms.grad(lambda x: x * ops.stop_gradient(x))(Tensor(3.0)))
    net = fixed(nn.Dense(2, 1))
    (value, aux), grads = ms.value_and_grad(lambda x: (net(x).sum(), x), 0, net.trainable_params(), True)(
        Tensor(rows(2, 2))
    )
    show(value, aux, grads)

    def double(x):
        return x * 2

    show(ms.jit(double)(Tensor(1.0)), ms.vmap(double)(Tensor(rows(2, 2))))

    def squares(x):
        return x * x

    show(ms.jacrev(squares)(Tensor([1.0, 2.0])), ms.jvp(squares, Tensor(3.0), Tensor(1.0)))


@script
def maps_over_trees():
    scale = ops.MultitypeFuncGraph("scale")

    @scale.register("Tensor", "Tensor")
    def _tensors(factor, x):
        return x * factor

    @scale.register("Tensor", "Tuple")
    def _tuple(factor, x):
        return len(x)

    mapped = ops.HyperMap()
    show(mapped(ops.partial(scale, Tensor(2.0)), (Tensor(1.0), Tensor(3.0))), scale(Tensor(1.0), (1, 2)))
    show(ops.Map()(F.add, (Tensor(1.0), Tensor(2.0)), (Tensor(3.0), Tensor(4.0))))
    show(F.shape(Tensor(rows(2, 3))), F.reshape(Tensor(rows(4)), (2, 2)), F.cast(Tensor(1.5), ms.int32))


@script
def numpys_functions():
    a = mnp.arange(6).reshape(2, 3)
    print(a, a.dtype == ms.int32, mnp.ones((2,)), mnp.full((2,), 3), mnp.eye(2), mnp.linspace(0, 1, 3))
    show(mnp.dot(mnp.ones((2, 2)), mnp.ones((2, 2))), mnp.where(a > 2, a, 0), mnp.concatenate((a, a), 0).shape)
    show(
        mnp.mean(mnp.array([1.0, 2.0])),
        mnp.cumsum(a, 1),
        mnp.split(a, 3, 1)[0],
        mnp.isclose(mnp.array(1.0), mnp.array(1.0)),
    )
    show(
        mnp.tile(a, (1, 2)),
        mnp.squeeze(a[None]).shape,
        mnp.amax(a),
        mnp.std(mnp.array([1.0, 3.0])),
        mnp.cross(mnp.array([1.0, 0, 0]), mnp.array([0, 1.0, 0])),
    )


@script
def mint_functions():
    x = mint.ones((2, 3)) + Tensor([0.0, 1.0, 2.0])
    show(mint.sum(x, dim=1), mint.cat((x, x), dim=0).shape, mint.nn.functional.softmax(x, dim=-1), mint.max(x))
    layer = mint.nn.Linear(3, 2)
    layer.weight.set_data(Tensor(rows(2, 3)))
    layer.bias.set_data(Tensor(rows(2)))
    show(layer(x), mint.where(x > 1, x, x * 0), mint.matmul(x, x.T))


@script
def scattered_updates():
    table = Parameter(Tensor(rows(4, 2)), name="table")
    ids = Tensor([1, 3], ms.int32)
    show(ops.scatter_add(table, ids, Tensor(rows(2, 2))), ops.scatter_update(table, ids, ops.zeros((2, 2), ms.float32)))
    show(ops.tensor_scatter_max(Tensor(rows(3, 2)), Tensor([[0, 1]], ms.int32), Tensor([9.0])))
    show(ops.unsorted_segment_min(Tensor(rows(3, 2)), Tensor([0, 1, 0], ms.int32), 2))
    show(ops.unsorted_segment_max(Tensor(rows(3, 2)), Tensor([0, 1, 0], ms.int32), 2))


# -- data and the rest ----------------------------------------------------------------------------------------------------


@script
def metrics_by_hand():
    accuracy, top, mae = nn.Accuracy("classification"), nn.TopKCategoricalAccuracy(2), nn.MAE()
    scores, labels = Tensor(rows(4, 3)), Tensor([0, 1, 2, 0], ms.int32)
    for metric in (accuracy, top):
        metric.clear()
        metric.update(scores, labels)
        print(metric.eval())
    for metric in (mae, nn.MSE()):
        metric.clear()
        metric.update(scores, Tensor(rows(4, 3, scale=2.0)))
        print(metric.eval())
    for metric in (nn.Precision("classification"), nn.Recall("classification"), nn.F1()):
        metric.clear()
        metric.update(ops.softmax(scores), labels)
        print(metric.eval())
    confusion = nn.ConfusionMatrix(num_classes=3)
    confusion.clear()
    confusion.update(scores.argmax(1), labels)
    print(confusion.eval())


@script
def contexts_and_types():
    ms.set_context(device_target="CPU")
    print(ms.get_context("mode") == ms.PYNATIVE_MODE, context.get_context("device_target"))
    print(
        ms.dtype_to_nptype(ms.int32).__name__,
        ms.float32 == ms.common.dtype.float32,
        ms.pytype_to_dtype(bool) == ms.bool_,
    )
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.STAND_ALONE)
    print(ms.get_auto_parallel_context("parallel_mode"))
    ms.set_seed(3)
    print(ms.get_seed(), ms.is_tensor(Tensor(1)), isinstance(Parameter(Tensor(1.0)), Tensor))


@script
def gradients_that_are_accumulated():
    net, loss_fn = fixed(Net()), nn.CrossEntropyLoss()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    inner = optimizer.parameters.clone(prefix="accumulate_", init="zeros")
    grad_fn = ms.value_and_grad(lambda x, y: loss_fn(net(x), y) / 2, None, optimizer.parameters)
    mapped = ops.HyperMap()
    for step, (data, label) in enumerate(batches().create_tuple_iterator(), start=1):
        loss, grads = grad_fn(data, label)
        mapped(ops.partial(ops.assign_add), inner, grads)
        if step % 2 == 0:
            optimizer(inner)
            mapped(ops.partial(ops.assign), inner, mapped(ops.ZerosLike(), inner))
        print(loss)
    show(net.dense2.bias)


def results():
    """Return the printed text of each script, or what it raised."""
    found = {}
    here = os.getcwd()
    for name, run in SCRIPTS.items():
        printed = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
            os.chdir(folder)
            try:
                run()
            except Exception as error:
                first = str(error).splitlines()[0] if str(error) else ""
                printed.write(f"{type(error).__name__}: {first}\n")
                if "-v" in sys.argv:
                    import traceback

                    traceback.print_exc()
            finally:
                os.chdir(here)
        found[name] = printed.getvalue()
    return found


if __name__ == "__main__":
    ms.set_context(mode=ms.PYNATIVE_MODE)
    print(json.dumps(results(), indent=0))
