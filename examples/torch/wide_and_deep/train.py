"""Wide & Deep: will a user click? The tables of categories lie on the device, on the host, shared out, or on servers.

Start with `bash run.sh [DATA_PATH] [WAY]`. DATA_PATH holds train.txt and test.txt in Criteo's format; without it the
program trains on made-up clicks. The network is that of Cheng et al. 2016: a linear part over all columns ("wide"),
which remembers, and a network over embeddings of the categories ("deep"), which generalises; their scores are added.
One process gives the same losses: `python train.py`.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn

from msrun.data import CriteoDataset, write_clicks
from msrun.runtime import (
    AUC,
    AutoParallel,
    Callback,
    EmbeddingLookup,
    LossMonitor,
    Model,
    WithLoss,
    get_group_size,
    get_rank,
    init,
    no_init_parameters,
    optim,
    release,
    set_param_ps,
    set_ps_context,
    set_target,
)

WAYS = {
    "device": "everything on the rank's device",
    "host": "the tables, and what looks rows up in them, on the host",
    "lookup": "each rank has a part of the tables on its host, and trains the rows that batches name",
    "server": "the tables, and their optimizer, on parameter servers (msrun --server_num)",
}

parser = argparse.ArgumentParser()
parser.add_argument("--way", choices=WAYS, default="host", help="; ".join(f"{k}: {v}" for k, v in WAYS.items()))
way = parser.parse_args().way

INTEGERS, CATEGORIES = 13, 26
HASH_SIZE = int(os.getenv("HASH_SIZE", "2000"))
BATCH_SIZE = int(os.getenv("BATCH_SIZE", "256"))

init()
torch.manual_seed(1)


def create_dataset(usage):
    path = os.getenv("DATA_PATH") or write_clicks(Path(__file__).parent.parent / "data" / "clicks")
    dataset = CriteoDataset(path, usage, shuffle=usage == "train", hash_size=HASH_SIZE)
    return dataset.batch(BATCH_SIZE // get_group_size())


def create_table(width, std):
    """Return the rows of all values of all categories; zeros where `std` is 0."""
    rows = CATEGORIES * HASH_SIZE

    def fill(table):
        nn.init.normal_(table, std=std) if std else nn.init.zeros_(table)

    if way == "lookup":
        return EmbeddingLookup(rows, width, fill, target="CPU", slice_mode="table_row_slice")
    table = nn.Embedding(rows, width)
    fill(table.weight)
    return table


class Wide(nn.Module):
    """A weight for every integer, and one for every value of every category."""

    def __init__(self):
        super().__init__()
        self.weights = create_table(1, std=0.0)

    def forward(self, ids):
        return self.weights(ids).sum(1)


class WideAndDeep(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.wide = Wide()
        self.linear = nn.Linear(INTEGERS, 1)
        self.embedding = create_table(width, std=0.05)
        self.deep = nn.Sequential(
            nn.Linear(INTEGERS + CATEGORIES * width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, dense, ids):
        deep = self.deep(torch.cat([dense, self.embedding(ids).flatten(1)], 1))
        return (self.wide(ids) + self.linear(dense) + deep).flatten()


class PrintMetrics(Callback):
    """Print what every evaluation has measured."""

    def on_eval_end(self, run_context):
        values = ", ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in run_context.metrics.items())
        print(f"epoch: {run_context.cur_epoch_num}, test: {values}")


with no_init_parameters():
    net = WideAndDeep()
    optimizer = (optim.LazyAdam if way == "lookup" else torch.optim.Adam)(net.parameters(), lr=1e-3)

if way == "host":
    set_target(net.wide, "cpu")
    set_target(net.embedding, "cpu")
elif way == "server":
    set_ps_context(enable_ps=True)
    set_param_ps(net.wide, init_in_server=True)
    set_param_ps(net.embedding, init_in_server=True)

mode = "data_parallel" if way == "server" else "semi_auto"
network = AutoParallel(WithLoss(net, nn.BCEWithLogitsLoss()), mode)
model = Model(network, optimizer=optimizer, metrics={"auc": AUC(from_logits=True)})
callbacks = [LossMonitor(16), PrintMetrics()]
model.fit(int(os.getenv("EPOCHS", "2")), create_dataset("train"), create_dataset("test"), callbacks=callbacks)

if get_group_size() > 1 and get_rank() == 0:
    print(network.plan.explain())
release()
