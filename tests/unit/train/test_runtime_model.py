"""Model, its callbacks and its loggers."""

import csv
import json
import math
import os
import re
import signal
import struct
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import contract
from msrun.agent.processes.progress_board import ProgressBoard
from msrun.errors import ParallelError, UsageError
from msrun.runtime import (
    AUC,
    Accuracy,
    AutoParallel,
    Callback,
    CheckpointConfig,
    CSVLogger,
    EarlyStopping,
    JSONLogger,
    LearningRateScheduler,
    LossMonitor,
    Model,
    ModelCheckpoint,
    OnRequestExit,
    RunContext,
    SoftmaxCrossEntropyExpand,
    TensorBoardLogger,
    TimeMonitor,
    WithLoss,
    latest_checkpoint,
    progress,
)


def data(count=3):
    return [(torch.ones(2, 4) * (index + 1), torch.zeros(2, 2)) for index in range(count)]


def model(lr=0.01):
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    return Model(network, F.mse_loss, torch.optim.SGD(network.parameters(), lr))


def test_training_is_reported_to_msrun_without_init_too(tmp_path, monkeypatch):
    board = ProgressBoard(tmp_path / "progress", 2)
    board.create()
    monkeypatch.setenv(contract.RANK, "1")
    monkeypatch.setenv(contract.MSRUN_PROGRESS, str(tmp_path / "progress"))
    monkeypatch.setattr(progress, "_is_looked_for", False)
    monkeypatch.setattr(progress, "_record", None)
    for epochs, first in ((2, 0), (5, 3)):
        model().train(epochs, data(3), initial_epoch=first)
        told = board.read(1)
        assert (told.steps, told.total) == (6, 6)
        assert told.steps_per_s(told.step_at) is not None
    board.close()


def recorder(name, moments):
    """Return a callback that writes down every moment."""

    class Recorder(Callback):
        pass

    for moment in ("train begin", "train epoch begin", "train step end", "train epoch end", "train end"):

        def note(_, context, moment=moment):
            place = f"{context.cur_epoch_num}.{context.step_in_epoch}/{context.cur_step_num}"
            moments.append(f"{name} {moment} {place} of {context.epoch_num}, {context.batch_num}")

        setattr(Recorder, f"on_{moment.replace(' ', '_')}", note)
    return Recorder()


def test_training_is_the_plain_torch_loop():
    trained = model(0.1)
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    trained.train(2, data())
    for _ in range(2):
        for x, y in data():
            F.mse_loss(network(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(trained.network.network.weight, network.weight)


def test_callbacks_are_told_in_order():
    moments = []
    model().train(2, data(2), [recorder("a", moments), recorder("b", moments)])
    assert moments[::2] == [
        "a train begin 0.0/0 of 2, 2",
        "a train epoch begin 1.0/0 of 2, 2",
        "a train step end 1.1/1 of 2, 2",
        "a train step end 1.2/2 of 2, 2",
        "a train epoch end 1.2/2 of 2, 2",
        "a train epoch begin 2.0/2 of 2, 2",
        "a train step end 2.1/3 of 2, 2",
        "a train step end 2.2/4 of 2, 2",
        "a train epoch end 2.2/4 of 2, 2",
        "a train end 2.2/4 of 2, 2",
    ]
    assert moments[1::2] == [f"b{moment[1:]}" for moment in moments[::2]]


def test_a_loader_of_torch_is_told_the_epoch_and_its_dataset_alone_is_refused():
    pairs = TensorDataset(torch.ones(6, 4), torch.zeros(6, 2))
    sampler = DistributedSampler(pairs, 2, 0)
    model().train(3, DataLoader(pairs, 1, sampler=sampler))
    assert sampler.epoch == 2
    with pytest.raises(UsageError, match=r"TensorDataset is a torch Dataset, .* give a DataLoader, or Gener"):
        model().train(1, pairs)


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 1, 2, 3]), (2, [2, 1, 3]), (6, [3]), (7, []), (0, [])])
def test_loss_monitor_prints_every_so_many_steps(every, steps, capsys):
    model().train(2, data(3), LossMonitor(every))
    lines = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"epoch: [12] step: (\d), loss is \d+\.\d+", line) for line in lines]
    assert [int(line[1]) for line in found if line] == steps and all(found)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("callbacks", [None, LossMonitor(0)])
