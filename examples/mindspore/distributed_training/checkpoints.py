"""Saving and loading of the parameters of distributed training, in the modes of the document.

The listings of MindSpore's document, in its order and word for word: docs/reference/mindspore_documents.md.
"""

# Left open by the document: see left_open.py
from left_open import enter_own_folder, name_newest, train
from networks import SemiAutoParallelNet
from resnet50_distributed_training import *

enter_own_folder()

# Listing 12: saving in auto parallel mode
from mindspore.train.callback import ModelCheckpoint, CheckpointConfig

def test_train_cifar(epoch_size=10):
    context.set_auto_parallel_context(parallel_mode=ParallelMode.AUTO_PARALLEL, gradients_mean=True)
    loss_cb = LossMonitor()
    dataset = create_dataset(data_path)
    batch_size = 32
    num_classes = 10
    net = resnet50(batch_size, num_classes)
    loss = SoftmaxCrossEntropyExpand(sparse=True)
    opt = Momentum(filter(lambda x: x.requires_grad, net.get_parameters()), 0.01, 0.9)
    ckpt_config = CheckpointConfig()
    ckpt_callback = ModelCheckpoint(prefix='auto_parallel', directory="./ckpt_" + str(get_rank()) + "/", config=ckpt_config)
    model = Model(net, loss_fn=loss, optimizer=opt)
    model.train(epoch_size, dataset, callbacks=[loss_cb, ckpt_callback], dataset_sink_mode=True)

# Left open by the document
test_train_cifar(epoch_size=2)
name_newest("./ckpt_" + str(get_rank()))

# Listing 13: loading, in auto parallel mode
from mindspore import load_checkpoint, load_param_into_net

net = resnet50(batch_size=32, num_classes=10)
# The parameter for load_checkpoint is a .ckpt file which has been successfully saved
param_dict = load_checkpoint('...')
load_param_into_net(net, param_dict)

# Left open by the document
from left_open import ResNet50, Momentum, SoftmaxCrossEntropyWithLogits, create_ckpt_file_list, create_custom_dataset
from left_open import train_to_retrain

train_to_retrain("./train_strategy.ckpt")

# Listing 14: training again on several devices
from mindspore import load_distributed_checkpoint, context
from mindspore.communication import init

context.set_context(mode=context.GRAPH_MODE)
init()
context.set_auto_parallel_context(full_batch=True, parallel_mode='semi_auto_parallel', strategy_ckpt_load_file='./train_strategy.ckpt')
# create model and dataset
dataset = create_custom_dataset()
resnet = ResNet50()
opt = Momentum()
loss = SoftmaxCrossEntropyWithLogits()
model = Model(resnet, loss, opt)
# infer train strategy
layout_dict = model.infer_train_layout(dataset, True, 100)
# load into `model.train_network` net
ckpt_file_list = create_ckpt_file_list()
load_distributed_checkpoint(model.train_network, ckpt_file_list, layout_dict)
# training the model
model.train(2, dataset)

# Left open by the document
context.reset_auto_parallel_context()

# Listing 15: data parallel mode instead of auto parallel mode
context.set_auto_parallel_context(parallel_mode=ParallelMode.AUTO_PARALLEL, gradients_mean=True)
context.set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, gradients_mean=True)

# Left open by the document
context.reset_auto_parallel_context()

# Listing 16: saving in semi auto parallel mode
...
net = SemiAutoParallelNet()
...
ckpt_config = CheckpointConfig()
ckpt_callback = ModelCheckpoint(prefix='semi_auto_parallel', config=ckpt_config)

# Left open by the document
train(lambda: net, "semi_auto_parallel", [ckpt_callback])
name_newest(".")

# Listing 17: loading in semi auto parallel mode
net = SemiAutoParallelNet()
# The parameter for load_checkpoint is a .ckpt file which has been successfully saved
param_dict = load_checkpoint('...')
load_param_into_net(net, param_dict)

# Listing 18: one checkpoint for all, or one for each card
# config checkpoint
ckpt_config = CheckpointConfig(keep_checkpoint_max=1)
# config checkpoint
ckpt_config = CheckpointConfig(keep_checkpoint_max=1, integrated_save=False)

# Left open by the document
ckpt_callback = ModelCheckpoint(prefix='each_card', config=ckpt_config)
train(SemiAutoParallelNet, "semi_auto_parallel", [ckpt_callback])
