"""What the document leaves open: where the data is, that pytest calls no init(), names without an import, what is trained.

`python left_open.py` writes scikit-learn's handwritten digits as CIFAR-10's files, and prints their folder.
"""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy

if __name__ == "__main__":
    from msrun.data import write_digits_as_cifar10

    print(write_digits_as_cifar10(Path(__file__).parent / "data" / "cifar10_digits"))
    raise SystemExit

from mindspore import Model, Tensor, context, nn, ops, set_seed
from mindspore import Parameter as Parameter
from mindspore.communication import get_group_size, get_rank, init
from mindspore.nn import Momentum as _Momentum
from mindspore.train.callback import LossMonitor

init()
set_seed(1)
data_path = os.environ["DATA_PATH"]
np = SimpleNamespace(  # the document draws 128/2 columns, which is no whole number for numpy
    random=SimpleNamespace(rand=lambda *shape: numpy.random.rand(*map(int, shape))), float32=numpy.float32
)


def train(network, parallel_mode, callbacks=()):
    """Train a network of the document, of 512 inputs and one output, two epochs."""
    context.reset_auto_parallel_context()
    full_batch = parallel_mode != "hybrid_parallel"
    context.set_auto_parallel_context(parallel_mode=parallel_mode, full_batch=full_batch)
    rows = numpy.random.RandomState(1).rand(8, 512).astype(numpy.float32) / 1000
    net = network()
    model = Model(net, loss_fn=nn.MSELoss(), optimizer=_Momentum(net.trainable_params(), 1e-5, 0.9))
    model.train(2, [(Tensor(rows), Tensor(numpy.zeros(8, numpy.float32)))], callbacks=[LossMonitor(), *callbacks])


# -- of the listings about checkpoints --------------------------------------------------------------------------------


def enter_own_folder():
    """Make the folder that run.sh gives each rank, and work there."""
    folder = Path(f"device{get_rank()}")
    folder.mkdir(exist_ok=True)
    os.chdir(folder)


_networks = []
SoftmaxCrossEntropyWithLogits = partial(nn.SoftmaxCrossEntropyWithLogits, sparse=True, reduction="mean")


def name_newest(folder, name="..."):
    """Let the name that the document has for a checkpoint, three dots, be the newest one of a folder."""
    link = Path(name)
    link.unlink(missing_ok=True)
    link.symlink_to(max(Path(folder).resolve().glob("*.ckpt"), key=lambda path: path.stat().st_mtime))


def create_custom_dataset():
    """Two batches of images, the same on every rank."""
    draw = numpy.random.RandomState(0)
    images = draw.rand(2, 8, 3, 224, 224).astype(numpy.float32)
    return [(Tensor(batch), Tensor(draw.randint(0, 10, 8).astype(numpy.int32))) for batch in images]


def ResNet50():  # noqa: N802 - the document's
    """Return the network of resnet.py."""
    from resnet import resnet50

    _networks.append(resnet50(8, 10))
    return _networks[-1]


def Momentum():  # noqa: N802 - the document's
    """Return the optimizer of the network that was made last."""
    return _Momentum(_networks[-1].trainable_params(), 0.01, 0.9)


def train_to_retrain(strategy_file):
    """Train the network once, with a file of its strategies and a checkpoint of each rank's own."""
    from mindspore.train.callback import CheckpointConfig, ModelCheckpoint

    context.reset_auto_parallel_context()
    context.set_auto_parallel_context(
        full_batch=True, parallel_mode="semi_auto_parallel", strategy_ckpt_save_file=strategy_file
    )
    model = Model(ResNet50(), SoftmaxCrossEntropyWithLogits(), Momentum())
    saving = ModelCheckpoint("train", "./train", CheckpointConfig(integrated_save=False))
    model.train(1, create_custom_dataset(), callbacks=[saving])
    context.reset_auto_parallel_context()


def create_ckpt_file_list():
    """Return the newest checkpoint of each rank, when all have written theirs."""
    name_newest("./train", "newest.ckpt")
    ops.AllReduce()(Tensor([1.0]))
    return [str(Path(f"../device{rank}/newest.ckpt").resolve()) for rank in range(get_group_size())]