def test_loss_that_is_not_finite_ends_the_training(value, callbacks):
    steps = [*data(1), (torch.full((2, 4), value), torch.zeros(2, 2))]
    with pytest.raises(ParallelError, match=r"rank 0: epoch: 1 step: 2, loss is (nan|inf): training has diverged"):
        model().train(1, steps, callbacks)


def test_on_an_accelerator_a_loss_that_is_not_finite_is_found_without_waiting_in_every_step():
    context = RunContext(model(), 1, 3)
    context._first_bad = torch.zeros((), dtype=torch.int64)
    context._first_bad = torch.where(~torch.isfinite(torch.tensor(math.nan)), 2, context._first_bad)
    with pytest.raises(ParallelError, match="the loss of step 2 is not finite"):
        context.check_finite()


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()])
def test_model_without_optimizer_cannot_train_but_predict_without_the_loss(loss):
    network, batches = classes()
    alone = Model(network, loss)
    with pytest.raises(ParallelError, match="no optimizer; give Model"):
        alone.train(1, batches)
    scores = alone.predict(batches[0][0])
    assert network.training
    assert torch.equal(scores, network.eval()(batches[0][0]))
    assert not scores.requires_grad


class Losses(Callback):
    """Notes where the training is whenever a step's end is told."""

    def __init__(self):
        self.seen: list[tuple[int, int, int]] = []
        self.losses: list[float] = []

    def on_train_step_end(self, context):
        self.seen.append((context.cur_epoch_num, context.step_in_epoch, context.cur_step_num))
        self.losses.append(context.loss)


@pytest.mark.parametrize(
    ("epochs", "words", "seen"),
    [(2, {}, [(1, 3, 3), (2, 3, 6)]), (4, {"sink_size": 2}, [(1, 2, 2), (2, 2, 4), (3, 2, 6), (4, 2, 8)])],
)
def test_sink_mode_tells_callbacks_once_an_epoch_of_the_asked_length_and_trains_the_same(epochs, words, seen):
    step_by_step, sunk = Losses(), Losses()
    model().train(3, data(3), step_by_step)
    model().train(epochs, data(3), sunk, dataset_sink_mode=True, **words)
    assert sunk.seen == seen
    assert sunk.losses == [step_by_step.losses[step - 1] for *_, step in seen]


def test_data_of_dicts_and_networks_that_return_their_loss_first_train():
    class Named(nn.Linear):
        def forward(self, x, y):
            scores = super().forward(x)
            return F.mse_loss(scores, y), scores

    torch.manual_seed(0)
    network, losses, right = Named(4, 2), Losses(), Losses()
    named = [{"x": x, "y": y} for x, y in data()]
    Model(network, optimizer=torch.optim.SGD(network.parameters(), 0.01)).train(1, named, losses)
    model().train(1, data(), right)
    assert losses.losses == right.losses


def classes():
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 6))
    return network, [(torch.randn(5, 4), torch.randint(0, 6, (5,), dtype=torch.int32)) for _ in range(3)]


def test_eval_counts_over_all_batches_and_leaves_the_network_training():
    network, batches = classes()
    loss = nn.CrossEntropyLoss()
    trained = Model(network, loss, metrics={"accuracy", "loss", "top_1_accuracy", "top_5_accuracy"})
    values = trained.eval(batches)
    assert network.training
    network.eval()
    scores, labels = torch.cat([network(x) for x, _ in batches]), torch.cat([y for _, y in batches]).long()
    assert values["accuracy"] == values["top_1_accuracy"] == pytest.approx((scores.argmax(1) == labels).double().mean())
    assert values["top_5_accuracy"] == pytest.approx((scores.argmin(1) != labels).double().mean())
    assert values["loss"] == pytest.approx(loss(scores, labels).item(), rel=1e-6)


