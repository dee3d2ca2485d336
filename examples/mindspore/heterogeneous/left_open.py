"""What the document leaves open: where `validator` comes from, the data, the network around the table, the training."""

import numpy as np
from mindspore import Model, Tensor, context, nn, set_seed
from mindspore._checkparam import Validator as validator
from mindspore.communication import init
from mindspore.train.callback import LossMonitor

WORDS, WIDTH, ROWS = 200, 16, 32


def train(lookup, optimizer, epochs=5):
    """Learn a number for each word, with the table and the optimizer of the listings."""
    init()
    set_seed(1)
    context.set_auto_parallel_context(parallel_mode="semi_auto_parallel", full_batch=True)
    draw = np.random.RandomState(0)
    words = draw.randint(0, WORDS, (4, ROWS, 2)).astype(np.int32)
    batches = [(Tensor(rows), Tensor((rows / WORDS).sum(1, keepdims=True).astype(np.float32))) for rows in words]
    table = lookup(WORDS, WIDTH, "normal", "CPU")
    net = nn.SequentialCell(table, nn.Flatten(), nn.Dense(2 * WIDTH, 1, weight_init="normal", bias_init="zeros"))
    model = Model(net, loss_fn=nn.MSELoss(), optimizer=optimizer(net.trainable_params(), 1e-2, weight_decay=1e-3))
    model.train(epochs, batches, callbacks=[LossMonitor()])
