"""The same training on GPUs: `init` joins with nccl, one process for each GPU.

bash run_gpu.sh DATA_PATH RANK_SIZE
"""

import os

from cifar import create_dataset, data_path
from msrun.mindspore.train.callback import LossMonitor
from resnet import resnet50

from msrun.mindspore import Model, context, set_seed
from msrun.mindspore.communication import init
from msrun.mindspore.context import ParallelMode
from msrun.mindspore.nn import Momentum
from msrun.runtime import SoftmaxCrossEntropyExpand

context.set_context(mode=context.GRAPH_MODE, device_target=os.getenv("DEVICE_TARGET", "GPU"))
init()


def test_train_cifar(epoch_size=int(os.getenv("EPOCHS", "10"))):
    context.set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, gradients_mean=True, compat="torch")
    set_seed(1)
    dataset = create_dataset(data_path(), batch_size=int(os.getenv("BATCH_SIZE", "32")))
    net = resnet50(batch_size=32, num_classes=10)
    loss = SoftmaxCrossEntropyExpand(sparse=True)
    opt = Momentum(filter(lambda x: x.requires_grad, net.get_parameters()), 0.01, 0.9)
    model = Model(net, loss_fn=loss, optimizer=opt)
    model.train(epoch_size, dataset, callbacks=[LossMonitor()], dataset_sink_mode=True)


if __name__ == "__main__":
    test_train_cifar()