def test_metrics_of_torchmetrics_form_and_one_hot_labels_are_taken():
    class Highest:
        def reset(self):
            self.value = torch.tensor(-math.inf)

        def update(self, outputs, label):
            self.value = self.value.max(outputs.max())

        def compute(self):
            return self.value

    network, batches = classes()
    hot = [(x, F.one_hot(y.long(), 6).float()) for x, y in batches]
    values = Model(network, nn.CrossEntropyLoss(), metrics={"high": Highest(), "acc": Accuracy()}).eval(hot)
    assert values["acc"] == Model(network, nn.CrossEntropyLoss(), metrics="acc").eval(batches)["acc"]
    network.eval()
    assert values["high"] == pytest.approx(max(network(x).max().item() for x, _ in batches))


@pytest.mark.parametrize("from_logits", [False, True])
def test_auc_is_the_share_of_pairs_in_the_right_order(*, from_logits):
    draw = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(300, generator=draw), torch.randint(2, (300,), generator=draw).float()
    scores = (scores + labels).round(decimals=1)  # so that some are equal
    metric = AUC(from_logits=from_logits)
    for part, of_part in zip(scores.split(64), labels.split(64), strict=True):
        metric.update(None, (part if from_logits else part.sigmoid()).unsqueeze(1), of_part)
    high, low = scores[labels == 1].unsqueeze(1), scores[labels == 0]
    right = ((high > low).float() + (high == low).float() / 2).mean().item()
    assert metric.eval() == pytest.approx(right, abs=1e-6)
    metric.clear()
    metric.update(None, torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
    assert metric.eval() == 1.0


def test_eval_network_of_the_user_says_where_loss_outputs_and_label_are():
    network, batches = classes()

    class Turned(nn.Module):
        def forward(self, x, y):
            scores = network(x)
            return y, F.cross_entropy(scores, y.long()), scores

    own = Model(network, eval_network=Turned(), eval_indexes=(1, 2, 0), metrics={"acc", "loss"}).eval(batches)
    network.eval()
    assert own == pytest.approx(Model(network, nn.CrossEntropyLoss(), metrics={"acc", "loss"}).eval(batches))


def test_fit_evaluates_between_epochs_and_early_stopping_listens():
    network, batches = classes()
    trained = Model(network, nn.CrossEntropyLoss(), torch.optim.SGD(network.parameters(), 0.0), {"loss"})
    told = []

    class Look(Callback):
        def on_train_epoch_end(self, context):
            told.append((context.cur_epoch_num, context.metrics.get("eval_loss", math.nan)))

    trained.fit(9, batches, batches, callbacks=[EarlyStopping("eval_loss", patience=1), Look()])
    assert [epoch for epoch, _ in told] == [1, 2, 3]  # the rate is 0: nothing improves after the first
    told.clear()
    trained.fit(4, batches, batches, valid_frequency=[2], callbacks=Look())
    assert [math.isnan(value) for _, value in told] == [True, False, False, False]


@pytest.mark.parametrize("monitor", ["eval_accuracy", "loss"])
def test_early_stopping_knows_which_way_is_better(monitor):
    stopping = EarlyStopping(monitor, patience=0)
    context = RunContext(None, 9, 1)
    better = -1.0 if monitor == "loss" else 1.0
    for value, stops in ((0.5, False), (0.5 + 0.1 * better, False), (0.5, True)):
        context.net_outputs, context.metrics = value, {"eval_accuracy": value}
        stopping.on_train_epoch_end(context)
        assert context.stop_requested == stops


def score(*metrics, loss=None, batches=None):
    network, own = classes()
    Model(network, loss, metrics={*metrics} or None).eval(batches or own)


class Scores(nn.Linear):
    def forward(self, x):
        return {"scores": super().forward(x)}


def train_scores():
    network = Scores(4, 2)
    Model(network, optimizer=torch.optim.SGD(network.parameters(), 0.1)).train(1, [(torch.ones(1, 4),)])


def counted(scores, labels):
    metric = AUC()
    metric.update(None, scores, labels)
    metric.eval()


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        *((lambda every=every: LossMonitor(every), "a whole number, 0 or more") for every in (-1, 1.5, "1")),
        *(
            (
                lambda size=size: model().train(1, data(), dataset_sink_mode=True, sink_size=size),
                "a whole number of steps, or -1 for all",
            )
            for size in (0, -2, 1.5)
        ),
        (train_scores, "the network returned dict, not a loss: give Model a loss_fn"),
        (lambda: model().train(1, []), "the dataset yields no batch"),
        (lambda: Model(AutoParallel(nn.Linear(2, 2)), F.mse_loss), r"AutoParallel\(WithLoss\(net, loss\)\)"),
        (
            lambda: EarlyStopping("eval_los").on_train_epoch_end(RunContext(None, 1, 1, metrics={"eval_acc": 1.0})),
            "known are loss, eval_acc",
        ),
        (lambda: counted(torch.zeros(2, 2), torch.zeros(2)), r"a score for each label, got \(2, 2\) and \(2,\)"),
        (lambda: counted(torch.tensor([-1.0]), torch.zeros(1)), "from_logits=True"),
        (lambda: counted(torch.tensor([0.5]), torch.tensor([2])), "labels must be 0 or 1"),
        (lambda: counted(torch.tensor([0.5]), torch.tensor([1])), "samples of both classes"),
        (lambda: score("acuracy", loss=F.mse_loss), r"unknown metric.*accuracy.*known are"),
        (lambda: Model(nn.Linear(2, 2), F.mse_loss, metrics={"a": 3}), "no metric; give Accuracy"),
        (lambda: score(loss=F.mse_loss), "no metrics; give Model"),
        (lambda: score("acc"), "its outputs are not known; give Model a loss_fn"),
        (
            lambda: score("acc", loss=lambda x, _: x.mean(), batches=[(torch.randn(5, 4), torch.zeros(4))]),
            r"labels \(4,\) do not fit scores \(5, 6\)",
        ),
        (lambda: Model(nn.Linear(2, 2), amp_level="O3"), "one of O0, O1, O2, auto"),
        (lambda: Model(nn.Linear(2, 2), amp_level="o2"), "one of O0, O1, O2, auto"),
        (lambda: OnRequestExit(sig=None), "nobody could ask"),
    ],
)
def test_what_cannot_train_or_be_counted_is_refused(ask, words):
    with pytest.raises(ParallelError, match=words):
        ask()


