"""Cells, layers, losses and initializers in MindSpore's words compute what torch's do."""

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import msrun.mindspore as ms
from msrun.errors import UsageError
from msrun.mindspore import initializer, nn, ops
from msrun.runtime import WithLoss, init_parameters, no_init_parameters, optim


class Network(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=True)
        self.body = nn.SequentialCell(nn.Dense(4, 8, weight_init="normal"), nn.ReLU())
        self.head = nn.Dense(8, 3)

    def construct(self, x):
        return self.head(self.body(x))


def test_subclass_of_a_cell_may_change_construct():
    class Doubled(Network):
        def construct(self, x):
            return 2 * super().construct(x)

    network = Doubled()
    x = torch.randn(2, 4)
    assert torch.equal(network(x), 2 * network.head(network.body(x)))


def test_modes_fusion_recompute_and_strategies_are_set_on_a_cell():
    network = Network()
    assert not network.set_train(False).head.training
    assert network.set_grad() is network
    assert network.head.set_comm_fusion(3).weight.comm_fusion == 3
    network.body.recompute()
    assert network.head.shard(((1, 1), (2, 1))) is network.head


def test_sequential_cells_come_with_names_too():
    first, x = nn.Dense(2, 3), torch.randn(2, 2)
    assert torch.equal(nn.SequentialCell(OrderedDict(first=first, second=nn.Tanh()))(x), torch.tanh(first(x)))


def test_dense_takes_initial_values_and_an_activation():
    torch.manual_seed(0)
    dense = nn.Dense(3, 2, weight_init=np.arange(6.0).reshape(2, 3), bias_init="ones", activation=torch.relu)
    assert torch.equal(dense.weight, torch.arange(6.0).reshape(2, 3))
    assert torch.equal(dense(-torch.ones(1, 3)), torch.zeros(1, 2))
    assert nn.Dense(3, 2, has_bias=False).bias is None
    assert nn.Dense(3, 2, weight_init=0.5).weight.eq(0.5).all()
    with pytest.raises(UsageError, match=r"shape \(2,\) for a weight of shape \(2, 3\)"):
        nn.Dense(3, 2, weight_init=[1.0, 2.0])


@pytest.mark.parametrize("word", sorted(initializer.NAMES))
def test_initial_values_are_the_same_when_they_are_deferred(word):
    torch.manual_seed(5)
    layer = (
        (lambda: nn.Conv1d(6, 5, 1, weight_init=word)) if word == "dirac" else lambda: nn.Dense(6, 5, weight_init=word)
    )
    at_once = layer()
    torch.manual_seed(5)
    with no_init_parameters():
        deferred = layer()
    init_parameters(deferred)
    assert torch.equal(at_once.weight, deferred.weight)


def test_initializers_have_the_spread_that_their_formulas_say():
    torch.manual_seed(0)
    shape = (400, 300)
    spreads = {
        initializer.Normal(0.2): 0.2,
        initializer.TruncatedNormal(0.2): 0.2 * 0.8796,  # deviation of a normal cut at two deviations
        initializer.Uniform(0.3): 0.3 / math.sqrt(3),
        initializer.XavierUniform(): math.sqrt(2 / 700),
        initializer.XavierNormal(): math.sqrt(2 / 700),
        initializer.HeUniform(): math.sqrt(2 / 300),
        initializer.HeNormal(mode="fan_out"): math.sqrt(2 / 400),
    }
    for one, spread in spreads.items():
        assert float(initializer.initializer(one, shape).std()) == pytest.approx(spread, rel=0.02)
    assert ms.Tensor(shape=(2, 3), init="ones", dtype=ms.float16).dtype == torch.float16
    with pytest.raises(UsageError, match="unknown"):
        initializer.initializer("norml", shape)


