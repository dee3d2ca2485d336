"""`test_train_cifar` of MindSpore's distributed training example with AUTO_PARALLEL, as the document has it.

usage: document_cifar.py EXAMPLE BATCH_SIZE
"""

import functools
import sys

sys.path.insert(0, sys.argv[1])
import cifar
from msrun.mindspore.train.callback import LossMonitor
from resnet import resnet50

from msrun.mindspore import Model, context, set_seed
from msrun.mindspore.communication import init
from msrun.mindspore.context import ParallelMode
from msrun.mindspore.nn import Momentum
from msrun.runtime import SoftmaxCrossEntropyExpand

context.set_context(mode=context.GRAPH_MODE)
init()
data_path = cifar.data_path()
create_dataset = functools.partial(cifar.create_dataset, batch_size=int(sys.argv[2]))


def test_train_cifar(epoch_size=10):
    context.set_auto_parallel_context(parallel_mode=ParallelMode.AUTO_PARALLEL, gradients_mean=True, compat="torch")
    loss_cb = LossMonitor()
    dataset = create_dataset(data_path)
    batch_size = 32
    num_classes = 10
    net = resnet50(batch_size, num_classes)
    loss = SoftmaxCrossEntropyExpand(sparse=True)
    opt = Momentum(filter(lambda x: x.requires_grad, net.get_parameters()), 0.01, 0.9)
    model = Model(net, loss_fn=loss, optimizer=opt)
    model.train(epoch_size, dataset, callbacks=[loss_cb], dataset_sink_mode=True)


set_seed(1)
test_train_cifar(epoch_size=2)