class Rates(Callback):
    def __init__(self):
        self.seen: list[float] = []

    def on_train_step_begin(self, context):
        self.seen.append(context.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("make", "right"),
    [
        (lambda _: LearningRateScheduler(lambda rate, step: rate / (1 + step)), [0.1, 0.05, 0.05 / 3, 0.05 / 12]),
        (
            lambda optimizer: LearningRateScheduler(ExponentialLR(optimizer, 0.5), per="step"),
            [0.1, 0.05, 0.025, 0.0125],
        ),
        (lambda optimizer: LearningRateScheduler(ExponentialLR(optimizer, 0.5), per="epoch"), [0.1, 0.1, 0.05, 0.05]),
    ],
    ids=["function", "step", "epoch"],
)
def test_learning_rate_follows_a_function_or_a_scheduler_of_torch(make, right):
    trained, rates = model(0.1), Rates()
    trained.train(2, data(2), [make(trained.optimizer), rates])
    assert rates.seen == pytest.approx(right)


def test_callbacks_in_mindspores_older_words_are_called_and_may_end_the_training():
    told = []

    class Old(Callback):
        def begin(self, run_context):
            told.append("begin")

        def epoch_begin(self, run_context):
            told.append(("epoch", run_context.original_args().cur_epoch_num, run_context.original_args().epoch_num))

        def step_end(self, run_context):
            args = run_context.original_args()
            assert args.net_outputs.item() > 0
            told.append((args.cur_epoch_num, args.batch_num, args.cur_step_num))
            if args.cur_step_num == 2:
                run_context.request_stop()

        def epoch_end(self, run_context):
            told.append("epoch end")

        def end(self, run_context):
            told.append(run_context.get_stop_requested())

    model().train(2, data(3), Old())
    assert told == ["begin", ("epoch", 1, 2), (1, 3, 1), (1, 3, 2), "epoch end", True]