@pytest.mark.parametrize("size", [7, 8, 9])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_same_padding_gives_size_over_stride_and_the_odd_row_comes_last(size, kernel, stride, dilation):
    conv = nn.Conv2d(2, 3, kernel, stride, dilation=dilation, has_bias=True)
    images = torch.randn(1, 2, size, size)
    result = conv(images)
    out = -(-size // stride)
    assert result.shape == (1, 3, out, out)
    reach = (kernel - 1) * dilation + 1
    padding = max((out - 1) * stride + reach - size, 0)
    padded = torch.zeros(1, 2, size + padding, size + padding)
    before = padding // 2
    padded[:, :, before : before + size, before : before + size] = images
    assert torch.equal(result, F.conv2d(padded, conv.weight, conv.bias, stride, 0, dilation))


def test_other_paddings_are_torchs():
    images = torch.randn(1, 2, 6, 6)
    conv = nn.Conv2d(2, 3, 3, pad_mode="pad", padding=(1, 0, 2, 1))
    assert torch.equal(conv(images), F.conv2d(F.pad(images, (2, 1, 1, 0)), conv.weight))
    conv = nn.Conv2d(2, 2, 3, pad_mode="pad", padding=2, group=2)
    assert torch.equal(conv(images), F.conv2d(images, conv.weight, padding=2, groups=2))
    assert nn.Conv2d(2, 3, 3, pad_mode="valid")(images).shape == (1, 3, 4, 4)
    with pytest.raises(UsageError, match='padding needs pad_mode="pad"'):
        nn.Conv2d(2, 3, 3, padding=1)
    with pytest.raises(UsageError, match="one of same, valid, pad"):
        nn.MaxPool2d(3, pad_mode="full")


def test_pools_with_same_padding_look_inside_the_image_alone():
    images = -torch.rand(1, 1, 5, 5) - 1
    largest, average = nn.MaxPool2d(3, 2, pad_mode="same")(images), nn.AvgPool2d(3, 2, pad_mode="same")(images)
    assert largest.shape == average.shape == (1, 1, 3, 3)
    for row in range(3):
        for column in range(3):
            window = images[0, 0, max(0, 2 * row - 1) : 2 * row + 2, max(0, 2 * column - 1) : 2 * column + 2]
            assert largest[0, 0, row, column] == window.max()
            assert average[0, 0, row, column] == pytest.approx(window.mean().item(), rel=1e-6)


@pytest.mark.parametrize("kind", [nn.MaxPool1d, nn.AvgPool1d])
def test_pool_of_other_images_than_its_name_says_is_refused(kind):
    with pytest.raises(UsageError, match="an input of 3 dimensions, not 4"):
        kind(3, 2, pad_mode="same")(torch.zeros(1, 1, 4, 4))


def test_small_layers_take_mindspores_arguments():
    x = torch.randn(2, 3, 4)
    assert nn.Dropout(keep_prob=0.9).p == pytest.approx(0.1)
    assert nn.Dropout(p=0.3).p == 0.3
    with pytest.raises(UsageError, match="give one of them"):
        nn.Dropout()
    norm = nn.LayerNorm((4,), epsilon=1e-3)
    with pytest.raises(UsageError, match="must be -1"):
        nn.LayerNorm((4,), begin_norm_axis=1)(x)
    assert torch.equal(nn.LayerNorm((4,), begin_norm_axis=2, epsilon=1e-3)(x), norm(x))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint8])
def test_losses_take_class_numbers_of_any_integer_type(dtype):
    scores, labels = torch.randn(4, 5), torch.tensor([0, 4, 2, 2])
    right = F.cross_entropy(scores, labels)
    narrow = labels.to(dtype)
    assert torch.equal(nn.CrossEntropyLoss()(scores, narrow), right)
    assert torch.equal(nn.NLLLoss()(scores.log_softmax(1), narrow), F.nll_loss(scores.log_softmax(1), labels))
    assert torch.equal(ops.cross_entropy(scores, narrow), right)
    each = nn.SoftmaxCrossEntropyWithLogits(sparse=True)(scores, narrow)
    assert torch.allclose(each.mean(), right)
    hot = F.one_hot(labels, 5)
    assert torch.allclose(nn.SoftmaxCrossEntropyWithLogits(reduction="mean")(scores, hot), right)
    with pytest.raises(UsageError, match="one of mean, sum, none"):
        nn.SoftmaxCrossEntropyWithLogits(reduction="avg")


def test_cells_with_a_loss_give_what_training_and_evaluation_need():
    network = Network()
    joined = nn.WithLossCell(network, nn.CrossEntropyLoss())
    assert isinstance(joined, WithLoss)
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32)
    loss, outputs, label = nn.WithEvalCell(network, nn.CrossEntropyLoss())(x, y)
    assert torch.equal(loss, joined(x, y))
    assert torch.equal(outputs, network(x))
    assert label is y


def test_optimizers_are_torchs_with_other_names():
    pairs = [
        (lambda p: nn.Lamb(p, 0.01, 0.8), lambda p: optim.Lamb(p, 0.01, (0.8, 0.999))),
        (lambda p: nn.LazyAdam(p, 0.01, use_nesterov=True), lambda p: optim.LazyAdam(p, 0.01, use_nesterov=True)),
        (lambda p: nn.FTRL(p, 0.2, 0.01, l1=0.1), lambda p: optim.FTRL(p, 0.2, 0.01, l1=0.1)),
    ]
    for ours, theirs in pairs:
        torch.manual_seed(0)
        first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
        mine, right = ours([first]), theirs([second])
        for _ in range(3):
            gradient = torch.randn(3)
            mine([gradient.clone()])
            second.grad = gradient
            right.step()
        assert torch.equal(first, second)


def test_an_optimizers_loss_scale_without_a_manager_that_multiplies_by_it_is_refused():
    net = nn.Dense(2, 1)
    scaled = nn.Momentum(net.trainable_params(), 0.1, 0.9, loss_scale=1024.0)
    with pytest.raises(UsageError, match="multiplied by 1 and the gradients are divided by 1024"):
        ms.Model(net, nn.MSELoss(), scaled)
    ms.Model(net, nn.MSELoss(), scaled, loss_scale_manager=ms.FixedLossScaleManager(1024.0, False))
