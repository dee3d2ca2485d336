"""Model on several ranks, in every mode: what one process evaluates, predicts and trains, and requests to end."""

import pytest
import torch
from local_parts import local
from on_ranks import on_ranks
from torch import nn

from msrun.data import NumpySlicesDataset
from msrun.runtime import (
    AutoParallel,
    Callback,
    GradAccumulation,
    Model,
    OnRequestExit,
    Pipeline,
    WithLoss,
    get_group_size,
    get_rank,
    shard,
)

LOSS = nn.CrossEntropyLoss()
ROWS, BATCHES = 8, 3
slow_on_two = on_ranks(2, slow=True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 6)).double()


def _tensor_parallel(net):
    shard(net[0], ((1, 1), (get_group_size(), 1)))
    return AutoParallel(WithLoss(net, LOSS))


def _pipeline(net):
    stages = {"0": 0, "1": 0, "2": 0, "3": 1, "4": 1}
    wrapped = Pipeline(WithLoss(net, LOSS), 2, stage_config=stages)
    return AutoParallel(wrapped).pipeline(2).dataset_strategy("full_batch")


def _replicas(net):
    return AutoParallel(WithLoss(net, LOSS), parallel_mode="data_parallel")


MODES = {
    "semi_auto": lambda net: AutoParallel(WithLoss(net, LOSS)),
    "hsdp level3": lambda net: AutoParallel(WithLoss(net, LOSS)).hsdp(threshold=0, optimizer_level="level3"),
    "tensor parallel": _tensor_parallel,
    "full batch": lambda net: AutoParallel(WithLoss(net, LOSS)).dataset_strategy("full_batch"),
    "accumulation": lambda net: AutoParallel(GradAccumulation(WithLoss(net, LOSS), 2)),
    "pipeline": _pipeline,
    "data_parallel": _replicas,
    "FSDP2": lambda net: _replicas(net).hsdp(threshold=0, optimizer_level="level3"),
}


def batches():
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(ROWS, 8, dtype=torch.float64, generator=generator),
            torch.randint(0, 6, (ROWS,), dtype=torch.int32, generator=generator),
        )
        for _ in range(BATCHES)
    ]


def own(name):
    """Return what this rank passes."""
    if name in ("full batch", "pipeline"):
        return list(batches())
    rank, size = get_rank(), get_group_size()
    return [tuple(value.chunk(size)[rank] for value in batch) for batch in batches()]


class Losses(Callback):
    def __init__(self):
        self.losses: list[float] = []

    def on_train_step_end(self, context):
        self.losses.append(context.loss)


@slow_on_two
@pytest.mark.parametrize("name", MODES)
def test_evaluation_and_prediction_are_those_of_one_process(name):
    """Before a training step and after it, with dropout, which evaluation must leave out."""
    net, right = network(), network()
    parallel = MODES[name](net)
    metrics = {"accuracy", "loss", "top_5_accuracy"}
    model = Model(parallel, optimizer=torch.optim.SGD(parallel.parameters(), 0.1), metrics=metrics)
    alone = Model(right, LOSS, metrics=metrics)
    for _ in range(2):
        assert model.eval(own(name)) == pytest.approx(alone.eval(batches()), rel=0, abs=1e-9)
        check_prediction(name, model, alone)
        assert net.training
        model.train(1, own(name))
        right.load_state_dict({key: value.clone() for key, value in parallel.state_dict().items()})


def check_prediction(name, model, alone):
    scores = model.predict(own(name)[0][0])
    whole = alone.predict(batches()[0][0])
    if name == "pipeline":
        assert (scores is None) == (get_rank() < get_group_size() // 2)
    if scores is not None:
        expected = whole if len(scores) == ROWS else whole.chunk(get_group_size())[get_rank()]
        torch.testing.assert_close(scores, expected)
        assert not scores.requires_grad


@slow_on_two
def test_layouts_are_those_of_training():
    """Without a step before: `infer_train_layout` cuts the network as training does, and takes no data away."""
    for name in ("hsdp level3", "tensor parallel", "full batch"):
        net, right = network(), network()
        columns = tuple(torch.cat(column).numpy() for column in zip(*batches(), strict=True))
        shards = 1 if name == "full batch" else get_group_size()
        data = NumpySlicesDataset(columns, num_shards=shards, shard_id=get_rank() % shards)
        data = data.batch(ROWS // shards)
        parallel, losses = MODES[name](net), Losses()
        model = Model(parallel, optimizer=torch.optim.SGD(parallel.parameters(), 0.1))
        layouts = model.infer_train_layout(data)
        assert layouts.keys() == right.state_dict().keys()
        assert parallel.plan is not None
        shapes = {key: tuple(local(value).shape) for key, value in net.named_parameters()}
        before = model.predict(own(name)[0][0])
        model.train(1, data, losses)
        assert shapes == {key: tuple(local(value).shape) for key, value in net.named_parameters()}
        if name != "full batch":
            assert any(shapes[key] != tuple(value.shape) for key, value in right.named_parameters())
        assert not torch.equal(before, model.predict(own(name)[0][0]))
        assert model.infer_predict_layout(own(name)[0][0]).keys() == layouts.keys()


class AskSelf(Callback):
    """The request of one rank, in the middle of its second step."""

    def __init__(self, request, rank):
        self._request, self._rank = request, rank

    def on_train_step_begin(self, context):
        if get_rank() == self._rank and context.cur_step_num == 1:
            self._request._ask(15, None)


@slow_on_two
def test_one_rank_is_asked_to_end():
    for rank in range(get_group_size()):
        request, losses = OnRequestExit(save_ckpt=False), Losses()
        parallel = MODES["semi_auto"](network())
        model = Model(parallel, optimizer=torch.optim.SGD(parallel.parameters(), 0.1))
        model.train(4, own("semi_auto"), [request, AskSelf(request, rank), losses])
        assert len(losses.losses) == 3, "the step after the one in which a rank was asked"