def test_time_monitor_prints_how_long_an_epoch_took(capsys):
    model().train(2, data(3), TimeMonitor())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"Train epoch time: [\d.]+ ms, per step time: [\d.]+ ms", lines[0])


def test_signal_ends_the_training_one_step_later_with_a_checkpoint(tmp_path):
    class Send(Callback):
        def on_train_step_begin(self, context):
            if context.cur_step_num == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    losses = Losses()
    callbacks = [OnRequestExit(directory=tmp_path, sig=signal.SIGUSR1), Send(), losses]
    model().train(5, data(3), callbacks)
    assert losses.seen[-1] == (1, 3, 3)
    assert signal.getsignal(signal.SIGUSR1) is before
    again, whole = Losses(), Losses()
    model().train(5, data(3), again, resume_from=latest_checkpoint(tmp_path))
    model().train(5, data(3), whole)
    assert losses.losses + again.losses == whole.losses


def test_file_ends_the_training_too(tmp_path):
    config, losses = tmp_path / "exit.json", Losses()

    class Write(Callback):
        def on_train_step_begin(self, context):
            config.write_text("{" if context.cur_step_num == 0 else '{"GracefulExit": 1}')

    model().train(5, data(3), [OnRequestExit(save_ckpt=False, config_file=config, sig=None), Write(), losses])
    assert losses.seen[-1] == (1, 3, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


@pytest.mark.parametrize("label", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, SoftmaxCrossEntropyExpand(sparse=True)])
def test_labels_of_any_integer_type_train(label, loss):
    network, batches = classes()
    losses = Losses()
    Model(network, loss, torch.optim.SGD(network.parameters(), 0.1)).train(
        1, [(x, y.to(label)) for x, y in batches], losses
    )
    assert len(losses.losses) == 3


def test_amp_level_computes_in_16_bits_and_unknown_levels_are_refused():
    seen = []
    network, batches = classes()
    network[2].register_forward_hook(lambda _module, _inputs, result: seen.append(result.dtype))
    trained = Model(network, nn.CrossEntropyLoss(), torch.optim.SGD(network.parameters(), 0.1), amp_level="O2")
    trained.train(1, batches)
    assert set(seen) == {torch.float16}
    assert network[2].weight.dtype == torch.float32


def test_auto_parallel_network_trains_alone_as_it_is():
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    step = AutoParallel(WithLoss(network, F.mse_loss))
    assert [name for name, _ in step.named_parameters()] == ["weight", "bias"]
    Model(step, optimizer=torch.optim.SGD(step.parameters(), 0.1)).train(2, data())
    right = model(0.1)
    right.train(2, data())
    assert torch.equal(network.weight, right.network.network.weight)


