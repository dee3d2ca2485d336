"""ResNet-50 on CIFAR-10 on several ranks: the script of MindSpore's distributed training example.

    bash run.sh DATA_PATH RANK_SIZE          # one process per device, as in the document
    bash run_msrun.sh DATA_PATH RANK_SIZE    # the same under msrun

DATA_PATH is a folder with CIFAR-10's files, "" is scikit-learn's handwritten digits in their format. MODE is
data_parallel (default), semi_auto, hybrid or auto, which searches strategies. EPOCHS, IMAGE_SIZE (224) and SAMPLES
make it smaller: IMAGE_SIZE=32 SAMPLES=256 takes a minute on a laptop. One process,
`python resnet50_distributed_training.py`, trains too.
"""

import os

from cifar import create_dataset, data_path
from msrun.mindspore.train.callback import CheckpointConfig, LossMonitor, ModelCheckpoint
from resnet import dense_head, resnet50

from msrun.mindspore import Model, Parameter, Tensor, context, nn, ops, set_seed
from msrun.mindspore.communication import get_group_size, get_rank, init
from msrun.mindspore.context import ParallelMode
from msrun.mindspore.nn import Momentum
from msrun.runtime import SoftmaxCrossEntropyExpand, all_to_all, latest_checkpoint, reduce_scatter

context.set_context(mode=context.GRAPH_MODE)
init()

MODES = {
    "data_parallel": ParallelMode.DATA_PARALLEL,
    "semi_auto": ParallelMode.SEMI_AUTO_PARALLEL,
    "hybrid": ParallelMode.HYBRID_PARALLEL,
    "auto": ParallelMode.AUTO_PARALLEL,
}


class HybridHead(nn.Cell):
    """The last layer, cut by hand: each rank has its part of the 2048 features and of their weights."""

    def __init__(self, in_channels, num_classes):
        super().__init__()
        whole = dense_head(in_channels, num_classes)
        part = whole.weight.detach().chunk(get_group_size(), 1)[get_rank()]
        self.weight = Parameter(Tensor(part), layerwise_parallel=True)
        self.bias = whole.bias
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, x):
        x = all_to_all(x, split_dim=1, concat_dim=0)  # own features of all ranks' images
        x = self.matmul(x, self.weight)
        return reduce_scatter(x) + self.bias  # all features of own images


def build_network(mode):
    """Return ResNet-50 as a mode wants it."""
    if mode == "hybrid":
        return resnet50(batch_size=32, num_classes=10, head=HybridHead)
    net = resnet50(batch_size=32, num_classes=10)
    if mode == "semi_auto":
        parts = get_group_size()
        net.end_point.shard(((1, parts), (1, parts)))
    return net


def test_train_cifar(epoch_size=int(os.getenv("EPOCHS", "10"))):
    mode = os.getenv("MODE", "data_parallel")
    context.set_auto_parallel_context(parallel_mode=MODES[mode], gradients_mean=True, compat="torch")
    set_seed(1)
    loss_cb = LossMonitor()
    batch_size = int(os.getenv("BATCH_SIZE", "32"))
    dataset = create_dataset(data_path(), batch_size=batch_size)
    net = build_network(mode)
    loss = SoftmaxCrossEntropyExpand(sparse=True)
    opt = Momentum(filter(lambda x: x.requires_grad, net.get_parameters()), 0.01, 0.9)
    callbacks = [loss_cb]
    directory = os.getenv("CHECKPOINTS")
    if directory:
        ckpt_config = CheckpointConfig(save_checkpoint_steps=dataset.get_dataset_size(), keep_checkpoint_max=2)
        callbacks.append(ModelCheckpoint(prefix="resnet", directory=directory, config=ckpt_config))
    model = Model(net, loss_fn=loss, optimizer=opt, metrics={"accuracy"})
    newest = latest_checkpoint(directory) if directory else None
    sink = os.getenv("GRAPH_OP_RUN") != "1"  # MindSpore's switch of the mode without sink
    model.train(epoch_size, dataset, callbacks=callbacks, dataset_sink_mode=sink, resume_from=newest)
    if os.getenv("EVAL") == "1":
        print("accuracy:", model.eval(create_dataset(data_path(), batch_size=batch_size, usage="test"))["accuracy"])


if __name__ == "__main__":
    test_train_cifar()
