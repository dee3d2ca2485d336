"""The same training with gradient accumulation: MINI_STEPS batches (4) for one step of the optimizer.

bash run_grad_accu.sh DATA_PATH RANK_SIZE
SCRIPT=resnet50_distributed_training_grad_accu.py bash run_msrun.sh DATA_PATH RANK_SIZE
"""

import os

from cifar import create_dataset, data_path
from model_accu import Model_ACCU
from resnet import resnet50

from msrun.mindspore import context, set_seed
from msrun.mindspore.communication import init
from msrun.mindspore.context import ParallelMode
from msrun.mindspore.nn import Momentum
from msrun.runtime import SoftmaxCrossEntropyExpand

context.set_context(mode=context.GRAPH_MODE)
init()


def test_train_cifar(epoch_size=int(os.getenv("EPOCHS", "10"))):
    context.set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, gradients_mean=True, compat="torch")
    set_seed(1)
    dataset = create_dataset(data_path(), batch_size=int(os.getenv("BATCH_SIZE", "32")))
    net = resnet50(batch_size=32, num_classes=10)
    loss = SoftmaxCrossEntropyExpand(sparse=True)
    opt = Momentum(filter(lambda x: x.requires_grad, net.get_parameters()), 0.01, 0.9)
    model = Model_ACCU(net, loss_fn=loss, optimizer=opt)
    model.train(int(os.getenv("MINI_STEPS", "4")), epoch_size, dataset)


if __name__ == "__main__":
    test_train_cifar()