def test_callbacks_go_on_from_a_checkpoint(tmp_path):
    """A scheduler of torch and the patience of an early stop, cut after two of four epochs."""

    def run(folder, epochs, **more):
        trained, rates = model(0.1), Rates()
        scheduler = torch.optim.lr_scheduler.StepLR(trained.optimizer, 3, 0.5)
        stopping = EarlyStopping("loss", min_delta=1e9, patience=2)
        saving = ModelCheckpoint("net", folder, CheckpointConfig(save_checkpoint_steps=2))
        trained.train(epochs, data(2), [LearningRateScheduler(scheduler), stopping, rates, saving], **more)
        return rates.seen

    whole = run(tmp_path / "whole", 9)
    assert len(whole) == 8, "the first epoch is an improvement, then three are not"
    cut = tmp_path / "cut"
    assert run(cut, 2) + run(cut, 9, resume_from=latest_checkpoint(cut)) == whole


# -- loggers: rows of rank 0, added to what is there, by Model or by a loop of one's own ------------------------------


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_model_logs_every_step_into_csv_and_json(tmp_path):
    model().train(2, data(), [CSVLogger(tmp_path / "new" / "run.csv"), JSONLogger(tmp_path / "run.jsonl", every=2)])
    rows, lines = read_csv(tmp_path / "new" / "run.csv"), read_lines(tmp_path / "run.jsonl")
    assert list(rows[0]) == ["time", "attempt", "step", "loss", "epoch", "learning_rate", "steps_per_s"]
    assert [(row["step"], row["epoch"]) for row in rows] == [(str(n), str(1 + (n > 3))) for n in range(1, 7)]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert [line["loss"] for line in lines] == [float(rows[n - 1]["loss"]) for n in (2, 4, 6)]
    assert all(line["steps_per_s"] > 0 and line["learning_rate"] == 0.01 for line in lines)
    assert float(rows[0]["loss"]) > float(rows[3]["loss"])


def test_restarted_run_adds_rows_that_tell_their_attempt(tmp_path, monkeypatch):
    for attempt in (0, 1):
        monkeypatch.setenv(contract.TORCHELASTIC_RESTART_COUNT, str(attempt))
        model().train(1, data(), [CSVLogger(tmp_path / "run.csv"), JSONLogger(tmp_path / "run.jsonl")])
    expected = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert [(int(row["attempt"]), int(row["step"])) for row in read_csv(tmp_path / "run.csv")] == expected
    assert [(line["attempt"], line["step"]) for line in read_lines(tmp_path / "run.jsonl")] == expected


def test_line_that_a_crash_has_cut_stays_apart_and_numbers_that_are_not_finite_are_null_or_nan(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1}\n{"st')
    with JSONLogger(path) as log, CSVLogger(tmp_path / "run.csv") as table:
        for each in (log, table):
            each.log_metrics({"loss": math.nan, "norm": math.inf}, 2)
        assert path.read_text().count("\n") == 3  # at once, not when it is closed
    first, cut, last = path.read_text().splitlines()
    assert (first, cut) == ('{"step": 1}', '{"st')
    assert (json.loads(last)["loss"], json.loads(last)["norm"]) == (None, None)
    assert [row["loss"] for row in read_csv(tmp_path / "run.csv")] == ["nan"]


@pytest.mark.parametrize(("rank", "plain", "own"), [("0", True, True), ("3", False, True)])
def test_rank_0_alone_logs_unless_all_are_to(tmp_path, monkeypatch, rank, plain, own):
    monkeypatch.setenv(contract.RANK, rank)
    for all_ranks in (False, True):
        with CSVLogger(tmp_path / "run.csv", all_ranks=all_ranks) as log:
            log.log_metrics({"loss": torch.tensor(0.25), "is_best": True}, 7)
    assert (tmp_path / "run.csv").exists() is plain
    assert (tmp_path / f"run.rank_{rank}.csv").exists() is own
    row = read_csv(tmp_path / f"run.rank_{rank}.csv")[0]
    assert (row["step"], row["loss"], row["is_best"]) == ("7", "0.25", "True")


def test_columns_of_a_csv_file_stay_and_a_missing_metric_is_an_empty_cell(tmp_path):
    with CSVLogger(tmp_path / "run.csv") as log:
        log.log_metrics({"loss": 1, "accuracy": 0.5}, 1)
        log.log_metrics({"loss": 2}, 2)
        with pytest.raises(ParallelError, match="lr: the columns of the file are time, attempt, step, loss, accuracy;"):
            log.log_metrics({"loss": 3, "lr": 0.1}, 3)
    assert [row["accuracy"] for row in read_csv(tmp_path / "run.csv")] == ["0.5", ""]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ParallelError, match="give another file, or log to a JSONLogger"):
        CSVLogger(tmp_path / "other.csv").log_metrics({"a": 1}, 1)
    assert (tmp_path / "other.csv").read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("metrics", "pattern"),
    [
        ({"loss": torch.zeros(2, 3)}, "loss is a tensor of 2x3 elements; give a number or a tensor of one element"),
        ({"loss": "low"}, "loss is 'low'; give a number"),
        ({"loss": None}, "loss is None; give a number"),
        ({"step": 4}, "step: every row has these; give another name"),
    ],
)
def test_what_is_no_number_is_an_error_in_one_line(tmp_path, metrics, pattern):
    with pytest.raises(ParallelError, match=pattern):
        JSONLogger(tmp_path / "run.jsonl").log_metrics(metrics, 1)


