"""Say what a script in MindSpore's words gets that sets as little as possible: data sets, losses, weights, digits.

mindspore_defaults.py RESULT    RESULT.RANK gets {what: value} of this rank
"""

import json
import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, nn, train
from mindspore.communication import get_group_size, get_rank, init

WORDS = ("gradients_mean", "parameter_broadcast", "dataset_strategy", "full_batch", "search_mode", "gradient_fp32_sync")
MODES = ("data_parallel", "hybrid_parallel")
X = np.sin(np.arange(21, dtype=np.float32)).reshape(7, 3)
Y = np.cos(np.arange(7, dtype=np.float32)).reshape(7, 1)


def numbers(count, **parameters):
    rows = np.arange(count, dtype=np.float32).reshape(count, 1)
    return ds.NumpySlicesDataset((rows, rows), ["x", "y"], **parameters)


def epochs(data, count=1):
    """Return the column x of each step of each epoch."""
    steps = data.create_dict_iterator(num_epochs=count, output_numpy=True)
    return [[np.asarray(step["x"]).flatten().tolist() for step in steps] for _ in range(count)]


def checksum(values):
    return sum(place * value for place, value in enumerate(values, start=1))


def of_data():
    size, rank = get_group_size(), get_rank()
    mine = {"num_shards": size, "shard_id": rank}
    found = {
        "seed unless set": ds.config.get_seed(),
        "in order, whole": epochs(numbers(7, shuffle=False).batch(2)),
        "steps": [numbers(7).batch(2).get_dataset_size(), numbers(7, **mine).batch(3).get_dataset_size()],
        "in order, sharded": epochs(numbers(7, shuffle=False, **mine).batch(3)),
        "the first samples": epochs(numbers(7, shuffle=False, num_samples=3).batch(2)),
        "shuffled shards without a seed": epochs(numbers(10, **mine).batch(5), 2),
    }
    ms.set_seed(7)
    return found | {
        "seed that set_seed has set": ds.config.get_seed(),
        "shuffled": epochs(numbers(9).batch(9), 3),
        "shuffled, some samples": len(epochs(numbers(10, num_samples=3).batch(3))[0][0]),
        "shuffled shards": epochs(numbers(9, **mine).batch(5), 3),
        "shuffled shards, the first samples": epochs(numbers(10, num_samples=3, **mine).batch(3), 2),
        "many, shuffled": checksum(epochs(numbers(3000).batch(3000))[0][0]),
        "too many for two places of a number": checksum(epochs(numbers(70000).batch(70000))[0][0]),
    }


class Lines:
    """Take what is printed meanwhile."""

    def __enter__(self):
        self.before, sys.stdout = sys.stdout, self
        self.lines = [""]
        return self.lines

    def write(self, text):
        self.lines[-1:] = (self.lines[-1] + text).split("\n")
        return len(text)

    def flush(self):
        pass

    def __exit__(self, *_):
        sys.stdout = self.before
        self.lines.pop()


def trained(mode, *, is_sharded=True, **words):
    """Return what LossMonitor prints, and the weights that are left."""
    ms.reset_auto_parallel_context()
    ms.set_auto_parallel_context(parallel_mode=mode, **words)
    parts = {"num_shards": get_group_size(), "shard_id": get_rank()} if is_sharded else {}
    data = ds.NumpySlicesDataset((X, Y), ["x", "y"], shuffle=False, **parts).batch(3)
    if not is_sharded:
        data = data.take(2)
    net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
    model = ms.Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.05, 0.9))
    with Lines() as lines:
        model.train(5, data, callbacks=[train.LossMonitor()], dataset_sink_mode=False)
    return {"lines": lines, "weights": [one.asnumpy().tolist() for one in net.trainable_params()]}


def of_copies():
    """Return the loss of two copies of the batch, and its gradient."""
    ms.reset_auto_parallel_context()
    net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
    copies = ms.parallel.nn.MicroBatchInterleaved(nn.WithLossCell(net, nn.MSELoss()), 2)
    weights = net.trainable_params()
    loss, gradients = ms.value_and_grad(copies, None, weights)(Tensor(X[:6]), Tensor(Y[:6]))
    return {"loss": float(loss), "gradients": [one.asnumpy().tolist() for one in gradients]}


FOUND = {
    "context": lambda: ms.reset_auto_parallel_context() or {word: ms.get_auto_parallel_context(word) for word in WORDS},
    "data": of_data,
    **{mode: lambda mode=mode: trained(mode) for mode in MODES},
    "data_parallel, mean": lambda: trained(MODES[0], gradients_mean=True),
    "copies": of_copies,
    "digits": lambda: (
        [str(Tensor(x, ms.float32)) for x in (2.3024087, 4.514171123504639, 1e-5)]
        + [repr(float(Tensor(2.3024087, ms.float32)))]
    ),
}
if ms.__name__ != "mindspore":  # whose CPU has these modes for one rank alone
    FOUND |= {
        "alone, whole": lambda: trained("stand_alone", is_sharded=False),
        "semi_auto, full_batch": lambda: trained("semi_auto_parallel", is_sharded=False, full_batch=True),
        "semi_auto, the same rows on each rank": lambda: trained("semi_auto_parallel", is_sharded=False),
        "auto, dataset_strategy": lambda: trained(
            "auto_parallel", is_sharded=False, dataset_strategy="full_batch", gradients_mean=True
        ),
    }


if __name__ == "__main__":
    ms.set_context(device_target="CPU", mode=ms.PYNATIVE_MODE)
    init()
    Path(f"{sys.argv[1]}.{get_rank()}").write_text(json.dumps({name: find() for name, find in FOUND.items()}))