def test_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ParallelError, match=r"CSVLogger\('.*file/run.csv'\): cannot write .*; give a file that may"):
        CSVLogger(tmp_path / "file" / "run.csv").log_metrics({"loss": 1}, 1)
    for every in (0, True, 1.5):
        with pytest.raises(ParallelError, match="a whole number of steps, 1 or more"):
            CSVLogger(tmp_path / "run.csv", every=every)


def test_tensorboard_gets_an_event_file_for_every_run_and_forgets_the_steps_that_are_done_again(tmp_path):
    pytest.importorskip("tensorboardX")
    model().train(2, data(), TensorBoardLogger(tmp_path / "runs"))
    with TensorBoardLogger(tmp_path / "runs") as log:
        log.log_metrics({"loss": 9.0, "eval/accuracy": 0.5}, 4)
    first, second = sorted((read_events(path) for path in (tmp_path / "runs").iterdir()), key=lambda e: e[0].wall_time)
    losses = {event.step: value for event, tag, value in scalars(first) if tag == "loss"}
    assert list(losses) == [1, 2, 3, 4, 5, 6] and losses[1] > losses[4]
    assert {tag for _, tag, _ in scalars(first)} == {"loss", "epoch", "learning_rate", "steps_per_s"}
    assert not any(event.HasField("session_log") for event in first)
    assert [event.step for event in second if event.HasField("session_log")] == [4]
    assert [(tag, value) for _, tag, value in scalars(second)] == [("loss", 9.0), ("eval/accuracy", 0.5)]
    (tmp_path / "file").touch()
    with pytest.raises(ParallelError, match=r"TensorBoardLogger\('.*file/runs'\): cannot write .*; give a directory"):
        TensorBoardLogger(tmp_path / "file" / "runs").log_metrics({"loss": 1}, 1)


def read_events(path):
    """Return the events of a file of TFRecords: length, its checksum, an Event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, events = path.read_bytes(), []
    while data:
        (size,) = struct.unpack_from("<Q", data)
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[12 + size + 4 :]
    return events


def scalars(events):
    return [(event, value.tag, value.simple_value) for event in events for value in event.summary.value]


def test_missing_writer_is_an_error_of_one_line_with_the_command_to_run(tmp_path, monkeypatch):
    for name in ("tensorboardX", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ParallelError, match=r"^TensorBoardLogger: neither .* run: pip install 'msrun\[tensorboard\]'$"):
        TensorBoardLogger(tmp_path / "runs")
    assert not list(tmp_path.iterdir())
